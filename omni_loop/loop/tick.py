"""One tick's traffic with the runners: inputs put, stages run as their inputs come, commit or discard, release."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ..connect.base import pending
from ..errors import OmniLoopError, Reason, ServerUnavailable, StageFailed, StateError, TensorError, nearest
from ..messages import Commit, Discard, Done, PayloadKey, Receipt, ReleasePayloads, RunStage
from ..stage import Payload
from ..telemetry import metrics
from ..types import Timings
from .graph import CompiledPipeline, CompiledPlan, StageStep
from .parts import Parts, Show
from .pipeline import CLIENT, Edge
from .prepare import Work

if TYPE_CHECKING:
    from ..connect.base import Connector
    from ..runner.handle import RunnerHandle

T = TypeVar("T")
_BATCHES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
# Taken from runners' answers, so that those of other processes count too.
_took = metrics.histogram("omni_loop_stage_seconds", "Forward passes of one item of a stage", ("stage",))
_queued = metrics.histogram("omni_loop_stage_queue_seconds", "From an item's turn to its first pass", ("stage",))
_batch = metrics.histogram("omni_loop_batch_size", "Items beside which an item ran, itself too", ("stage",), _BATCHES)
_SHARED = ("shm",)  # backends whose receipts every connector of the same name can read, whoever put them


@dataclass(frozen=True, slots=True)
class Route:
    """A pipeline and the runner of each of its stages."""

    graph: CompiledPipeline
    handles: Mapping[str, RunnerHandle]  # by stage name within the pipeline
    connectors: Mapping[str, str] = field(default_factory=dict)  # by edge name, where the deployment chose one

    @property
    def revisions(self) -> tuple[tuple[str, str], ...]:
        """Of all its stages, with their names, in the pipeline's order."""
        name = self.graph.pipeline.name
        return tuple((stage, handle.revisions[f"{name}/{stage}"]) for stage, handle in self.handles.items())

    def runners(self, stages: Iterable[str] | None = None) -> dict[RunnerHandle, tuple[str, ...]]:
        """Which of ``stages`` (None: all), by full name, each runner has."""
        groups: dict[RunnerHandle, tuple[str, ...]] = {}
        for stage in self.handles if stages is None else stages:
            handle = self.handles[stage]
            groups[handle] = (*groups.get(handle, ()), f"{self.graph.pipeline.name}/{stage}")
        return groups

    def key(self, edge: str, session: str, epoch: int, tick: int, part: int = 0) -> PayloadKey:
        """Of what is given to the target of an edge."""
        return PayloadKey(f"{self.graph.pipeline.name}/{edge}", session, epoch, tick, part)

    def forget(self, feedback: Mapping[str, Receipt]) -> None:
        """Clean up payloads that were meant for a next tick."""
        for edge, receipt in feedback.items():
            self.handles[self.graph.fed_to[edge]].connector.cleanup(receipt.key)


class TickRun:
    """A tick under way. Runs groups of stages; each group is one transaction.

    ``stop`` resolves to the error that ends the tick early (deadline, cancel, close). ``show``: who wants to see parts
    of the plan's frames while they are made.
    """

    def __init__(
        self,
        route: Route,
        session: str,
        epoch: int,
        tick: int,
        work: Work,
        feedback: Mapping[str, Receipt],
        stop: asyncio.Future[OmniLoopError],
        show: tuple[CompiledPlan, Show] | None = None,
    ) -> None:
        self._route, self._work, self._feedback, self._stop = route, work, feedback, stop
        self._session, self._epoch, self._tick = session, epoch, tick
        self._done: dict[str, Done] = {}  # outputs by stage
        self._group: list[str] = []  # stages of the open transaction
        self._running: dict[asyncio.Task[Done], StageStep] = {}
        self._wake: asyncio.Future[None] | None = None  # what :meth:`run` waits for: a stage's end, or stop
        self._stop.add_done_callback(self._woken)
        self._put: list[tuple[Connector, PayloadKey]] = []
        self._model: dict[str, float] = {}  # milliseconds on the longest path up to and with a stage
        self._queue: dict[str, float] = {}
        self._ahead: dict[str, list[Edge]] = {}  # of stages that were submitted before these had been put
        self._parts: Parts | None = None
        if show is not None:
            self._parts = Parts(show[0], route.handles, self._hand, self._command, show[1])

    async def run(self, steps: Sequence[StageStep]) -> None:
        """Run ``steps``, each as soon as its inputs have receipts; independent ones overlap. Raises what the first
        failing stage raised, or what ended the tick: then :meth:`discard` must follow."""
        waiting = list(steps)
        self._group = []
        if self._stop.done():
            raise self._stop.result()
        while True:
            going: list[StageStep] = []
            for step in tuple(waiting):  # in topological order, so that a stage follows what it was promised
                if self._can_go(step, going):
                    waiting.remove(step)
                    going.append(step)
            for i, step in enumerate(going):
                self._submit(step, unhurried=any(self._reads(later, step) for later in going[i + 1 :]))
            if not self._running:
                if self._parts is not None:
                    await self._parts.settle()
                return
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
            if self._stop.done():
                raise self._stop.result()
            for task in [t for t in self._running if t.done()]:
                done = self._result(task)  # raises; what still runs is collected by discard
                self._record(self._running.pop(task), done)

    def gave(self, name: str) -> bool:
        """Whether the stage of "stage.output" belongs to the open transaction."""
        return name.partition(".")[0] in self._group

    def output(self, name: str) -> Payload:
        """The payload of "stage.output"; StageFailed when the stage did not give it."""
        stage, _, output = name.partition(".")
        done = self._done[stage]
        if output not in done.outputs:
            raise _missing(stage, output, done)
        return self._route.handles[stage].connector.get(done.outputs[output])

    @property
    def revisions(self) -> tuple[tuple[str, str], ...]:
        """As of :class:`Route`."""
        return self._route.revisions

    @property
    def certain(self) -> bool:
        """Whether a commit that was sent is as good as done: one runner has the whole transaction, and only the end of
        this process can keep it from it."""
        handles = {self._route.handles[stage] for stage in self._group}
        return len(handles) == 1 and all(handle.shares_fate and handle.alive for handle in handles)

    async def commit(self, recomputable: bool) -> None:
        """Make the open transaction permanent on every runner that took part; ``recomputable``: see :class:`Commit`."""
        groups = self._route.runners(self._group)
        calls = [h.submit(Commit(self._session, self._epoch, self._tick, s, recomputable)) for h, s in groups.items()]
        await all_of(calls)

    async def discard(self) -> None:
        """Undo the open transaction. Stages that still run end with their present pass."""
        if self._parts is not None:
            self._parts.stop()
        groups = self._route.runners(self._group)
        calls = [
            eager(_unless_evicted(h.submit(Discard(self._session, self._epoch, self._tick, s))))
            for h, s in groups.items()
        ]
        try:
            if self._running:
                await asyncio.wait(self._running)
                for task, step in self._running.items():
                    if task.exception() is None:  # others' errors: the first one already ended the tick
                        self._record(step, task.result())
            if self._parts is not None:
                await self._parts.settle()
        finally:
            self._running = {}
            await all_of(calls)
            for stage in self._group:
                if stage in self._done:
                    await self._release_outputs((stage,))
            self._group = []

    def fed(self) -> dict[str, Payload]:
        """What committed stages gave for the next tick, by feedback edge."""
        fed: dict[str, Payload] = {}
        for stage, done in self._done.items():
            for edge in self._route.graph.feedback[stage]:
                if edge.output in done.outputs:
                    fed[edge.name] = self._route.handles[stage].connector.get(done.outputs[edge.output])
        return fed

    async def release(self) -> None:
        """Forget every payload of the tick."""
        for connector, key in self._put:
            connector.cleanup(key)
        self._put = []
        await self._release_outputs(tuple(self._done))
        if self._parts is not None:
            self._parts.stop()
            await self._parts.settle()
            await all_of([h.submit(ReleasePayloads(keys)) for h, keys in self._parts.release().items() if keys])

    def timings(self, total_ms: float, queue_ms: float) -> Timings:
        """``model`` counts the longest path, so that overlapping stages do not sum to more than the total."""
        return Timings(
            total_ms=total_ms,
            model_ms=max(self._model.values(), default=0.0),
            queue_ms=queue_ms + max(self._queue.values(), default=0.0),
            stages_ms={stage: done.model_ms for stage, done in self._done.items()},
        )

    def _submit(self, step: StageStep, unhurried: bool) -> None:
        handle = self._route.handles[step.name]
        if not handle.alive:
            raise ServerUnavailable(f"runner {handle.name!r}, which has stage {step.full!r}, is gone")
        streams = () if self._parts is None else self._parts.wanted(step.name)
        command = self._command(step.name, self._inputs(step, handle), unhurried=unhurried, streams=streams)
        on_part = self._parts.listener(step) if self._parts is not None and streams else None
        self._group.append(step.name)
        task = eager(handle.submit(command, on_part))
        task.add_done_callback(self._woken)
        self._running[task] = step

    def _command(
        self,
        stage: str,
        inputs: Mapping[str, Receipt],
        part: int = 0,
        unhurried: bool = False,
        streams: tuple[str, ...] = (),
    ) -> RunStage:
        return RunStage(
            session=self._session,
            epoch=self._epoch,
            tick=self._tick,
            stage=f"{self._route.graph.pipeline.name}/{stage}",
            op=self._work.op,
            step=self._work.step,
            inputs=inputs,
            params=self._work.params,
            unhurried=unhurried,
            streams=streams,
            part=part,
        )

    def _can_go(self, step: StageStep, going: Sequence[StageStep]) -> bool:
        """Whether its inputs are there, or will be when its turn comes: a runner takes a session's commands in order,
        so what a stage on the same runner was asked for is put by then. That saves a round trip per stage."""
        before = [*self._running.values(), *going]
        for edge in step.inputs:
            if edge.source == CLIENT or edge.feedback or edge.source in self._done:
                continue
            if edge.optional or not any(b.name == edge.source and self._same_runner(b, step) for b in before):
                return False
        return True

    def _reads(self, step: StageStep, source: StageStep) -> bool:
        """Whether ``step`` is promised what ``source`` gives."""
        return self._same_runner(step, source) and any(e.source == source.name for e in step.inputs)

    def _same_runner(self, a: StageStep, b: StageStep) -> bool:
        return self._route.handles[a.name] is self._route.handles[b.name]

    def _result(self, task: asyncio.Task[Done]) -> Done:
        try:
            return task.result()
        except OmniLoopError as error:
            for edge in self._ahead.get(self._running[task].name, ()):
                done = self._done.get(edge.source)
                if done is not None and edge.output not in done.outputs:
                    raise _missing(edge.source, edge.output, done) from error
            raise

    def _woken(self, ended: asyncio.Future[Any]) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def _record(self, step: StageStep, done: Done) -> None:
        _took.observe(1e-3 * done.model_ms, stage=step.full)
        _queued.observe(1e-3 * done.queue_ms, stage=step.full)
        _batch.observe(done.batch, stage=step.full)
        sources = [e.source for e in step.inputs if e.source in self._done]
        self._model[step.name] = done.model_ms + max((self._model[s] for s in sources), default=0.0)
        # A stage that was submitted ahead queues from its turn on, which comes when those before it have run.
        self._queue[step.name] = done.queue_ms + max((self._queue[s] for s in sources), default=0.0)
        self._ahead.pop(step.name, None)
        self._done[step.name] = done

    def _inputs(self, step: StageStep, handle: RunnerHandle) -> dict[str, Receipt]:
        inputs: dict[str, Receipt] = {}
        for edge in step.inputs:
            receipt = self._input(edge, handle)
            if receipt is not None:
                inputs[edge.input] = receipt
        return inputs

    def _input(self, edge: Edge, handle: RunnerHandle) -> Receipt | None:
        if edge.source == CLIENT:
            payload = self._work.sent.get(edge.output)
            return None if payload is None else self._give(edge, payload, handle)
        if edge.feedback:
            fed = self._feedback.get(edge.name)
            if fed is None and not edge.optional:
                text = f"{self._work.op} continues from what {edge.source!r} gave in the tick before, and there is none"
                raise StateError(text, reason=Reason.BAD_REQUEST)
            return fed
        if edge.source not in self._done:
            self._ahead.setdefault(edge.target, []).append(edge)
            full = f"{self._route.graph.pipeline.name}/{edge.source}"
            key = PayloadKey(f"{full}.{edge.output}", self._session, self._epoch, self._tick)
            return pending(key, edge.kind, handle.connector.backend(key.edge))
        done = self._done[edge.source]
        receipt = done.outputs.get(edge.output)
        if receipt is None:
            if edge.optional:
                return None
            raise _missing(edge.source, edge.output, done)
        return self._hand(edge, receipt)

    def _hand(self, edge: Edge, receipt: Receipt, part: int = 0) -> Receipt:
        """``receipt`` of what the source gave, as the target can read it: by the connector chosen for the edge."""
        source, target = self._route.handles[edge.source].connector, self._route.handles[edge.target].connector
        reached = source is target or (receipt.connector in _SHARED and receipt.connector in target.backends)
        if reached and self._route.connectors.get(edge.name, receipt.connector) == receipt.connector:
            return receipt
        return self._give(edge, source.get(receipt), self._route.handles[edge.target], part)

    def _give(self, edge: Edge, payload: Payload, handle: RunnerHandle, part: int = 0) -> Receipt:
        if edge.source == CLIENT and edge.schema is not None and (problem := edge.schema.problem(payload)):
            raise TensorError(f"edge {edge.name}: {problem}")
        key = self._route.key(edge.name, self._session, self._epoch, self._tick, part)
        receipt = handle.connector.put(key, payload)
        self._put.append((handle.connector, key))
        return receipt

    async def _release_outputs(self, stages: Sequence[str]) -> None:
        keys: dict[RunnerHandle, tuple[PayloadKey, ...]] = {}
        for stage in stages:
            handle = self._route.handles[stage]
            done = self._done.pop(stage)
            keys[handle] = (*keys.get(handle, ()), *(r.key for r in done.outputs.values()))
        await all_of([handle.submit(ReleasePayloads(k)) for handle, k in keys.items() if k])


def eager(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that runs at once up to its first wait, and not only when the loop comes round to it."""
    return asyncio.Task(work, loop=asyncio.get_running_loop(), eager_start=True)


async def all_of(calls: Sequence[Awaitable[Any]]) -> None:
    """Wait for all ``calls``, then raise the first error there was."""
    if len(calls) == 1:
        await calls[0]
        return
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


async def _unless_evicted(discard: Awaitable[Done]) -> None:
    try:
        await discard
    except StateError as error:
        if error.reason is not Reason.EVICTED:  # a session without state has nothing staged
            raise


def _missing(stage: str, output: str, done: Done) -> StageFailed:
    return StageFailed(
        f"stage {stage!r} gave no output {output!r}.{nearest(output, done.outputs)}", reason=Reason.BAD_OUTPUT
    )
