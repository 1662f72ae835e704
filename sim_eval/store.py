"""A run's folder: what it is of (``run.json``) and every finished episode (``episodes.jsonl``, the journal).

An episode is appended as one line and synced to the disk before anybody hears of it, so that a run that is killed
loses no more than the episodes under way. The same command again goes on: what the journal holds is not run again. A
line that was torn by the kill is dropped. What else lies in the folder is made of these two files.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from omni_loop.config import validate
from omni_loop.errors import ConfigError, InvalidInput, OmniLoopError, Reason
from omni_loop.types import ArraySpec, Op, SessionSpec

from . import journal_line
from .results import EpisodeResult
from .suite import EvalSuite

RUN, JOURNAL = "run.json", "episodes.jsonl"
_FORMAT = 1
# Of a suite, what no result depends on: it may differ between the parts of one run.
FREE = frozenset({"description", "workers", "retries", "videos", "interval", "time_limit_s", "episodes"})


class OtherRun(OmniLoopError):
    """The folder holds episodes of another run: of another suite, policy or env."""

    reason = Reason.BAD_CONFIG


def fingerprint(suite: EvalSuite, **more: Any) -> dict[str, Any]:
    """What a result is a function of besides task and seed, by dotted name. ``more``: what the suite does not say, such
    as the versions of env and policy; None is left out. Tasks have an entry each, so that one may be added later."""
    fields = suite.model_dump(mode="json", exclude={*FREE, "tasks"})
    said = {f"suite.{name}": value for name, value in fields.items()}
    said |= {f"suite.tasks.{name}": suite.task(name).model_dump(mode="json") for name in suite.task_names}
    return said | {name: value for name, value in more.items() if value is not None}


class Store:
    """The folder of one run. Belongs to one process at a time. ``fresh``: what it holds goes away."""

    def __init__(self, folder: Path, fresh: bool = False) -> None:
        self.folder = folder
        self._fresh = fresh
        self._policy: str | None = None
        self.results: dict[tuple[str, int], EpisodeResult] = {}  # of the journal, by task and episode
        self._fd = -1

    @property
    def holds_results(self) -> bool:
        """Whether :meth:`begin` will find episodes to go on from.

        Raises:
            ConfigError: the journal cannot be read.
        """
        return not self._fresh and bool(read_journal(self.folder))

    @property
    def ended_s(self) -> float:
        """Seconds that the run had taken when its last episode ended."""
        return max((r.ended_s for r in self.results.values()), default=0.0)

    def begin(self, suite: EvalSuite, versions: Mapping[str, str | None], head: Mapping[str, Any]) -> None:
        """Open the journal for a run of ``suite`` with ``versions`` of policy and env, and read what it holds. ``head``
        is kept in ``run.json`` besides. Refused, the folder is as it was.

        Raises:
            OtherRun: the folder holds episodes of another one; the text says what differs.
            ConfigError: it cannot be read or written, or another process is writing there.
        """
        now = fingerprint(suite, **versions)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self._go_on(now, head)
        except BaseException as e:
            self.close()
            if isinstance(e, OSError):
                raise ConfigError(f"cannot write the journal of {self.folder}: {e.strerror}") from None
            raise

    def append(self, result: EpisodeResult) -> None:
        """Keep ``result``: on the disk when this returns.

        Raises:
            OtherRun: it is of another policy than the episodes before it; nothing is kept.
        """
        if result.policy_revision:
            self._policy = self._policy or result.policy_revision
            if result.policy_revision != self._policy:
                self._refuse_others([], {"policy": self._policy}, {"policy": result.policy_revision})
        _write_line(self._fd, journal_line.encode(result).encode() + b"\n")
        self.results[result.task, result.episode] = result

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _refuse_others(self, results: Sequence[Any], before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        differing = [
            f"{name} was {before[name]!r:.80}, is {now[name]!r:.80}"
            for name in sorted(before.keys() & now.keys())
            if before[name] != now[name]
        ]
        if differing:
            held = f"{len(results)} episodes" if results else "episodes"
            raise OtherRun(
                f"{self.folder} holds {held} of another run; what differs: {'; '.join(differing)}. "
                "Name another folder, or begin anew with --fresh"
            )

    def _lock(self) -> None:
        """Open the journal, for this process alone. Nothing in the folder changes before that."""
        self.close()
        self._fd = os.open(self.folder / JOURNAL, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # ends with the process, however that ends
        except BlockingIOError:
            text = f"another run is writing into {self.folder}: wait for it, or name another folder"
            raise ConfigError(text) from None

    def _go_on(self, now: Mapping[str, Any], head: Mapping[str, Any]) -> None:
        """Append after the last whole line. ``run.json`` comes last: killed before that, the folder holds the run that
        it held, or with ``fresh`` one without an episode, of which ``run.json`` says nothing that counts."""
        if self._fresh:
            os.ftruncate(self._fd, 0)  # not another file: the lock is on this one
        whole = _whole(os.pread(self._fd, os.fstat(self._fd).st_size, 0))
        results = _decode(whole, self.folder / JOURNAL)
        self._policy = next((r.policy_revision for r in results if r.policy_revision), None)
        before = read_head(self.folder)["fingerprint"] if results else {}
        self._refuse_others(results, {**before, **({"policy": self._policy} if self._policy else {})}, now)
        self.results = {(r.task, r.episode): r for r in results}
        os.ftruncate(self._fd, len(whole))
        os.lseek(self._fd, len(whole), os.SEEK_SET)
        # The policy's revision stands in every line of the journal.
        said = {**before, **{name: value for name, value in now.items() if name != "policy"}}
        _replace(self.folder / RUN, {"format": _FORMAT, "fingerprint": said, **head})


def load(folder: Path) -> tuple[EvalSuite, SessionSpec, str | None, list[EpisodeResult]]:
    """The run in ``folder``: suite, the pipeline's spec, what the env calls its score, and every finished episode.

    Raises:
        ConfigError: it holds no run, or one that cannot be read.
    """
    head = read_head(folder)
    try:
        suite, spec = validate(EvalSuite, head["suite"], str(folder / RUN)), spec_from_json(head["spec"])
        score = None if head["score"] is None else str(head["score"])
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise ConfigError(f"{folder / RUN} describes no run: {type(e).__name__}: {e}") from None
    return suite, spec, score, read_journal(folder)


def _write_line(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
    os.fsync(fd)


def _whole(data: bytes) -> bytes:
    """``data`` without a last line that has no end."""
    return data[: data.rfind(b"\n") + 1]


def read_journal(folder: Path) -> list[EpisodeResult]:
    """Every finished episode, in the order in which they ended; none without a journal. One that broke and was run
    again stands there twice and counts once, as it was last.

    Raises:
        ConfigError: a line other than the last is none of a journal.
    """
    path = folder / JOURNAL
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    return _decode(_whole(data), path)


def _decode(data: bytes, path: Path) -> list[EpisodeResult]:
    found: dict[tuple[str, int], EpisodeResult] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            result = journal_line.decode(line)
        except InvalidInput as e:
            raise ConfigError(f"{path}, line {number}: {e.text}") from None
        found[result.task, result.episode] = result
    return list(found.values())


def read_head(folder: Path) -> dict[str, Any]:
    """``run.json``.

    Raises:
        ConfigError: there is none, or it is of another format.
    """
    path = folder / RUN
    try:
        head = json.loads(path.read_text(encoding="utf-8"))
        if head["format"] != _FORMAT or not isinstance(head["fingerprint"], dict):
            raise ConfigError(f"{path} is of format {head['format']}, wanted {_FORMAT}")
        return dict(head)
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no {RUN}: name a folder written by omni-loop eval") from None
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ConfigError(f"{path} describes no run: {type(e).__name__}: {e}") from None


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write ``path`` so that it is there whole, before and after, whatever happens in between."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def spec_to_json(spec: SessionSpec) -> dict[str, Any]:
    """For :func:`spec_from_json`."""
    return asdict(spec)


def spec_from_json(data: Mapping[str, Any]) -> SessionSpec:
    """The spec that :func:`spec_to_json` wrote."""
    arrays = {k: ArraySpec(**a) for k, a in data.items() if k in ("action", "frame") and a is not None}
    observations = tuple(ArraySpec(**o) for o in data["observations"])
    return SessionSpec(**{**data, **arrays, "observations": observations, "ops": tuple(Op(o) for o in data["ops"])})
