"""Whose turn it is: the commands of each session in their order, and what becomes of those nobody wants any more.

A command's turn comes when it is the oldest of all its sessions: then it waits in its stage's lane, or, when it runs no
stage, to be handled at once. A stage run on a part (see :class:`~omni_loop.messages.RunStage`) keeps no order: it goes
*aside*, straight to its stage's lane.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable

from ..errors import Reason, StateError
from ..messages import Command, Commit, Discard, Done, ForkSession, Probe, ReleasePayloads, Report, RunStage
from .answers import failure
from .lane import Lane, Work
from .runner import Runner


class Lines:
    """See the module's text. ``clock`` gives nanoseconds, as ``submitted`` of :meth:`add` are."""

    def __init__(self, runner: Runner, clock: Callable[[], int]) -> None:
        self._runner, self._clock = runner, clock
        settings = runner.settings
        wait_ns = int(settings.max_wait_ms * 1e6)
        self._lanes = {name: Lane(name, stage, settings.max_batch, wait_ns) for name, stage in runner.stages.items()}
        self._order = tuple(self._lanes.values())
        self._lines: dict[str, deque[Work]] = {}  # unfinished commands by session, oldest first
        self._now: deque[Work] = deque()  # runs no stage, and its turn has come
        self._count = 0
        self._unfinished = 0
        self._parked = 0  # works in the lanes' ``parked``
        self._unwanted = False  # something in the lanes has been ended
        self._reports: list[Report] = []
        self._held: dict[str, list[Report]] = {}  # by session, until a report that somebody waits for

    def add(self, request: int, command: Command, submitted: int) -> None:
        """Take a command; a later step answers it."""
        self._count += 1
        self._unfinished += 1
        work = Work(self._count, request, command, submitted)
        if work.aside:
            lane = self._lanes.get(run_of(work).stage)
            if lane is None:
                self._now.append(work)
            else:
                lane.asides.append(work)
            return
        if type(command) is Discard:
            self._end(command)
        first = True
        for session in sessions_of(command):
            line = self._lines.get(session)
            if line is None:
                self._lines[session] = deque((work,))
            else:
                line.append(work)
                first = False
        if first:
            self._admit(work)

    def _admit(self, work: Work) -> None:
        """It is first in all its lines."""
        work.turn = True
        command = work.command
        if type(command) is RunStage and not work.ended and (lane := self._lanes.get(command.stage)) is not None:
            # What goes on from staged state would lose it in a batch that is split, and then run on other state.
            work.solo = work.final = self._runner.continues(command)
            insort(lane.waiting, work)
            for aside in lane.asides:  # the whole has come: its parts say nothing new
                if run_of(aside).session == command.session:
                    aside.ended = self._unwanted = True
        else:
            self._now.append(work)

    def _finish(self, work: Work, report: Report) -> None:
        """Answer it; those behind it may have their turn."""
        command = work.command
        self._unfinished -= 1
        if work.aside:
            self._reports.append(report)
            return
        held = self._held
        if type(command) is RunStage and command.unhurried and type(report) is Done and self._followed(command.session):
            held.setdefault(command.session, []).append(report)  # nobody wakes up for it
        else:
            if held:
                for session in sessions_of(command):
                    self._reports += held.pop(session, ())
            self._reports.append(report)
        for session in sessions_of(command):
            line = self._lines[session]
            line.popleft()
            if not line:
                del self._lines[session]
                continue
            head = line[0]
            if all(self._lines[s][0] is head for s in sessions_of(head.command)):
                head.ready = max(head.ready, self._clock())
                self._admit(head)

    def _followed(self, session: str) -> bool:
        return len(self._lines[session]) > 1

    # What nobody wants any more.

    def _end(self, command: Discard) -> None:
        """Of the tick that ``command`` ends, what has not run shall not, and what runs shall end."""
        line = self._lines.get(command.session, ())
        if any(type(w.command) is Commit and w.command.tick == command.tick for w in line):
            return  # it comes too late: what is committed stands
        for work in line:
            if _is_ended_by(work.command, command):
                work.ended = self._unwanted = True
        for lane in self._order:
            for work in lane.asides:
                if _is_ended_by(work.command, command):
                    work.ended = self._unwanted = True

    def _sweep(self) -> None:
        """Answer what was ended, wherever it is; called between two passes."""
        self._unwanted = False
        for lane in self._order:
            for work in [w for w in lane.asides if w.ended]:
                lane.asides.remove(work)
                self._finish(work, Done(work.request))
            for work in [w for w in lane.jobs if w.ended]:
                lane.jobs.remove(work)
                self._runner.undo(run_of(work))
                work.item = work.job = None
                self._cancel(work)
            for work in [w for w in lane.parked if w.ended]:
                self._unpark(lane, work)
                self._cancel(work)
            for work in [w for w in lane.waiting if w.ended]:
                lane.waiting.remove(work)
                self._cancel(work)

    def _cancel(self, work: Work) -> None:
        text = f"stage {run_of(work).stage!r} was ended with its tick"
        error = StateError(text, reason=Reason.CANCELLED, retryable=True)
        self._finish(work, failure(work.request, work.command, error))

    def _unpark(self, lane: Lane, work: Work) -> None:
        lane.parked.remove(work)
        work.parked = False
        self._parked -= 1


def sessions_of(command: Command) -> tuple[str, ...]:
    """Whose order the command keeps. None: it is a ping."""
    kind = type(command)
    if kind is ReleasePayloads:
        return tuple({key.session: None for key in command.keys})  # type: ignore[union-attr]
    if kind is ForkSession and command.child != command.session:  # type: ignore[union-attr]
        return command.session, command.child  # type: ignore[union-attr]
    if kind is Probe:
        return ()
    return (command.session,)  # type: ignore[union-attr]


def run_of(work: Work) -> RunStage:
    assert isinstance(work.command, RunStage)
    return work.command


def _is_ended_by(run: Command, end: Discard) -> bool:
    if type(run) is not RunStage or (run.session, run.epoch, run.tick) != (end.session, end.epoch, end.tick):
        return False
    return run.part > 0 or run.stage in end.stages
