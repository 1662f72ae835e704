"""Plays on disk: one line of JSON each, so that an experiment that was ended goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from omni_loop.errors import ConfigError

from .play import Played, Said
from .store import OtherRun

JOURNAL = "plays.jsonl"


@dataclass(frozen=True, slots=True)
class Play:
    """What ``policy`` did in ``place``, from step ``step`` of the run of ``seed``."""

    policy: str
    place: str
    seed: int
    step: int
    played: Played

    @property
    def key(self) -> tuple[str, str, int, int]:
        return self.policy, self.place, self.seed, self.step


class Plays:
    """All plays of one experiment in ``folder``; ``said`` is what they are a function of.

    Raises:
        OtherRun: the folder holds plays of another experiment.
        ConfigError: its journal cannot be read or written.
    """

    def __init__(self, folder: Path, said: Mapping[str, Any], fresh: bool = False) -> None:
        self._path = folder / JOURNAL
        self._known: dict[tuple[str, str, int, int], Play] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh:
                self._path.unlink(missing_ok=True)
            before = self._read()
            if differing := [k for k, v in said.items() if k in before and before[k] != v]:
                raise OtherRun(
                    f"{folder} holds plays of another experiment; what differs: {', '.join(differing)}. "
                    "Name another folder, or begin anew with --fresh"
                )
            if new := {k: v for k, v in said.items() if k not in before}:
                self._write({"said": new})
        except OSError as e:
            raise ConfigError(f"cannot keep plays in {folder}: {e.strerror}") from None

    def has(self, policy: str, place: str, seed: int, step: int) -> bool:
        return (policy, place, seed, step) in self._known

    def of(self, policy: str, place: str) -> list[Play]:
        """By seed and step."""
        found = [p for p in self._known.values() if (p.policy, p.place) == (policy, place)]
        return sorted(found, key=lambda p: p.key)

    def append(self, play: Play) -> None:
        """Keep ``play``; on the disk when this returns."""
        said = [[s.step, round(s.progress, 5), round(s.done, 5), round(s.score, 5)] for s in play.played.said]
        row = {"scores": [round(float(s), 5) for s in play.played.scores], "success": play.played.success, "said": said}
        self._write({"play": [*play.key], **row})
        self._known[play.key] = _play({"play": play.key, **row})  # as it will be read, to the digit

    def _write(self, row: Mapping[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _read(self) -> dict[str, Any]:
        """What the journal holds; a last line without its end was torn and is cut off."""
        said: dict[str, Any] = {}
        if not self._path.exists():
            return said
        data = self._path.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) != len(data):
            os.truncate(self._path, len(whole))
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                if "said" in row and "play" not in row:
                    said |= row["said"]
                    continue
                play = _play(row)
            except (ValueError, KeyError, TypeError) as e:
                raise ConfigError(f"{self._path}, line {number}: no play: {type(e).__name__}: {e}") from None
            self._known.setdefault(play.key, play)
        return said


def _play(row: Mapping[str, Any]) -> Play:
    said = tuple(Said(*s) for s in row["said"])
    policy, place, seed, step = row["play"]
    return Play(policy, place, seed, step, Played(np.array(row["scores"], np.float64), bool(row["success"]), said))
