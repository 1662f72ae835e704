"""Row S8: what is run is what was meant: bandit over the sources, packages pinned with hashes, their licences, and
pip-audit where the index answers questions about vulnerabilities."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..board import Broken, NotRun, expect

ROOT = Path(__file__).parents[3]
SOURCES = ("omni_loop", "policies", "worlds", "envs", "sim_eval", "bench")
#: Findings of medium or high severity by file and bandit's number, and why they stand. One that is gone must leave.
EXPLAINED = {
    ("omni_loop/connect/segments.py", "B108"): "the folder is listed; nothing is made there by a path",
    ("omni_loop/strict.py", "B506"): "the loader is a SafeLoader with fewer types and a bound",
    ("omni_loop/testing/rows/snapshots.py", "B108"): "a text that errors must not hold",
    ("omni_loop/testing/rows/tls.py", "B104"): "the test that binding there is refused",
    (
        "policies/lerobot/checkpoint.py",
        "B615",
    ): "the operator names it; files on a list alone are fetched, none of them Python or pickles",
    ("sim_eval/chart.py", "B704"): "numbers only",
    ("sim_eval/plots.py", "B704"): "numbers, and names that are escaped",
    ("sim_eval/report.py", "B704"): "numbers only",
    ("sim_eval/series.py", "B704"): "numbers only",
}
_FORBIDDEN = (re.compile(r"trust_remote_code\s*=\s*True"), re.compile(r"weights_only\s*=\s*False"))
_COPYLEFT = re.compile(r"\bA?GPL|GNU (Affero )?General Public", re.ASCII)
# Asked for by other packages and run by none of ours; each is a choice that somebody may have to defend.
_KNOWN_LICENCES: dict[str, str] = {}


def measure(seed: int, full: bool) -> float:
    """Findings explained, pins and licences read."""
    if find_spec("bandit") is None:
        raise NotRun("bandit is not installed (extra dev)")
    if not (ROOT / "uv.lock").is_file():
        raise NotRun("the sources are not here, only what was installed")
    if full:
        _audit()
    return _sources() + _pins() + _licences()


def _sources() -> int:
    command = [sys.executable, "-m", "bandit", "-q", "-ll", "-f", "json", "-r", *SOURCES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    try:
        said = json.loads(done.stdout)
    except ValueError:
        raise Broken(f"bandit ended with {done.returncode}: {done.stderr[-300:]}") from None
    expect(not said["errors"], f"bandit could not read all: {said['errors']}")
    found = {(os.path.normpath(one["filename"]), one["test_id"]) for one in said["results"]}
    new = sorted(found - EXPLAINED.keys())
    expect(not new, f"bandit finds what nobody has explained: {new}")
    gone = sorted(EXPLAINED.keys() - found)
    expect(not gone, f"explained, and not found any more: {gone}")
    here = Path(__file__).resolve()
    for path in (path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if path.resolve() != here):
        text = path.read_text(encoding="utf-8")
        for pattern in _FORBIDDEN:
            expect(not pattern.search(text), f"{path.relative_to(ROOT)} holds {pattern.pattern}")
    return len(found)


def _pins() -> int:
    """Every package of every extra has one version and the hashes of its files."""
    packages: list[dict[str, Any]] = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))["package"]
    pinned = 0
    for package in packages:
        if "editable" in package["source"] or "virtual" in package["source"]:
            continue
        files = [*package.get("wheels", ()), *([package["sdist"]] if "sdist" in package else [])]
        expect(bool(files), f"{package['name']} is pinned to no file")
        bare = [file for file in files if not file.get("hash", "").startswith("sha256:")]
        expect(not bare, f"{package['name']} {package['version']} has files without a hash")
        pinned += 1
    return pinned


def _licences() -> int:
    """Of everything that a server needs and that is installed: none asks that what uses it be given away."""
    closure = _needed("omni-loop", {"", "serve"})
    copyleft = {}
    for name in closure:
        about = metadata.metadata(name)
        said = [about.get("License-Expression") or "", *(about.get_all("Classifier") or ())]
        licence = "; ".join(text for text in said if text and ("License ::" in text or "::" not in text))
        if _COPYLEFT.search(licence.replace("LGPL", "")) and "Lesser" not in licence:
            copyleft[name] = licence
    expect(copyleft.keys() <= _KNOWN_LICENCES.keys(), f"licences that nobody has explained: {copyleft}")
    return len(closure)


def _needed(name: str, extras: set[str]) -> set[str]:
    """Distributions that are installed of all that ``name`` with ``extras`` asks for, and so on."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    found: set[str] = set()
    todo = [(name, frozenset(extras))]
    done = set(todo)
    while todo:
        name, wanted = todo.pop()
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue  # of another system, or of an extra that is not installed
        found.add(name)
        for requirement in map(Requirement, requires):
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in (wanted or {""})):
                one = (canonicalize_name(requirement.name), frozenset(requirement.extras))
                if one not in done:
                    done.add(one)
                    todo.append(one)
    return found


def _audit() -> None:
    """Known vulnerabilities of what is installed. An index without such a service answers nothing: see security.md."""
    if find_spec("pip_audit") is None:
        raise NotRun("pip-audit is not installed (extra dev)")
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "-f", "json", "--skip-editable"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        raise Broken(f"pip-audit ended with {done.returncode}: {done.stderr[-300:]}") from None
    known = {one["name"]: [bug["id"] for bug in one["vulns"]] for one in packages if one.get("vulns")}
    expect(not known, f"vulnerabilities are known: {known}")
