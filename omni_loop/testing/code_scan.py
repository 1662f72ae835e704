"""Finds in source what makes code out of data: unpicklers, ``eval``, loaders that trust what they read."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import util
from pathlib import Path

PACKAGES = ("omni_loop", "omni_loop_policies", "omni_loop_worlds", "omni_loop_envs", "omni_loop_sim_eval")
_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
_CALLS = {"eval", "exec", "compile", "__import__"}
_DOTTED = {
    "os.system",
    "os.popen",
    "yaml.unsafe_load",
    "yaml.full_load",
    "torch.jit.load",
    "torch.hub.load",
    "runpy.run_path",
}


def sources() -> Iterator[Path]:
    """Python files of every package of the project that is installed, but for tests' own helpers."""
    for package in PACKAGES:
        spec = util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(folder).rglob("*.py")):
                if "testing" not in path.relative_to(folder).parts:
                    yield path


def findings(text: str, name: str) -> list[str]:
    """``name:line: what`` of every way from data to code in the source ``text``."""
    found = []
    for node in ast.walk(ast.parse(text)):
        what = _what(node)
        if what:
            found.append(f"{name}:{getattr(node, 'lineno', 0)}: {what}")
    return found


def _what(node: ast.AST) -> str:
    if isinstance(node, ast.Import):
        return ", ".join(f"import {a.name}" for a in node.names if a.name.split(".")[0] in _MODULES)
    if isinstance(node, ast.ImportFrom):
        top = (node.module or "").split(".")[0]
        return f"import from {node.module}" if not node.level and top in _MODULES else ""
    return _call(node) if isinstance(node, ast.Call) else ""


def _call(node: ast.Call) -> str:
    called = ast.unparse(node.func)
    given = {keyword.arg: keyword.value for keyword in node.keywords}
    true = {name for name, value in given.items() if isinstance(value, ast.Constant) and value.value is True}
    if called in _CALLS or called in _DOTTED:
        return f"{called}()"
    if called == "torch.load" and "weights_only" not in true:
        return "torch.load() without weights_only"
    if called == "yaml.load" and "Loader" not in given and len(node.args) < 2:
        return "yaml.load() without a loader"
    trusting = true & {"shell", "allow_pickle", "trust_remote_code"}
    return f"{called}({trusting.pop()}=True)" if trusting else ""
