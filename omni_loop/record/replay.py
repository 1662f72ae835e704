"""Recorded sessions lived through again on a server, one call after the other, and what came out otherwise.

Whatever a session's state is a function of is repeated: seed, prompt, options, epochs, every op with what was sent, the
actions that had been executed, rewinds, resets and forks, in the order of the recording. Noise is a function of (seed,
epoch, tick, stage), so against the same deployment a session that was served alone comes out bit for bit. One that was
batched with others may differ in the last bits, as a batch of another shape may; ``tolerance`` allows for that.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidInput, OmniLoopError
from ..types import Array, Op, SessionSpec, TickResult
from .differences import Difference, EpisodeReport, Report, compare
from .reader import Episode, Recording
from .script import Act, script
from .table import Tick

_MOST_EPOCHS = 10_000  # each is a reset to repeat


class Session(Protocol):
    """What a replay needs of a session; :class:`omni_loop.client.Session` has it."""

    @property
    def epoch(self) -> int: ...

    @property
    def spec(self) -> SessionSpec: ...

    def infer(
        self, arrays: Mapping[str, Array], step: int, *, executed: NDArray[np.float32] | None, frames: int
    ) -> TickResult: ...

    def predict(self, actions: NDArray[np.float32] | None, *, steps: int) -> TickResult: ...

    def recondition(
        self, arrays: Mapping[str, Array], *, executed: NDArray[np.float32] | None, first_step: int
    ) -> TickResult: ...

    def plan(self, **asked: Any) -> TickResult: ...

    def fork(self, *, seed: int | None) -> Any: ...

    def rewind(self, step: int) -> int: ...

    def reset(self, *, seed: int | None, prompt: str | None) -> int: ...

    def close(self) -> None: ...


class Client(Protocol):
    """A connection to the server that is to repeat what was recorded."""

    def open(
        self, pipeline: str, *, prompt: str, seed: int, keys: Sequence[str], options: Mapping[str, Any]
    ) -> Any: ...

    def restore(self, name: str) -> Any: ...


def replay(
    client: Client,
    recording: Recording,
    wanted: Sequence[Episode] | None = None,
    *,
    tolerance: float = 0.0,
    pixels: float = 0.0,
    on_tick: Callable[[Difference], None] | None = None,
) -> Report:
    """Repeat the episodes ``wanted`` (None: all) of ``recording``; those they were forked from are repeated too.

    Whatever the server refuses is a difference of its tick, or the reason why an episode was skipped; nothing raises
    but :class:`~omni_loop.record.reader.RecordingError` for a recording that cannot be read.
    """
    chosen = list(recording) if wanted is None else list(wanted)
    indices = {episode.name: i for i, episode in enumerate(recording)}
    run = _Replay(client, on_tick or (lambda difference: None), indices)
    try:
        for act in script(recording, chosen):
            run.do(act)
    finally:
        run.close()
    names = {episode.name for episode in chosen}
    reports = sorted((r for r in run.reports.values() if r.name in names), key=lambda report: report.index)
    return Report(reports, tolerance, pixels, _missing(recording, names))


def _missing(recording: Recording, names: Container[str]) -> list[str]:
    """What should have been replayed and is not here: of sessions that are wanted whole, and of a whole recording."""
    left = [episode for episode in recording if episode.name not in names]
    partly = {episode.session for episode in left}
    holes = [
        f"session {session}: episode {number} of it is missing"
        for session, numbers in recording.missing.items()
        if session not in partly
        for number in numbers
    ]
    return [*holes, *(() if left else recording.broken.values())]


@dataclass(slots=True)
class _Replay:
    client: Client
    on_tick: Callable[[Difference], None]
    indices: Mapping[str, int]
    reports: dict[str, EpisodeReport] = field(default_factory=dict)
    live: dict[str, Session] = field(default_factory=dict)  # by recorded session
    saved: dict[str, Session] = field(default_factory=dict)  # forks that stand for snapshots, by name

    def do(self, act: Act) -> None:
        episode = act.episode
        report = self.reports.get(episode.name) or self._report(episode)
        if act.do == "end":
            report.skipped = report.skipped or episode.incomplete
            self._end(report, goes_on=bool(act.event and act.event["goes_on"]))
            return
        if report.skipped and act.do != "begin":
            return
        try:
            if act.do == "begin":
                self._begin(episode)
            elif act.do == "tick" and act.tick is not None:
                self._tick(report, episode, act.tick)
            elif act.do == "lost":
                report.skipped = "ticks were lost when it was recorded; what follows depends on them"
            elif act.event is not None:
                self._turn(episode, act.event)
        except OmniLoopError as error:
            report.skipped = error.text

    def _report(self, episode: Episode) -> EpisodeReport:
        report = EpisodeReport(episode.name, episode.session, episode.length, unit=episode.spec.action.unit)
        report.index = self.indices[episode.name]
        self.reports[episode.name] = report
        return report

    def _end(self, report: EpisodeReport, goes_on: bool) -> None:
        """A server has room for only so many sessions; and where a session is lost, what is next begins anew."""
        if (report.skipped or not goes_on) and (session := self.live.pop(report.session, None)) is not None:
            try:
                session.close()
            except OmniLoopError as error:
                report.skipped = report.skipped or f"its session could not be closed: {error.text}"

    def close(self) -> None:
        for session in (*self.live.values(), *self.saved.values()):
            session.close()
        self.live, self.saved = {}, {}

    def _begin(self, episode: Episode) -> None:
        begin, missing = episode.begin, sorted(set(episode.keys) - set(episode.kept))
        old = self.live.get(episode.session)
        if missing and episode.length:
            raise InvalidInput(f"the observation keys {', '.join(missing)} were not recorded")
        if begin["event"] == "reset" and old is not None and old.epoch == begin["epoch"] - 1:
            old.reset(seed=begin["seed"], prompt=begin["prompt"] if old.spec.prompt else None)
            return
        if old is not None:
            del self.live[episode.session]
            old.close()
        self.live[episode.session] = self._opened(episode)

    def _opened(self, episode: Episode) -> Session:
        begin = episode.begin
        if begin["event"] == "fork":
            if begin["source"] not in self.live:
                raise InvalidInput(f"the session {begin['source']} it was forked from was not recorded")
            forked: Session = self.live[begin["source"]].fork(seed=begin["seed"])
            return forked
        if begin["event"] == "restore":
            held = self.saved.get(begin["source"])
            restored: Session = self.client.restore(begin["source"]) if held is None else held.fork(seed=begin["seed"])
            return restored
        if begin["epoch"] > min(begin["order"], _MOST_EPOCHS):
            raise InvalidInput(f"it says that it began in epoch {begin['epoch']}, which is not plausible")
        session: Session = self.client.open(
            episode.spec.pipeline,
            prompt=begin["prompt"],
            seed=begin["seed"],
            keys=episode.keys,
            options=episode.options,
        )
        while session.epoch < begin["epoch"]:  # noise is a function of the epoch too
            session.reset(seed=None, prompt=None)
        return session

    def _turn(self, episode: Episode, event: Mapping[str, Any]) -> None:
        session = self.live[episode.session]
        if event["event"] == "rewind":
            session.rewind(event["step"])
        else:
            older = self.saved.pop(event["name"], None)
            if older is not None:
                older.close()
            self.saved[event["name"]] = session.fork(seed=None)

    def _tick(self, report: EpisodeReport, episode: Episode, tick: Tick) -> None:
        session, other = self.live[episode.session], ""
        if tick.seed != episode.begin["seed"]:
            other = f"ran under seed {tick.seed}, and its episode under {episode.begin['seed']}"
        elif tick.epoch != session.epoch:
            other = f"ran in epoch {tick.epoch}, now in {session.epoch}"
        try:
            now = _ask(session, tick)
        except OmniLoopError as error:
            report.ticks.append(Difference(tick.seq, tick.op, tick.step, error=error.text))
            self.on_tick(report.ticks[-1])
            raise
        report.ticks.append(compare(tick, now, other))
        self.on_tick(report.ticks[-1])


def _ask(session: Session, tick: Tick) -> TickResult:
    executed = tick.executed if tick.executed is not None and len(tick.executed) else None
    if tick.op is Op.INFER:
        return session.infer(tick.arrays, tick.step, executed=executed, frames=tick.frames)
    if tick.op is Op.RECONDITION:
        return session.recondition(tick.arrays, executed=executed, first_step=tick.step)
    if tick.op is Op.PREDICT:
        return session.predict(tick.actions, steps=0 if tick.actions is not None else tick.steps)
    return session.plan(**(tick.plan or {}))
