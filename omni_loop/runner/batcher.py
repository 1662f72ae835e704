"""What a runner does next: one class without threads, queues or sleep, driven by whoever has them.

Commands of one session keep their order; those of different sessions meet in batches::

    add -> the session's line -> its turn: a command that runs no stage -> at once
                                           RunStage -> its stage's lane -> a batch, or a job that joins between passes

A driver adds what has arrived, calls :meth:`Batcher.step` (at most one forward pass) and sends the reports, and sleeps
for :meth:`Batcher.wait_s` when nothing is due. Every command is answered exactly once.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..errors import Exhausted, Reason
from ..messages import Answer, CloseSession, Command, Done, Part, ReleasePayloads, Report
from ..stage import Job, SteppedStage, in_steps
from .answers import check_count, failure, outputs_of, public
from .lane import Lane, Work
from .lines import Lines, run_of
from .runner import Runner

_SCARCE = (Reason.OUT_OF_BLOCKS, Reason.OUT_OF_BYTES)
_ASIDE_SHARE = 0.1  # of the time that other work is due in


class Batcher(Lines):
    """See the module's text. Not thread-safe. ``clock`` gives nanoseconds, as ``submitted`` of :meth:`add` are."""

    def __init__(self, runner: Runner, clock: Callable[[], int] = time.monotonic_ns) -> None:
        super().__init__(runner, clock)
        self._queue_ns = int(runner.settings.queue_ms * 1e6)
        self._turn = 0  # of the lane that is served next
        self._owed = False  # a forward pass, since commands went before it
        self._aside_due = 0  # when parts may be looked at again although other work is due
        self._draining = False

    def step(self) -> list[Report]:
        """Execute the commands whose turn it is, or one forward pass; the answers there are."""
        reports: list[Report] = []
        self._reports = reports
        if self._unwanted:
            self._sweep()
        if not self._now:
            self._pass()
            self._owed = False
        elif self._owed and self._pass():
            self._owed = False
        else:
            while self._now:
                self._handle(self._now.popleft())
            self._owed = True
        if self._parked:
            self._review()
        return reports

    def wait_s(self) -> float | None:
        """How long nothing is due unless a command comes: 0 when something is, None when everything is answered."""
        if not self._unfinished:
            return None
        if self._now or self._unwanted:
            return 0.0
        now, until = self._clock(), None
        for lane in self._order:
            if lane.jobs or lane.asides:
                return 0.0
            if lane.waiting:
                due = now if self._draining else lane.due(now)
                until = due if until is None else min(until, due)
            for work in lane.parked:
                until = work.give_up if until is None else min(until, work.give_up)
        return 0.0 if until is None else max(0, until - now) / 1e9

    def drain(self) -> Iterator[list[Report]]:
        """Step until everything is answered, waiting for nobody: no more commands will come meanwhile."""
        self._draining = True
        try:
            while self._unfinished:
                yield self.step()
        finally:
            self._draining = False

    def handle(self, request: int, command: Command) -> Answer:
        """Answer one command at once; nothing else may be under way, and what it shows meanwhile is left out."""
        self.add(request, command, self._clock())
        (answer,) = (r for reports in self.drain() for r in reports if not isinstance(r, Part))
        return answer

    def _handle(self, work: Work) -> None:
        command = work.command
        if work.ended:
            self._cancel(work)
            return
        report = self._runner.handle(work.request, command, (self._clock() - work.ready) / 1e6)
        if type(command) is CloseSession:
            for lane in self._order:
                lane.forget(command.session)
        if self._parked and type(command) is not ReleasePayloads:
            self._made_room()
        self._finish(work, report)

    # Forward passes.

    def _pass(self) -> bool:
        """One forward pass of the lane whose turn it is, round robin among those with work. False: none has any.
        Parts are looked at first, but take no more than their share of the time."""
        lanes, now = self._order, self._clock()
        if now >= self._aside_due and self._run_aside(one_each=True):
            return True
        for i in range(len(lanes)):
            at = (self._turn + i) % len(lanes)
            lane = lanes[at]
            if lane.jobs or (lane.waiting and (self._draining or lane.due(now) <= now)):
                self._turn = (at + 1) % len(lanes)
                if lane.stepped is not None:
                    self._advance(lane, lane.stepped)
                else:
                    self._run(lane, self._begun(lane))
                return True
        return self._run_aside(one_each=False)

    def _run_aside(self, one_each: bool) -> bool:
        """A batch of parts, of the lane with the oldest one. False: there is none. ``one_each`` of a session when other
        work is due, so that it waits no longer for many than for one."""
        waiting = [lane for lane in self._order if lane.asides]
        if not waiting:
            return False
        lane = min(waiting, key=lambda lane: lane.asides[0].age)
        begin = self._clock()
        works = lane.take_aside(one_each)
        for work in works:
            work.began = begin
        self._run(lane, [work for work in works if self._prepare(work)])
        now = self._clock()
        self._aside_due = now + int((now - begin) * (1 / _ASIDE_SHARE - 1))
        return True

    def _begun(self, lane: Lane) -> list[Work]:
        """Those of the lane that may run now, with open transactions."""
        works = lane.take()
        now = self._clock() if works else 0
        for work in works:
            work.began = work.began or now
        return [work for work in works if self._prepare(work)]

    def _prepare(self, work: Work) -> bool:
        try:
            work.item = self._runner.prepare(run_of(work))
        except Exception as e:
            self._finish(work, failure(work.request, work.command, e))
            return False
        return True

    def _run(self, lane: Lane, works: list[Work]) -> None:
        """Run a batch to its end; when it fails as a whole, its halves."""
        if not works:
            return
        if len(works) > 1:
            for work in works:
                work.company = True
        begin = self._clock()
        try:
            with torch.no_grad():
                items = [work.item for work in works]
                results = lane.stage.run(items) if lane.stepped is None else in_steps(lane.stepped, items)
            check_count(lane.name, results, len(works))
            self._synchronize()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # SystemExit too: a model that exits must not take the runner along
            self._split(lane, works, e)
            return
        took = self._clock() - begin
        for work, result in zip(works, results, strict=True):
            work.batch = len(works)
            work.model_ns = took
            work.cost_ns = took / len(works)
            self._settle(lane, work, result)

    def _split(self, lane: Lane, works: list[Work], error: BaseException) -> None:
        """A batch failed as a whole: undo it, and run its halves until the bad item is alone."""
        if len(works) == 1:
            self._fail(lane, works[0], error)
            return
        for work in works:
            self._runner.undo(run_of(work))
        half = len(works) // 2
        for part in (works[:half], works[half:]):
            self._run(lane, [work for work in part if self._prepare(work)])

    def _advance(self, lane: Lane, stage: SteppedStage) -> None:
        """Let waiting items join, then one forward pass of all jobs."""
        begin = self._clock()
        joined = self._begun(lane)
        works = lane.jobs
        try:
            with torch.no_grad():
                for work in joined:
                    try:
                        work.job = stage.begin(work.item)
                        work.shows = bool(run_of(work).streams) and lane.streaming is not None and not work.parts
                        works.append(work)
                    except KeyboardInterrupt:
                        raise
                    except BaseException as e:
                        self._fail(lane, work, e)
                if not works:
                    return
                errors = stage.advance([_job_of(work) for work in works])
            check_count(lane.name, errors, len(works))
            self._synchronize()
        except KeyboardInterrupt:
            raise
        except BaseException as e:  # what it did to the jobs is unknown: they begin anew
            lane.jobs = []
            self._split(lane, works, e)
            return
        took = self._clock() - begin
        for work in works:
            work.company = work.company or len(works) > 1
            work.batch = max(work.batch, len(works))
            work.model_ns += took
            work.cost_ns += took / len(works)
        lane.jobs = [w for w, e in zip(works, errors, strict=True) if e is None and not _job_of(w).finished]
        for work, error in zip(works, errors, strict=True):
            if error is not None:
                self._fail(lane, work, error)
            elif _job_of(work).finished:
                self._finish_job(lane, stage, work)
            elif work.shows:
                self._show(lane, work)

    def _show(self, lane: Lane, work: Work) -> None:
        """Tell what the job has made so far. What it gives must be as good as a result is, or the item fails."""
        run = run_of(work)
        assert lane.streaming is not None
        try:
            with torch.no_grad():
                made = lane.streaming.parts(_job_of(work))
            for outputs in made:
                wanted = {name: outputs[name] for name in run.streams if name in outputs}
                receipts = self._runner.publish(run, wanted, work.parts + 1)
                work.parts += 1
                self._reports.append(Part(work.request, work.parts, receipts))
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            lane.jobs.remove(work)
            self._fail(lane, work, e)

    def _finish_job(self, lane: Lane, stage: SteppedStage, work: Work) -> None:
        begin = self._clock()
        try:
            with torch.no_grad():
                outputs = stage.finish(_job_of(work))
            self._synchronize()
        except KeyboardInterrupt:
            raise
        except BaseException as e:
            self._fail(lane, work, e)
            return
        took = self._clock() - begin
        work.model_ns += took
        work.cost_ns += took
        self._settle(lane, work, outputs)

    def _settle(self, lane: Lane, work: Work, result: Any) -> None:
        """Answer an item with what it gave; if that is no good, it is as if it had never run."""
        try:
            outputs = outputs_of(lane.name, result)
            receipts = self._runner.complete(run_of(work), outputs, work.cost_ns / 1e6)
        except Exception as e:
            self._fail(lane, work, e)
            return
        if not work.aside:
            lane.served(work, self._clock())
        if work.tried:
            lane.room = True  # for one, so perhaps for the next
        waited = (work.began - work.ready) / 1e6
        self._finish(work, Done(work.request, receipts, work.model_ns / 1e6, waited, work.batch))

    def _fail(self, lane: Lane, work: Work, error: BaseException) -> None:
        """Undo the item and answer it, or have it tried again when it found no room."""
        self._runner.undo(run_of(work))
        work.item = work.job = None
        work.model_ns = work.cost_ns = 0
        if isinstance(error, Exhausted) and error.retryable and error.reason in _SCARCE and not work.final:
            self._found_no_room(lane, work, error)
            return
        if self._parked:
            self._made_room()
        self._finish(work, failure(work.request, work.command, public(lane.name, error)))

    def _synchronize(self) -> None:
        if self._runner.settings.device.startswith("cuda"):
            torch.cuda.synchronize()

    # Items that found no room.

    def _found_no_room(self, lane: Lane, work: Work, error: Exhausted) -> None:
        """In company it may have lacked what the others took: it is tried once alone. Alone it waits for room."""
        work.error = error
        work.give_up = work.give_up or self._clock() + self._queue_ns
        if work.company:
            work.company, work.solo = False, True
            insort(lane.waiting, work)
        else:
            insort(lane.parked, work)
            work.parked = True
            self._parked += 1

    def _made_room(self) -> None:
        for lane in self._order:
            lane.room = True

    def _review(self) -> None:
        """Of those that found no room: try the oldest of a stage when state was freed, refuse those whose time is
        over, and the youngest when nothing they could wait for is left."""
        now = self._clock()
        for lane in self._order:
            for work in [w for w in lane.parked if w.give_up <= now]:
                self._refuse(lane, work)
            if lane.room and lane.parked:
                work = lane.parked[0]
                self._unpark(lane, work)
                work.solo = work.tried = True
                insort(lane.waiting, work)
            lane.room = False
        while self._parked and not self._hope():
            lane, work = max(((lane, lane.parked[-1]) for lane in self._order if lane.parked), key=lambda p: p[1])
            self._refuse(lane, work)

    def _hope(self) -> bool:
        """Whether a session that does not itself wait for room has something undecided, or work to do."""
        if any(line[0].turn and not line[0].parked for line in self._lines.values()):
            return True
        stuck = {run_of(work).session for lane in self._order for work in lane.parked}
        return not self._draining and not self._runner.undecided <= stuck

    def _refuse(self, lane: Lane, work: Work) -> None:
        self._unpark(lane, work)
        assert work.error is not None
        if not work.error.retry_after_ms:
            work.error.retry_after_ms = max(self._queue_ns / 1e6, 1.0)
        self._finish(work, failure(work.request, work.command, work.error))


def _job_of(work: Work) -> Job:
    assert work.job is not None
    return work.job
