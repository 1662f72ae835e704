"""Texts of a deployment that become names and paths."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from .messages import Scalar

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MAX_PATH = 4000  # bytes, somewhat below what systems take
_MAX_OPTION = 1 << 14  # characters: a negative prompt is long


def short(text: str) -> str:
    """``text`` as a message shows it."""
    return repr(text if len(text) <= 100 else f"{text[:100]}...")


def check_text(option: str, value: Scalar) -> None:
    """Raises ValueError for an option that holds NUL, or is longer than any real one."""
    if isinstance(value, str) and ("\0" in value or len(value) > _MAX_OPTION):
        what = "holds the character NUL" if "\0" in value else f"has {len(value)} characters; at most {_MAX_OPTION}"
        raise ValueError(f"{option} {what}")


def _folder(path: str) -> str:
    if not path or "\0" in path or len(path.encode()) > _MAX_PATH:
        raise ValueError(f"{short(path)} is no path of a folder")
    if path.startswith("~"):
        raise ValueError(f"{short(path)}: '~' is not expanded here; write the whole path")
    return path


#: A path of a folder, as the system takes it.
Folder = Annotated[str, AfterValidator(_folder)]
