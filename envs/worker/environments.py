"""Python environments of simulators whose pins conflict with ours: one folder each, in the user's cache.

They lie in ``$OMNI_LOOP_ENVS``, else in ``omni-loop/envs`` of ``$XDG_CACHE_HOME``, else of ``~/.cache``. One counts as
installed when it was finished with the requirements that this version ships.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from omni_loop._compat import StrEnum
from omni_loop.errors import ConfigError, MissingExtra, UnknownName, nearest

_REQUIREMENTS = Path(__file__).with_name("requirements")
_MARK = "omni-loop.json"  # written last: what was installed
SIDE = Path(__file__).with_name("side") / "__main__.py"

Say = Callable[[str], None]


class State(StrEnum):
    MISSING = "not installed"
    UNFINISHED = "unfinished"
    OUTDATED = "outdated"
    BROKEN = "broken"
    INSTALLED = "installed"


_WHY_NOT = {
    State.MISSING: "is not installed",
    State.UNFINISHED: "was not finished",
    State.OUTDATED: "was made for other requirements",
    State.BROKEN: "has lost its interpreter",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """``module`` is what must be importable there; ``python`` the versions that its pins have wheels for."""

    name: str
    about: str
    module: str
    python: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 12))

    @property
    def requirements(self) -> Path:
        return _REQUIREMENTS / f"{self.name}.txt"

    @property
    def folder(self) -> Path:
        return cache() / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.requirements.read_bytes()).hexdigest()

    @property
    def state(self) -> State:
        if not self.folder.exists():
            return State.MISSING
        try:
            mark = json.loads((self.folder / _MARK).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return State.UNFINISHED
        if not isinstance(mark, dict) or mark.get("requirements") != self.digest:
            return State.OUTDATED
        return State.INSTALLED if self.interpreter.exists() else State.BROKEN


ENVIRONMENTS: Mapping[str, Environment] = {
    entry.name: entry
    for entry in (
        Environment("robosuite", "robosuite 1.5.2: Lift, Stack, PickPlaceCan, NutAssembly, Door, ...", "robosuite"),
        Environment("libero", "LIBERO and LIBERO-PRO on robosuite 1.4.0, with their assets", "libero"),
    )
}


def cache() -> Path:
    """The folder that environments lie in."""
    if own := os.environ.get("OMNI_LOOP_ENVS"):
        return Path(own).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "omni-loop" / "envs"


def find(name: str) -> Environment:
    """The environment called ``name``, or :class:`UnknownName`."""
    if name not in ENVIRONMENTS:
        raise UnknownName(f"no env has an environment of its own called {name!r}.{nearest(name, ENVIRONMENTS)}")
    return ENVIRONMENTS[name]


def command(name: str) -> tuple[str, ...]:
    """What starts a worker in the environment of ``name``: in isolation, so that nothing of ours is imported there.

    Raises:
        MissingExtra: it is not installed, or not as this version needs it; the text says how it is.
    """
    environment = find(name)
    state = environment.state
    if state is not State.INSTALLED:
        why = f"env {name!r} runs in a Python environment of its own, which {_WHY_NOT[state]}"
        raise MissingExtra(f"{why}: omni-loop envs install {name}")
    return (str(environment.interpreter), "-I", str(SIDE))


def install(name: str, *, again: bool = False, python: str | None = None, say: Say = print) -> bool:
    """Make the environment of ``name``; False when it is there already. ``again`` makes it anew. ``python``: path or
    version of the interpreter instead of this one's. uv is used where there is one, else venv and pip.

    Raises:
        UnknownName: no such environment. ConfigError: it cannot be made; the tool's own output was said before.
    """
    environment = find(name)
    with _only_one(environment.folder):
        if environment.state is State.INSTALLED and not again:
            return False
        if environment.folder.exists():
            say(f"removing {environment.folder}")
            shutil.rmtree(environment.folder)
        interpreter = python or sys.executable
        tool = _uv()
        say(f"making {environment.folder} with {'uv' if tool else 'venv and pip'}")
        folder, own = str(environment.folder), str(environment.interpreter)
        lines = ("--no-deps", "-r", str(environment.requirements))  # the list is whole: nothing is resolved here
        if tool:
            _run((*tool, "venv", "--quiet", "--python", interpreter, folder), "uv venv")
            _check_python(environment)
            _run((*tool, "pip", "install", "--python", own, *lines), "uv pip install")
        else:
            _run((interpreter, "-m", "venv", folder), "venv")
            _check_python(environment)
            _run((own, "-m", "pip", "install", *lines), "pip install")
        _import(environment)
        mark = json.dumps({"requirements": environment.digest, "python": _version(environment.interpreter)})
        (environment.folder / _MARK).write_text(mark, encoding="utf-8")
        return True


def _import(environment: Environment) -> None:
    """See that the simulator can be imported. It may warn, which is shown only when it fails."""
    arguments = (str(environment.interpreter), "-I", "-c", f"import {environment.module}")
    done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"{environment.module} was installed, but cannot be imported: {last}")


def _check_python(environment: Environment) -> None:
    version = _version(environment.interpreter)
    low, high = environment.python
    if not low <= version <= high:
        shutil.rmtree(environment.folder)
        wanted, given = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}", f"{version[0]}.{version[1]}"
        raise ConfigError(
            f"env {environment.name!r} needs Python {wanted}, and this is {given}: name another by --python"
        )


def _version(interpreter: Path) -> tuple[int, int]:
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([str(interpreter), "-I", "-c", code], stdout=-1, text=True, check=True, timeout=60)
        major, minor = map(int, done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        raise ConfigError("the interpreter of the new environment does not run") from None
    return major, minor


def _uv() -> tuple[str, ...] | None:
    """uv's command, if it runs: on the path, or as a module of this environment."""
    for candidate in ((shutil.which("uv") or "",), (sys.executable, "-m", "uv")):
        if candidate[0]:
            done = subprocess.run([*candidate, "--version"], capture_output=True, timeout=60)
            if done.returncode == 0:
                return candidate
    return None


def _run(arguments: Sequence[str], what: str) -> None:
    try:
        done = subprocess.run(arguments)
    except OSError as e:
        raise ConfigError(f"{what} cannot be started: {e.strerror}") from None
    if done.returncode:
        raise ConfigError(f"{what} failed with exit code {done.returncode}; what it said stands above")


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Two installations into one folder wait for each other."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f"{folder.name}.lock").open("w")
    except OSError as e:
        raise ConfigError(f"cannot write into the folder for environments: {e.strerror}") from None
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
