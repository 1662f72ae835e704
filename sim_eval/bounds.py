"""What a success rate lies between: policies without a model, run by the same evaluator as a server's.

``random`` draws every action uniformly within its bounds, ``hold`` does as little as it can: what a policy must beat.
``expert`` reads the simulator's own state (:data:`omni_loop.registry.EXPERTS`): what can be reached, and the proof that
the success key is the right one. None of them looks at what it is sent.

They stand in for a client of a server (:mod:`.api`). An evaluation of one is

    run_suite(bounds.bounded(suite, kind), bounds.connect(kind, suite))

where whoever drives an env hands it over first: ``api.attach(client, env)``, before ``client.open``, which does
nothing for a client of a server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.env import Env, Expert
from omni_loop.errors import ConfigError, Reason, StateError, UnknownName, Unsupported, nearest
from omni_loop.types import ActionChunk, Array, Op, SessionSpec, TickResult

from .api import Connect, LoopClient
from .suite import EvalSuite

KINDS = ("random", "hold", "expert")
_SAID = {
    "random": "with actions drawn at random: what a policy must beat",
    "hold": "holding still: what a policy must beat",
    "expert": "by an expert that reads the simulator's own state: what can be reached",
}
_STREAM = 11  # of a seed's random numbers, so that no env draws the same

Act = Callable[[int], NDArray[np.float32]]  # a control step -> its action, float32[action_dim]


def bounded(suite: EvalSuite, kind: str) -> EvalSuite:
    """The suite as a bound runs it, with a name and a description of its own: one action at a time, no predicted
    frames, and observed by the smallest of the env's arrays, since nobody looks and an image would have to be drawn."""
    _check(kind)
    env = suite.make_env()
    try:
        smallest = min(env.observations, key=lambda spec: np.dtype(spec.dtype).itemsize * np.prod(spec.shape))
    finally:
        env.close()
    return suite.changed(
        name=f"{suite.name}-{kind}", description=f"{suite.name} {_SAID[kind]}", pipeline=kind, deployment="",
        keys=[smallest.name], state_keys=[], options={}, execution_horizon=1, predictions={"episodes": 0},
    )  # fmt: skip


def is_bound(suite: EvalSuite) -> bool:
    """Whether :func:`bounded` made it: what acts looks at nothing it is sent."""
    return suite.pipeline in KINDS and not suite.deployment


def connect(kind: str, suite: EvalSuite) -> Connect:
    """Makes clients of the bound ``kind``; can be sent to another process.

    Raises:
        UnknownName: no such bound, or nobody registered an expert of the suite's env.
        Unsupported: its env is not one that this expert can read (raised when a client is given the env).
    """
    _check(kind)
    if kind == "expert":
        registry.load(registry.EXPERTS, suite.env)
    return Bound(kind, suite.env, suite.action_repeat)


def _check(kind: str) -> None:
    if kind not in KINDS:
        raise UnknownName(f"no bound is called {kind!r}.{nearest(kind, KINDS)}")


@dataclass(frozen=True)
class Bound:
    """Makes clients of the bound ``kind``; a :data:`~.api.Connect` that another process can be told of."""

    kind: str
    env: str
    action_repeat: int = 1

    def __call__(self) -> LoopClient:
        return BoundClient(self.kind, self.env, self.action_repeat)


class BoundClient:
    """A :class:`.api.LoopClient` for one env, which :meth:`attach` names."""

    def __init__(self, kind: str, env_name: str, action_repeat: int = 1) -> None:
        self._kind, self._env_name, self._repeat = kind, env_name, action_repeat
        self._env: Env | None = None
        self._expert: Expert | None = None

    def attach(self, env: Env) -> None:
        """Act in ``env`` from now on."""
        if env is not self._env:
            self._expert = registry.load(registry.EXPERTS, self._env_name)(env) if self._kind == "expert" else None
            self._env = env

    def open(
        self,
        pipeline: str,
        *,
        prompt: str = "",
        seed: int | None = None,
        keys: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> BoundSession:
        if self._env is None:
            raise StateError(f"the bound {self._kind!r} acts in an env: attach one first", reason=Reason.BAD_REQUEST)
        make = {"random": _random, "hold": _hold, "expert": self._acting}[self._kind]
        return BoundSession(self._kind, self._env, make(self._env, seed or 0), self._repeat)

    def close(self) -> None:
        self._env = self._expert = None

    def _acting(self, env: Env, seed: int) -> Act:
        expert = self._expert
        assert expert is not None  # made by attach

        def act(step: int) -> NDArray[np.float32]:
            if step == 0:  # by now the env stands at the episode's beginning
                expert.reset(seed)
            return expert.act()

        return act


class BoundSession:
    """A :class:`.api.LoopSession` whose chunks hold one action."""

    def __init__(self, kind: str, env: Env, act: Act, action_repeat: int = 1) -> None:
        self.id = kind
        self.spec = SessionSpec(
            pipeline=kind, observations=tuple(replace(spec, optional=True) for spec in env.observations),
            action=env.action, horizon=1, execution_horizon=1, control_hz=env.control_hz / action_repeat,
            ops=(Op.INFER,), description="acts without a model",
        )  # fmt: skip
        self._act, self._seq = act, 0

    def infer(
        self,
        arrays: Mapping[str, Array],
        *,
        step: int,
        executed: NDArray[np.float32] | None = None,
        frames: int = 0,
        executed_through: int | None = None,
    ) -> TickResult:
        self._seq += 1
        action = np.asarray(self._act(step), np.float32)
        return TickResult(self._seq, 1, ActionChunk(self._seq, step, action[None], 1, policy_revision=self.id))

    def predict(self, actions: NDArray[np.float32] | None = None, *, steps: int = 0) -> TickResult:
        raise Unsupported(f"the bound {self.id!r} imagines nothing")

    def close(self) -> None:
        return None


def _random(env: Env, seed: int) -> Act:
    low, high, shape = env.action.low, env.action.high, env.action.shape
    if low is None or high is None:
        raise ConfigError(f"env {env.name!r} has no bounds of its actions to draw random ones from")

    def act(step: int) -> NDArray[np.float32]:  # of seed and step alone, whatever was asked before
        drawn = np.random.default_rng([seed, step, _STREAM]).uniform(low, high, shape)
        return drawn.astype(np.float32)

    return act


def _hold(env: Env, seed: int) -> Act:
    hold: Callable[[], NDArray[np.float32]] | None = getattr(env, "hold", None)
    if hold is None:
        raise Unsupported(f"env {env.name!r} does not say which action holds still")
    return lambda step: hold()
