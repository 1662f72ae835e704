"""A finished run, read from its folder: its rows, its numbers and what it was a run of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omni_loop.errors import ConfigError

from . import rows as rows_
from .rows import Row, by_task
from .versions import OF

_SAME = ("env", "env_options", "action_repeat")  # of a suite: what makes an episode of a seed the same episode


@dataclass(frozen=True, slots=True)
class StoredRun:
    """``summary``: of ``summary.json``; ``said``: of a suite, by dotted name, from ``run.json``, empty in folders
    written before there was one."""

    folder: Path
    rows: list[Row]
    summary: Mapping[str, Any]
    said: Mapping[str, Any] = field(default_factory=dict)

    @property
    def suite(self) -> str:
        return str(self.summary.get("suite", self.folder.name))

    @property
    def env(self) -> str:
        return str(self.summary.get("env", ""))

    @property
    def place(self) -> str:
        """The env, and where it is any of many what its options say that it is."""
        options = self.said.get("suite.env_options")
        which = next((options[k] for k in ("id", "type") if k in options), "") if isinstance(options, Mapping) else ""
        return f"{self.env}: {which}" if which else self.env

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(by_task(self.rows))

    @property
    def policy(self) -> str:
        """Who acted, a pipeline or a bound, and of a live run how late."""
        live = self.said.get("suite.live")
        acted = str(self.summary.get("pipeline", ""))
        if self.said.get("suite.mode") != "live" or not isinstance(live, Mapping):
            return acted
        ms, chunks = live.get("latency_ms"), live.get("chunks")
        return f"{acted}, live at {ms:g} ms ({chunks})" if isinstance(ms, (int, float)) else f"{acted}, live"

    def world(self) -> dict[str, Any]:
        """What of the env an outcome depends on besides its seed, by name; of an old folder the env alone."""
        return world(self.env, self.tasks, self.said)


def world(env: str, tasks: Iterable[str], said: Mapping[str, Any]) -> dict[str, Any]:
    """What of the env the outcomes of ``tasks`` depend on besides their seeds, by name; ``said``: of a suite, by dotted
    name (:func:`.store.fingerprint`)."""
    found = {name: said[f"suite.{name}"] for name in _SAME if f"suite.{name}" in said}
    found |= {f"version of {name.removeprefix(OF)}": said[name] for name in sorted(said) if name.startswith(OF)}
    for task in tasks:
        own = said.get(f"suite.tasks.{task}")
        if isinstance(own, Mapping):
            found |= {f"{name} of {task or 'the task'}": own.get(name) for name in ("env_options", "max_steps")}
    return {"env": env, **found}


def refuse_others(a: Mapping[str, Any], b: Mapping[str, Any], name_a: object, name_b: object) -> None:
    """Refuse to pair what was run in other worlds. Raises :class:`ConfigError`; the text says what differs."""
    if differs := difference(a, b, name_a, name_b):
        raise ConfigError(f"the runs cannot be paired: {differs}")


def difference(a: Mapping[str, Any], b: Mapping[str, Any], name_a: object, name_b: object) -> str:
    """The first thing that two worlds have differently; empty: nothing."""
    for name in a:
        if name in b and a[name] != b[name]:
            return f"{name} is {a[name]!r:.80} in {name_a} and {b[name]!r:.80} in {name_b}"
    return ""


def load(folder: Path, option: str = "") -> StoredRun:
    """The run in ``folder``; ``option`` named it.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    about = f"{option}: " if option else ""
    found = rows_.read(folder, option)
    if not found:
        raise ConfigError(f"{about}{folder} is of a run without a single episode")
    summary = _json(folder / "summary.json", about)
    fingerprint = _json(folder / "run.json", about).get("fingerprint", {})
    return StoredRun(folder, found, summary, fingerprint if isinstance(fingerprint, Mapping) else {})


def _json(path: Path, about: str) -> Mapping[str, Any]:
    """An object; empty when there is no such file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as e:
        raise ConfigError(f"{about}cannot read {path}: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{about}{path} is no JSON: {e}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{about}{path} holds a {type(data).__name__}, wanted an object")
    return data


def find(folders: Iterable[Path]) -> list[Path]:
    """Folders of runs: those given, and those up to two levels below one that is none itself.

    Raises:
        ConfigError: in or below one there is no run.
    """
    found: dict[Path, None] = {}
    for folder in folders:
        if (folder / "episodes.json").is_file():
            found[folder] = None
            continue
        below = sorted(p.parent for pattern in ("*/episodes.json", "*/*/episodes.json") for p in folder.glob(pattern))
        if not below:
            raise ConfigError(f"there is no run in {folder}: name a folder written by --out, or one of such folders")
        found |= dict.fromkeys(below)
    return list(found)
