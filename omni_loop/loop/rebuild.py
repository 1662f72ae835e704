"""State made anew: from the log's base (a fresh session or a snapshot) tick by tick, with the noise they had."""

from __future__ import annotations

import asyncio

from ..errors import OmniLoopError, Reason, SnapshotError, StateError
from ..session.log import Base, Entry, Version
from ..session.machine import Phase
from ..session.snapshot import SnapshotData, SnapshotStore
from .graph import CompiledPlan
from .live import Live
from .prepare import Work
from .tick import Route, TickRun

Logged = tuple[CompiledPlan, Work]  # what a log's entry holds for the loop


async def rebuild(live: Live, store: SnapshotStore | None, epoch: int, upto: Version | None = None) -> None:
    """The runners' state as after ``upto`` (None: the last commit), awaiting its next tick in ``epoch``.

    Raises:
        StateError: the log does not reach back (SESSION_LOST), or the session was closed meanwhile.
        OmniLoopError: what a replayed tick met. Then nothing of the session is left on the runners.
    """
    session, log = live.session, live.session.log
    step = session.machine.position.step
    if not log.complete:
        raise _lost(step, "its log does not reach back to its beginning")
    assert upto is None or log.reaches(upto), "a rewind was let through that the log does not reach"
    entries: list[Entry[Logged]] = log.until(upto)
    base = None if log.base is None else await load_base(log.base, store, step)
    epochs = [*(e.version.epoch for e in entries), epoch]
    seed = entries[0].seed if entries else session.seed
    await live.vacate()
    try:
        if base is None:
            await live.open(seed)
        else:
            await live.restore(base, seed)
            live.feed(base.feedback, epochs[0], base.tick)
        for entry, next_epoch in zip(entries, epochs[1:], strict=True):
            if session.machine.phase is Phase.CLOSED:
                raise session.machine.refusal()
            if entry.seed != seed:
                seed = entry.seed
                await live.reseed(seed)
            await _again(live, entry, next_epoch)
        if seed != session.seed:
            await live.reseed(session.seed)
    except BaseException:
        await live.vacate()  # half a state must never be taken for a whole one
        raise


async def _again(live: Live, entry: Entry[Logged], next_epoch: int) -> None:
    """Run a committed tick once more; nothing of it leaves."""
    version, (plan, work) = entry.version, entry.work
    never: asyncio.Future[OmniLoopError] = asyncio.get_running_loop().create_future()
    run = TickRun(live.route, live.session.id, version.epoch, version.tick, work, live.session.feedback, never)
    try:
        await run.run(plan.answer)
        await run.commit(live.session.log.recomputable)
        if entry.besides:
            await run.run(plan.besides)
            await run.commit(live.session.log.recomputable)
        live.feed(run.fed(), next_epoch, version.tick)
    except BaseException:
        await run.discard()
        raise
    finally:
        await run.release()


async def load_base(base: Base, store: SnapshotStore | None, step: int) -> SnapshotData:
    """The snapshot a log begins with; StateError (SESSION_LOST) when it is not there any more as it was."""
    if store is None:
        raise _lost(step, "this server keeps no snapshots")
    try:
        data, saved = await asyncio.to_thread(store.load, base.name)
    except OmniLoopError as error:
        raise _lost(step, f"its snapshot cannot be read: {error.text}") from error
    if saved.digest != base.digest:
        raise _lost(step, f"its snapshot {base.name!r} was replaced by another")
    return data


def _lost(step: int, why: str) -> StateError:
    text = f"the session's state made room for others and cannot be made anew: {why}; its last committed step is {step}"
    return StateError(text, reason=Reason.SESSION_LOST)


def check_fits(data: SnapshotData, route: Route) -> None:
    """Raise SnapshotError unless the pipeline that is served is the one ``data`` was taken of."""
    graph = route.graph
    if data.spec != graph.spec.digest:
        raise SnapshotError(f"the snapshot is of another version of pipeline {data.pipeline!r}: its spec differs")
    if set(data.stages) != set(graph.stages):
        held, served = ", ".join(sorted(data.stages)), ", ".join(sorted(graph.stages))
        raise SnapshotError(f"the snapshot holds the stages {held}; the pipeline has {served}")
    if set(data.options) != set(graph.pipeline.options):
        raise SnapshotError(f"the snapshot is of another version of pipeline {data.pipeline!r}: its options differ")
    if unknown := sorted(set(data.feedback) - set(graph.fed_to)):
        raise SnapshotError(f"the snapshot feeds {unknown[0]!r}, which pipeline {data.pipeline!r} does not have")
