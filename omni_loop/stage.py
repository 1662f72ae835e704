"""What a model must offer to be a stage, and what it is given.

A stage owns weights and an engine. It never keeps anything about a session in itself: all of it lies in
the typed state it declared, which is staged during a tick and committed or discarded by the runner.
This module names arrays as ``Any``: inside a runner they are torch tensors (or numpy arrays), and this
package does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, runtime_checkable

from .messages import Scalar
from .types import Op, StageKind

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Payload:
    """Typed arrays on an edge. ``arrays`` are read-only by agreement; ``meta`` are small facts."""

    kind: str  # of PayloadKind, or one's own: see connect.schema
    arrays: Mapping[str, Any]
    meta: Mapping[str, Scalar] = field(default_factory=dict)
    schema: int = 1


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A paged KV table: ``block_size`` tokens a block, ``sink_blocks`` kept for ever, then a window."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    window_blocks: int  # committed blocks kept behind the sink
    sink_blocks: int = 0
    scratch_blocks: int = 1  # most blocks one tick may stage before it commits


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of fixed shape."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    fill: float = 0.0


@dataclass(frozen=True, slots=True)
class RingSpec:
    """The last ``capacity`` items, each a tensor of ``shape``."""

    shape: tuple[int, ...]
    capacity: int
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class CounterSpec:
    """An integer that commits and rolls back with the rest (model position, last step, ...)."""

    start: int = 0


StateSpec = KVSpec | TensorSpec | RingSpec | CounterSpec


class PagedKV(Protocol):
    """A session's view of its paged KV, during one tick. All shapes are for one session.

    Keys are stored as the model gives them (un-roped), so a window never moves memory. The blocks a tick
    appended before its commit are seen by :meth:`gather` of the same tick.
    """

    @property
    def length(self) -> int:
        """Tokens visible now (sink + window + staged in this tick)."""

    @property
    def total(self) -> int:
        """Tokens ever committed or staged; the model position, which only grows."""

    @property
    def sink_length(self) -> int:
        """Of ``length``, tokens in the sink."""

    def gather(self, last: int | None = None) -> Any:
        """``float[layers, 2, length, kv_heads, head_dim]`` (key 0, value 1), oldest first; a view or a
        copy the caller must not write to. ``last``: of the last so many tokens, whole blocks, or of all there are."""

    def prefix(self, key: bytes, compute: Callable[[], Any]) -> None:
        """Begin an empty cache with the blocks of ``compute() float[layers, 2, n, kv_heads, head_dim]``, which is a
        pure function of ``key`` (a hash of the tokens and of the weights). Sessions that begin alike share the
        blocks: ``compute`` is called for the first of them only."""

    def branches(self, n: int) -> Sequence[PagedKV]:
        """``n`` copy-on-write forks of what is visible now, for imagining futures inside this tick. They share every
        block with this cache; what they append is theirs, is never committed, and is freed when the tick is
        decided, or earlier by :meth:`release`."""

    def release(self) -> None:
        """Free a branch before its tick is decided. Raises StateError for a session's own cache."""

    def append(self, kv: Any, imagined: bool = False) -> None:
        """Stage ``kv float[layers, 2, n, kv_heads, head_dim]``; n must fill whole blocks. Blocks that fall
        out of the window are dropped at commit, and are not visible after this call."""

    def truncate(self, total: int) -> None:
        """Stage dropping every token at position >= ``total`` (a block boundary) that is still held."""

    def drop_imagined(self) -> int:
        """Stage dropping the imagined tail; returns the new ``total``."""


class TensorState(Protocol):
    """Fixed-shape tensor; ``set`` stages a new value."""

    def get(self) -> Any: ...

    def set(self, value: Any) -> None: ...


class Ring(Protocol):
    """Bounded history, oldest first."""

    def items(self) -> Sequence[Any]: ...

    def push(self, item: Any) -> None: ...

    def clear(self) -> None: ...


class Counter(Protocol):
    def get(self) -> int: ...

    def set(self, value: int) -> None: ...


class StateView(Protocol):
    """The session's typed state of one stage inside a tick: everything written here is staged."""

    def kv(self, name: str) -> PagedKV: ...

    def tensor(self, name: str) -> TensorState: ...

    def ring(self, name: str) -> Ring: ...

    def counter(self, name: str) -> Counter: ...


@dataclass(frozen=True, slots=True)
class StageItem:
    """One session's part of a stage's batch."""

    session: str
    seed: int
    epoch: int
    tick: int
    op: Op
    step: int
    prompt: str
    inputs: Mapping[str, Payload]
    params: Mapping[str, Scalar]
    state: StateView

    def noise_seed(self, stage: str) -> int:
        """Counter-based noise: a pure function of (session seed, epoch, tick, stage)."""
        import hashlib

        text = f"{self.seed}/{self.epoch}/{self.tick}/{stage}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")


Outputs = Mapping[str, Payload]


def one_by_one(run: Callable[[StageItem], Outputs], items: Sequence[StageItem]) -> list[Outputs | Exception]:
    """A batch by ``run``ning each item alone: one item's failure is its own result."""
    results: list[Outputs | Exception] = []
    for item in items:
        try:
            results.append(run(item))
        except Exception as e:  # the runner answers that item with it
            results.append(e)
    return results


def in_one(
    prepare: Callable[[StageItem], T],
    run: Callable[[Sequence[T]], Sequence[Outputs | Exception]],
    items: Sequence[StageItem],
) -> list[Outputs | Exception]:
    """A batch in one pass: ``prepare`` checks an item and may raise, which is that item's own result; ``run`` takes
    what it made of all others together, at least one, and gives their results in order."""
    results: list[Outputs | Exception] = []
    ready: dict[int, T] = {}
    for i, item in enumerate(items):
        try:
            ready[i] = prepare(item)
            results.append({})
        except Exception as e:  # the runner answers that item with it
            results.append(e)
    if ready:
        for i, result in zip(ready, run(list(ready.values())), strict=True):
            results[i] = result
    return results


class Job(Protocol):
    """One item under way in a :class:`SteppedStage`."""

    @property
    def finished(self) -> bool: ...


@runtime_checkable
class Stage(Protocol):
    """A model component behind one engine. ``run`` is called from the runner's thread only."""

    kind: StageKind

    @property
    def revision(self) -> str:
        """Identifies weights and configuration; travels with every chunk."""

    def state_specs(self) -> Mapping[str, StateSpec]:
        """The typed state the runner allocates per session."""

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        """One result per item, in order: outputs by name, or the exception that item alone met."""

    def warm_up(self) -> None:
        """One real forward pass, so that the first tick is not the slowest."""


@runtime_checkable
class ClosingStage(Stage, Protocol):
    """A stage that holds more than memory, such as a process of its own."""

    def close(self) -> None:
        """Give it back. Called once, after the last run, when the runner ends; also when it could not start."""


@runtime_checkable
class SteppedStage(Stage, Protocol):
    """A stage of many forward passes per item, such as denoising: the runner may let another session's item join
    between two passes. ``run`` is then ``begin``, ``advance`` until finished, ``finish`` for all items alike.

    A job keeps what it needs between passes, and nothing that outlives it; all session state is the item's view.
    """

    def begin(self, item: StageItem) -> Job:
        """Check the item and set up its first pass. Raises the item's own error."""

    def advance(self, jobs: Sequence[Job]) -> Sequence[Exception | None]:
        """One forward pass for each of ``jobs``, each at its own step, as few launches as their shapes allow; per
        job None, or the error that ends that job alone."""

    def finish(self, job: Job) -> Outputs:
        """The outputs of a finished job."""


@runtime_checkable
class StreamingStage(SteppedStage, Protocol):
    """A stepped stage that can show what it has before it is done: a preview after the first pass, each frame when it
    is finished. Asked after every pass, only when somebody wants to see it; what :meth:`finish` gives must not depend
    on that.

    A part is like the stage's outputs, of fewer frames: where it begins is its ``meta["first_step"]``, and
    ``meta["preview"]`` is True for what later passes will still change. Stages behind an edge that ``streams`` run on
    the part as on a whole payload; they have no state.
    """

    def parts(self, job: Job) -> Sequence[Outputs]:
        """What ``job`` has made since it was last asked, oldest first; mostly nothing."""


def in_steps(stage: SteppedStage, items: Sequence[StageItem]) -> list[Outputs | Exception]:
    """The ``run`` of a stepped stage: all items begin, go on together and finish alike."""
    results: dict[int, Outputs | Exception] = {}
    jobs: dict[int, Job] = {}
    for i, item in enumerate(items):
        try:
            jobs[i] = stage.begin(item)
        except Exception as e:  # the runner answers that item with it
            results[i] = e
    while going := {i: job for i, job in jobs.items() if i not in results and not job.finished}:
        errors = zip(going, stage.advance(list(going.values())), strict=True)
        results.update((i, error) for i, error in errors if error is not None)
    for i, job in jobs.items():
        if i not in results:
            try:
                results[i] = stage.finish(job)
            except Exception as e:
                results[i] = e
    return [results[i] for i in range(len(items))]
