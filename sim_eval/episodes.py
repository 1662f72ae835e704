"""One seeded episode in closed loop through the client API.

A session is opened for every episode rather than reset: noise is a function of (seed, epoch, tick, stage), so
only a fresh session makes the result independent of the episodes before it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_loop._compat import StrEnum
from omni_loop.env import Env
from omni_loop.errors import ConfigError, OmniLoopError, Reason, StageFailed, nearest
from omni_loop.types import ActionChunk, Array, TickResult

from .api import LoopClient, LoopSession, attach
from .suite import EvalSuite

log = logging.getLogger(__name__)


class Outcome(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    ERROR = "error"  # something raised; the reason says what
    TIMEOUT = "timeout"  # longer than the suite's time limit


class EpisodeTimeout(Exception):
    """The episode took longer than its time limit."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Times of one observation's round trip, in ms. ``frames``: predicted frames were asked for besides."""

    step: int
    round_trip_ms: float  # seen by the client: request encoded to answer decoded
    total_ms: float  # in the server
    model_ms: float  # forward passes
    queue_ms: float
    stages_ms: Mapping[str, float]
    frames: bool = False

    @property
    def transport_ms(self) -> float:
        return self.round_trip_ms - self.total_ms

    @property
    def overhead_ms(self) -> float:
        """Everything but the forward passes: server bookkeeping, codec and transport."""
        return self.round_trip_ms - self.model_ms


@dataclass(frozen=True, slots=True)
class Prediction:
    """Frames the world model predicted for the steps after ``step``, and the actions it predicted them for."""

    seed: int
    step: int
    actions: NDArray[np.float32]
    frames: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What happened. ``actions float32[steps, action_dim]`` are those executed: with the seed they are the
    whole episode, which can be replayed from them to the bit."""

    episode: int
    seed: int
    outcome: Outcome
    steps: int
    score: float  # highest of the episode; 0 when the env has no score
    actions: NDArray[np.float32]
    ticks: tuple[Tick, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    reason: str = ""
    wall_s: float = 0.0
    policy_revision: str = ""
    session: str = ""  # the server's name for it
    task: str = ""  # of the suite; "" where it has none
    deadline_misses: int = 0  # control periods in which no action was there (mode live)

    @property
    def success(self) -> bool:
        return self.outcome == Outcome.SUCCESS


@dataclass
class _Trace:
    """What an episode has produced so far; survives the error that ends it."""

    actions: list[NDArray[np.float32]] = field(default_factory=list)
    ticks: list[Tick] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    score: float = 0.0
    revision: str = ""
    notes: list[str] = field(default_factory=list)  # what went wrong without ending the episode


def run_episode(client: LoopClient, env: Env, suite: EvalSuite, episode: int) -> EpisodeResult:
    """Run episode number ``episode``. Whatever raises is recorded in the result, never passed on."""
    seed, trace, began = suite.first_seed + episode, _Trace(), time.monotonic()
    outcome = Outcome.ERROR
    session: LoopSession | None = None
    try:
        attach(client, env)
        session = client.open(suite.pipeline, prompt=suite.prompt, seed=seed, keys=suite.keys, options=suite.options)
        success = _drive(session, env, suite, episode, trace, began + suite.time_limit_s)
        outcome = Outcome.SUCCESS if success else Outcome.FAILURE
    except EpisodeTimeout as e:
        outcome = Outcome.TIMEOUT
        trace.notes.append(str(e))
    except OmniLoopError as e:
        trace.notes.append(f"{e.reason}: {e.text}")
    except Exception as e:
        log.exception("episode %d (seed %d) failed", episode, seed)
        trace.notes.append(f"{type(e).__name__}: {e}")
    if session is not None:
        try:
            session.close()
        except OmniLoopError as e:  # the episode's outcome stands; that its session may linger is said
            trace.notes.append(f"closing the session: {e.reason}: {e.text}")
    width, name = env.action.shape[0], "" if session is None else session.id
    return EpisodeResult(
        episode, seed, outcome, len(trace.actions), trace.score,
        np.array(trace.actions, np.float32).reshape(-1, width), tuple(trace.ticks), tuple(trace.predictions),
        "; ".join(trace.notes), round(time.monotonic() - began, 3), trace.revision, name,
    )  # fmt: skip


def _drive(session: LoopSession, env: Env, suite: EvalSuite, episode: int, trace: _Trace, deadline: float) -> bool:
    """Observe, infer, execute, until the episode ends; returns whether the task succeeded."""
    horizon = suite.execution_horizon or session.spec.execution_horizon
    arrays, executed = env.reset(suite.first_seed + episode, suite.keys), None
    while True:
        step, tick = len(trace.actions), len(trace.ticks)
        frames = suite.predictions.frames if _wants_frames(suite, episode, tick) else 0
        result = _infer(session, arrays, step, executed, frames, trace)
        chunk = _checked(result.chunk, step, horizon)
        trace.revision = chunk.policy_revision
        actions = chunk.actions[:horizon]
        executed = np.clip(actions, env.action.low, env.action.high).astype(np.float32)
        for i, action in enumerate(executed):
            if time.monotonic() > deadline:
                raise EpisodeTimeout(f"more than {suite.time_limit_s:g} s")
            done = env.step(action, keys=())
            trace.actions.append(action)
            if env.score is not None:
                trace.score = max(trace.score, _score(env, done.info))
            if done.success or done.done:
                executed = executed[: i + 1]
                break
        _keep_prediction(result, suite.first_seed + episode, step, actions, executed, trace)
        if done.success or done.done:
            return done.success
        arrays = env.observe(suite.keys)


def _infer(
    session: LoopSession,
    arrays: Mapping[str, Array],
    step: int,
    executed: NDArray[np.float32] | None,
    frames: int,
    trace: _Trace,
) -> TickResult:
    began = time.perf_counter()
    result = session.infer(arrays, step=step, executed=executed, frames=frames)
    round_trip = (time.perf_counter() - began) * 1e3
    t = result.timings
    trace.ticks.append(Tick(step, round_trip, t.total_ms, t.model_ms, t.queue_ms, dict(t.stages_ms), bool(frames)))
    return result


def _checked(chunk: ActionChunk | None, step: int, horizon: int) -> ActionChunk:
    """The chunk, if it may be executed from ``step``."""
    if chunk is None:
        raise StageFailed("the server answered without an action chunk", reason=Reason.BAD_OUTPUT)
    if chunk.first_step != step or len(chunk.actions) < horizon:
        raise StageFailed(
            f"chunk of {len(chunk.actions)} actions from step {chunk.first_step}, wanted {horizon} from step {step}",
            reason=Reason.BAD_OUTPUT,
        )
    if not np.isfinite(chunk.actions).all():
        raise StageFailed("the chunk holds actions that are not finite", reason=Reason.BAD_OUTPUT)
    return chunk


def _wants_frames(suite: EvalSuite, episode: int, tick: int) -> bool:
    wanted = suite.predictions
    # Not at tick 0: nothing has moved yet. Fixed ticks, so that a result depends on suite and seed alone.
    return suite.frame_key is not None and episode < wanted.episodes and tick % wanted.every == wanted.every - 1


def _score(env: Env, info: Mapping[str, float]) -> float:
    key = str(env.score)
    if key not in info:
        raise ConfigError(f"env {env.name!r} reports no score {key!r}.{nearest(key, info)}")
    return float(info[key])


def _keep_prediction(
    result: TickResult,
    seed: int,
    step: int,
    actions: NDArray[np.float32],
    executed: NDArray[np.float32],
    trace: _Trace,
) -> None:
    """Keep predicted frames as far as they belong to what was executed: the world model was told ``actions``."""
    if result.frames_error is not None:
        trace.notes.append(f"frames from step {step}: {result.frames_error.reason}: {result.frames_error.text}")
    if result.frames is None:
        return
    n = min(len(result.frames.frames), len(executed))
    same = (actions[:n] == executed[:n]).all(axis=1)
    n = int(np.argmin(same)) if not same.all() else n
    if result.frames.first_step == step + 1 and n:
        trace.predictions.append(Prediction(seed, step, executed[:n], result.frames.frames[:n]))
