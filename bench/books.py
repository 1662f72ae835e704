"""What forks and bookkeeping cost, in microseconds and in blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cached_property
from statistics import median

import torch

from omni_loop import registry
from omni_loop.messages import PayloadKind
from omni_loop.runner.kv_pool import KVPool, blocks_per_session
from omni_loop.runner.state import Budget, StateManager
from omni_loop.stage import KVSpec, Payload, Stage
from omni_loop.types import Op
from omni_loop_worlds.stages.frames import FramesStage
from omni_loop_worlds.stages.shared import to_px

from .kv import Hands, first_frames
from .sessions import Sessions

FORKS = 64
_BATCH = 100  # calls a sample
_AMPLE = 16 << 30  # bytes; blocks are given, and pages that nobody writes to cost nothing
_PARENT = 0


def _frames(checkpoints: str) -> FramesStage:
    stage: FramesStage = registry.build(registry.STAGES, "frames", {"checkpoints": checkpoints} if checkpoints else {})
    return stage


def _stages(checkpoints: str) -> dict[str, Stage]:
    """Those that keep state."""
    options = {"checkpoints": checkpoints} if checkpoints else {}
    return {"context": registry.build(registry.STAGES, "context", options), "frames": _frames(checkpoints)}


def _kv_spec(stage: Stage) -> KVSpec:
    spec = stage.state_specs()["kv"]
    assert isinstance(spec, KVSpec)
    return spec


def _microseconds(call: Callable[[], object], times: int) -> float:
    """CPU time of ``times`` calls."""
    begin = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - begin) * 1e6


def fill(state: StateManager, session: str, specs: dict[str, KVSpec]) -> None:
    """Ticks until sink and window of every stage are full of noise."""
    for tick in range(max(spec.sink_blocks + spec.window_blocks for spec in specs.values())):
        for stage, spec in specs.items():
            view = state.begin(session, stage, tick)
            shape = (spec.layers, 2, spec.block_size, spec.kv_heads, spec.head_dim)
            view.kv("kv").append(torch.randn(shape), imagined=True)
            state.seal(session, stage)
        state.commit(session, tick, specs)


class Forks:
    """64 forks of one session whose windows are full."""

    def __init__(self, checkpoints: str, rounds: int) -> None:
        self._checkpoints, self._stages, self._rounds = checkpoints, _stages(checkpoints), rounds
        self._specs = {name: _kv_spec(stage) for name, stage in self._stages.items()}
        self.state = StateManager(
            {name: stage.state_specs() for name, stage in self._stages.items()}, Budget(max_sessions=FORKS + 1)
        )
        self.state.open("parent")
        fill(self.state, "parent", self._specs)
        self.held = self._owned()
        self.taken = 0

    @cached_property
    def fork_us(self) -> float:
        """Median over rounds of 64 forks; their closing is not timed."""
        spent = []
        for _ in range(self._rounds):
            begin = time.thread_time()
            for i in range(FORKS):
                self.state.fork("parent", str(i))
            spent.append((time.thread_time() - begin) * 1e6 / FORKS)
            self.taken = max(self.taken, self._owned() - self.held)
            for i in range(FORKS):
                self.state.close(str(i))
        return median(spent)

    @cached_property
    def copy_us(self) -> float:
        """What a dense cache would do: a second tensor with the same content, in every stage."""
        caches = [
            torch.randn(s.layers, 2, (s.sink_blocks + s.window_blocks) * s.block_size, s.kv_heads, s.head_dim)
            for s in self._specs.values()
        ]
        spent = [_microseconds(lambda: [cache.clone() for cache in caches], 1) for _ in range(self._rounds)]
        return median(spent)

    @cached_property
    def diverged(self) -> tuple[float, int]:
        """Blocks of the frames stage per fork after one tick of one frame each, and blocks of a whole cache."""
        spec = self._specs["frames"]
        held = spec.sink_blocks + spec.window_blocks
        blocks = blocks_per_session(spec) + FORKS
        budget = Budget(FORKS + 1, _AMPLE, blocks)
        stage = _frames(self._checkpoints)
        sessions, hands = Sessions(stage, 1, budget=budget), Hands(FORKS)
        first, tick = first_frames(stage, 1), 0
        while sessions.blocks() < held:
            _imagine(sessions, tick, Hands(1, tick), first, 8)
            tick += 1
        sessions.fork(_PARENT, range(1, FORKS + 1))
        before = sessions.blocks()
        _imagine(sessions, tick, hands, first, 1, range(1, FORKS + 1))
        return (sessions.blocks() - before) / FORKS, held

    def _owned(self) -> int:
        return sum(pool.owned for pool in self.state.stats().pools.values())


def _imagine(
    sessions: Sessions, tick: int, hands: Hands, first: torch.Tensor, n: int, chosen: Sequence[int] | None = None
) -> None:
    inputs = [{"actions": Payload(PayloadKind.ACTIONS, {"actions": to_px(a)})} for a in hands(n)]
    if tick == 0:
        inputs = [{**i, "latents": Payload(PayloadKind.LATENTS, {"latents": first[0]})} for i in inputs]
    sessions.tick(tick, Op.PREDICT if tick else Op.INFER, inputs, chosen)


class Books:
    """The frames stage's bookkeeping, without its tensors."""

    def __init__(self, checkpoints: str, samples: int) -> None:
        self._stages, self._samples = _stages(checkpoints), samples
        self._spec = _kv_spec(self._stages["frames"])

    @cached_property
    def reserve_commit_us(self) -> float:
        """Median of a block reserved and committed in a pool's full table."""
        pool = KVPool(self._spec, 2 * blocks_per_session(self._spec))
        table = pool.open()

        def step() -> None:
            pool.reserve(table, 1, True)
            pool.commit(table)

        return self._median(step, self._spec.window_blocks)

    @cached_property
    def tick_us(self) -> float:
        """Median of a tick that reserves one block, of a full session with as much history as is kept."""
        specs = {"frames": self._stages["frames"].state_specs()}
        state, ticks = StateManager(specs, Budget(max_sessions=2)), iter(range(1 << 40))
        state.open("session")

        def step() -> None:
            tick = next(ticks)
            view = state.begin("session", "frames", tick)
            view.kv("kv").reserve(1, True)
            state.seal("session", "frames")
            state.commit("session", tick, ("frames",))

        return self._median(step, self._spec.window_blocks + 64)

    @cached_property
    def stats_us(self) -> tuple[float, float]:
        """Medians with 1,000 sessions and with one."""
        specs = {name: stage.state_specs() for name, stage in self._stages.items()}
        spent = []
        for n in (1000, 1):
            state = StateManager(specs, Budget(max_sessions=n, nbytes=_AMPLE, blocks=64))
            for i in range(n):
                state.open(str(i))
            spent.append(self._median(state.stats, 10))
        return spent[0], spent[1]

    def _median(self, step: Callable[[], object], warm: int) -> float:
        for _ in range(warm):
            step()
        return median(_microseconds(step, _BATCH) / _BATCH for _ in range(max(self._samples // _BATCH, 3)))


def idle(checkpoints: str, count: int, rounds: int) -> tuple[float, float]:
    """Median CPU milliseconds of a tick of one frame of a session beside ``count`` idle ones, which hold a frame
    each, and of a session alone, in turns."""
    stage = _frames(checkpoints)
    spec, first = _kv_spec(stage), first_frames(stage, 1)
    blocks = 2 * count + 2 * blocks_per_session(spec)
    beside = Sessions(stage, 1, count, Budget(count + 1, _AMPLE, blocks))
    alone = Sessions(stage, 1)
    _imagine(beside, 0, Hands(count, 1), first, 1, range(1, count + 1))
    spent: dict[Sessions, list[float]] = {beside: [], alone: []}
    hands = {beside: Hands(1), alone: Hands(1)}
    for tick in range(spec.window_blocks + rounds):
        for sessions, times in spent.items():
            begin = time.thread_time()
            _imagine(sessions, tick, hands[sessions], first, 1)
            times.append((time.thread_time() - begin) * 1e3)
    return median(spent[beside][spec.window_blocks :]), median(spent[alone][spec.window_blocks :])
