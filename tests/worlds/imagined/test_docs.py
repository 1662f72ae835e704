"""The example of docs/imagined.md runs as it is written, but for the server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "imagined.md").read_text()


def test_the_example_runs(world_address: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gym_pusht")
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert 'ServedWorld("pusht-world", ' in example
    example = example.replace('ServedWorld("pusht-world", ', f'ServedWorld("{world_address}", ')
    exec(compile(example, "docs/imagined.md", "exec"), {"__name__": "example"})
    coverage, shape = capsys.readouterr().out.strip().split(" ", 1)
    assert 0 <= float(coverage) <= 1
    assert shape == "(9, 2)"
