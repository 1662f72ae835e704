"""The examples of docs/guide.md as files: each block's first line names it, as in ```` ```python my_policy.py ````."""

from __future__ import annotations

import atexit
import re
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from types import ModuleType

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "guide.md"
BLOCKS = dict[str, str](re.findall(r"^```\w+ (\S+)\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE))
ADDRESS = "127.0.0.1:50051"

_kept = tempfile.TemporaryDirectory(prefix="guide-")
atexit.register(_kept.cleanup)
FOLDER = Path(_kept.name)
for _name, _text in BLOCKS.items():
    (FOLDER / _name).write_text(_text)


def module(name: str) -> ModuleType:
    """A block by the name of its file, imported as a user's module is: from a folder on the path."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    return import_module(name.removesuffix(".py"))


def lines(*names: str) -> int:
    """Lines of code of several blocks together; empty ones do not count."""
    return sum(bool(line.strip()) for name in names for line in BLOCKS[name].splitlines())
