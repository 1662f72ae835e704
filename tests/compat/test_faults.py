"""The table of faults in docs/compat.md names tests that exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (\d+) \|.*\| (.*) \|$", re.MULTILINE)


def test_every_fault_has_a_test_that_exists() -> None:
    rows = ROW.findall((ROOT / "docs/compat.md").read_text())
    assert [int(number) for number, _ in rows] == list(range(1, 17))
    for number, cell in rows:
        named = re.findall(r"`(.+?)::(\w+)`", cell)
        assert named, f"fault {number} has no test"
        for file, test in named:
            tree = ast.parse((ROOT / "tests" / file).read_text())
            found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert test in found, f"fault {number}: {file} has no {test}"
