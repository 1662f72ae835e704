"""One imagined episode at a time as a gymnasium environment, with branches: :meth:`fork` and :meth:`rewind`."""

from __future__ import annotations

import contextlib
import operator
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import Box
from numpy.typing import NDArray

from omni_loop.client import Session
from omni_loop.env import check_action
from omni_loop.errors import InvalidInput, Reason, ServerUnavailable, StageFailed, StateError, UnknownSession
from omni_loop.types import ArraySpec, SessionSpec, TickResult

from .judge import Judge, Seen, Verdict, indifferent
from .served import ServedWorld, frame_key
from .start import Source, Start

Frame = NDArray[np.uint8]
Info = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Moment:
    """Where an episode stands after a call of ``step``: the session at ``at``, after ``step`` imagined steps."""

    at: int
    step: int
    frame: Frame
    scene: NDArray[np.float32] | None = None
    over: bool = False


class ImaginedEnv(gymnasium.Env[Frame, NDArray[np.float32]]):
    """Predicted frames as observations ``uint8[h, w, 3]``; actions ``float32[action_dim]`` in the pipeline's units.

    ``start`` gives the real frames an episode begins with; ``judge`` says reward and success (none: reward 0, never
    terminated); an episode is truncated after ``max_steps`` imagined steps. With ``chunk`` above 1 an action is
    ``float32[chunk, action_dim]``: that many steps are predicted by one call, the observation is the last of them,
    rewards are summed, ``info["frames"]`` has all, and what follows success is not looked at.

    An episode is a pure function of its seed and actions. Episodes without a seed draw theirs from the env's
    generator. ``info`` has ``seed``, ``step``, what the judge says and, where the pipeline reads a scene, ``scene
    float32[points, 2]``. ``history``: calls of ``step`` that :meth:`rewind` can take back.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  as gymnasium has it

    def __init__(
        self,
        world: ServedWorld,
        start: Source,
        *,
        judge: Judge = indifferent,
        frame: str = "",
        chunk: int = 1,
        max_steps: int = 300,
        history: int = 64,
        render_mode: str | None = None,
    ) -> None:
        """``frame``: the observation key that predicted frames continue; left out, the one of their shape.

        Raises:
            UnknownName, Unsupported: the server has no such pipeline, or nothing can be imagined in it.
            InvalidInput: a chunk the pipeline does not predict at once, or a count below 1.
        """
        if render_mode not in (None, "rgb_array"):
            raise InvalidInput(f"render_mode is {render_mode!r}; it must be None or 'rgb_array'")
        self.world, self.start, self.judge, self.render_mode = world, start, judge, render_mode
        self._session: Session | None = None
        self._moments: deque[Moment] = deque(maxlen=whole("history", history, 1) + 1)
        self.seed, self.max_steps, self.chunk = 0, whole("max_steps", max_steps, 1), whole("chunk", chunk, 1)
        world.hold()
        try:
            spec = world.spec
            self._key = frame_key(spec, frame)
            if chunk > spec.max_predict:
                raise InvalidInput(
                    f"chunk is {chunk}; pipeline {spec.pipeline!r} predicts 1..{spec.max_predict} at once"
                )
        except BaseException:
            world.release()
            raise
        self.closed = False
        self.metadata = {**self.metadata, "render_fps": spec.control_hz}
        self._action = spec.action if chunk == 1 else replace(spec.action, shape=(chunk, *spec.action.shape))
        self.action_space = box(self._action)
        self.observation_space = box(_frame(spec))

    @property
    def present(self) -> Moment:
        """Raises StateError before the first reset."""
        if not self._moments:
            raise StateError("the imagined env has no episode yet: reset it first", reason=Reason.BAD_REQUEST)
        return self._moments[-1]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Frame, Info]:
        """Begin the episode of ``seed``; the observation is its last real frame. Takes no ``options``."""
        check_options(options, ())
        seed = None if seed is None else whole("seed", seed, 0)
        super().reset(seed=seed)
        if self.closed:
            raise StateError("the imagined env is closed", reason=Reason.CLOSED)
        self.seed = int(self.np_random.integers(1 << 31)) if seed is None else seed
        self._end()
        begin = self.start(self.seed)
        session = self._session = self.world.open(self.seed)
        arrays = {key: np.ascontiguousarray(begin.arrays[key]) for key in _all_keys(session.keys, begin)}
        session.recondition(arrays, executed=begin.executed, first_step=0)
        frames = arrays[self._key]
        self._moments.append(Moment(len(frames) - 1, 0, frames[-1]))
        return self._observation(), self._info(Verdict())

    def step(self, action: NDArray[np.float32]) -> tuple[Frame, float, bool, bool, Info]:
        """Imagine what ``action`` leads to.

        Raises:
            TensorError: an action of another shape, not finite or outside the bounds; nothing has changed.
            StateError: there is no episode, or it is over.
            OmniLoopError: whatever the server says; the episode is as before.
        """
        now = self.present
        if now.over:
            raise StateError("the imagined episode is over: reset it first", reason=Reason.BAD_REQUEST)
        assert self._session is not None
        given = check_action(self._action, action)
        actions = given.reshape(-1, given.shape[-1])[: self.max_steps - now.step]
        result = self._session.predict(actions)
        seen = _seen(result, actions, now.step)
        verdicts: list[Verdict] = []
        for one in seen:
            verdicts.append(self.judge(one))
            if verdicts[-1].success:
                break
        last, verdict = seen[len(verdicts) - 1], verdicts[-1]
        truncated = not verdict.success and last.step >= self.max_steps
        over = verdict.success or truncated
        self._moments.append(Moment(now.at + len(actions), last.step, last.frame, last.scene, over))
        info = self._info(verdict)
        if self.chunk > 1:
            info["frames"] = np.stack([one.frame for one in seen])
        return self._observation(), float(sum(v.reward for v in verdicts)), verdict.success, truncated, info

    def fork(self, *, seed: int | None = None) -> ImaginedEnv:
        """An env whose episode stands where this one does; from here on each goes its own way, and is closed on its
        own. ``seed`` is of its noise; None keeps this episode's, and the same actions lead to the same frames."""
        self.present  # noqa: B018  raises
        assert self._session is not None
        child = ImaginedEnv(
            self.world,
            self.start,
            judge=self.judge,
            frame=self._key,
            chunk=self.chunk,
            max_steps=self.max_steps,
            history=(self._moments.maxlen or 1) - 1,
            render_mode=self.render_mode,
        )
        try:
            child._session = self._session.fork(seed=seed)
        except BaseException:
            child.close()
            raise
        child.seed, child._moments = self.seed, self._moments.copy()
        child.np_random.bit_generator.state = self.np_random.bit_generator.state
        return child

    def rewind(self, calls: int = 1) -> tuple[Frame, Info]:
        """Take back the last ``calls`` of ``step``; the observation is as it was then. The session begins a new epoch,
        so that the same actions meet other noise.

        Raises:
            StateError: more than can be taken back.
        """
        self.present  # noqa: B018  raises
        assert self._session is not None
        calls = whole("calls", calls)
        if not 0 <= calls < len(self._moments):
            text = f"{calls} steps cannot be taken back: between 0 and {len(self._moments) - 1} can"
            raise StateError(text, reason=Reason.BAD_REQUEST)
        if calls:
            self._session.rewind(self._moments[-1 - calls].at)
            for _ in range(calls):
                self._moments.pop()
        return self._observation(), self._info(Verdict())

    def render(self) -> Frame | None:
        """The present frame, with render mode ``rgb_array``."""
        return None if self.render_mode is None else self._observation()

    def close(self) -> None:
        """Free the session, if its server still has it; a server that was started for this world ends with its last
        env. A second call does nothing."""
        if not self.closed:
            self.closed = True
            try:
                self._end()
            finally:
                self.world.release()

    def _end(self) -> None:
        session, self._session = self._session, None
        self._moments.clear()
        if session is not None:
            # A server that is gone took it along, and one that forgot it has nothing left to free.
            with contextlib.suppress(ServerUnavailable, UnknownSession):
                session.close()

    def _observation(self) -> Frame:
        return self.present.frame.copy()

    def _info(self, verdict: Verdict) -> Info:
        now = self.present
        info: Info = {"seed": self.seed, "step": now.step, "success": verdict.success, **verdict.info}
        if now.scene is not None:
            info["scene"] = now.scene.copy()
        return info


def _seen(result: TickResult, actions: NDArray[np.float32], step: int) -> list[Seen]:
    """What was imagined under ``actions`` from ``step`` on."""
    made = result.frames
    if made is None or len(made.frames) != len(actions):
        count = 0 if made is None else len(made.frames)
        raise StageFailed(f"{len(actions)} frames were asked for, {count} came", reason=Reason.BAD_OUTPUT)
    said = result.progress
    return [
        Seen(
            step + i + 1,
            actions[i],
            made.frames[i],
            None if made.scene is None else made.scene[i],
            None if said is None else said.progress,
            None if said is None else said.done,
        )
        for i in range(len(actions))
    ]


def box(spec: ArraySpec) -> Box[Any]:
    """The gymnasium space of ``spec``: bounds that it leaves open are the dtype's, or infinite."""
    dtype = np.dtype(spec.dtype)
    limits = np.iinfo(dtype) if dtype.kind in "iu" else None
    low = spec.low if spec.low is not None else -np.inf if limits is None else limits.min
    high = spec.high if spec.high is not None else np.inf if limits is None else limits.max
    return Box(low, high, spec.shape, dtype.type)


def _frame(spec: SessionSpec) -> ArraySpec:
    assert spec.frame is not None  # a ServedWorld's has one
    return spec.frame


def _all_keys(keys: Collection[str], begin: Start) -> Collection[str]:
    """``keys``, when the start has them all."""
    if missing := sorted(set(keys) - set(begin.arrays)):
        raise InvalidInput(f"the start of the episode lacks {', '.join(missing)}; it has {', '.join(begin.arrays)}")
    return keys


def whole(name: str, value: Any, least: int | None = None) -> int:
    """``value``, numpy's whole numbers too. Raises InvalidInput for anything else, or less than ``least``."""
    try:
        given = operator.index(value)
    except TypeError:
        raise InvalidInput(f"{name} is {value!r}, wanted a whole number") from None
    if least is not None and given < least:
        raise InvalidInput(f"{name} is {given}, wanted at least {least}")
    return given


def check_options(options: Mapping[str, Any] | None, known: Collection[str]) -> None:
    """Raises InvalidInput for an option of ``reset`` that is not ``known``."""
    if unknown := sorted(set(options or {}) - set(known)):
        says = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InvalidInput(f"reset knows no option {unknown[0]!r}; {says}")
