"""Many imagined episodes in step, one session each of one server, which predicts their frames in batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import NDArray

from omni_loop.errors import InvalidInput, Reason, StateError

from .judge import Judge, indifferent
from .served import ServedWorld
from .single import Frame, ImaginedEnv, Info, check_options, whole
from .start import Source

T = TypeVar("T")
Bools = NDArray[np.bool_]
Stepped = tuple[Frame, float, bool, bool, Info, tuple[Frame, Info] | None]  # and the end of the episode before


class ImaginedVectorEnv(VectorEnv[NDArray[np.uint8], NDArray[np.float32], NDArray[Any]]):
    """``num_envs`` of :class:`~.single.ImaginedEnv`, which documents the arguments, stepped at the same time.

    ``reset(seed=s)`` gives episode i the seed ``s + i``; an episode does not depend on the others, but for the float
    rounding that the shape of a batch brings (a grey level here and there). ``autoreset_mode`` as gymnasium has it: a
    finished episode begins anew at the next step, in the same one (``info["final_obs"]``, ``info["final_info"]``), or
    by ``reset(options={"reset_mask": bool[num_envs]})``. An error of one session is raised when all have answered; the
    episodes then stand at different steps: reset.
    """

    envs: tuple[ImaginedEnv, ...] = ()
    _threads: ThreadPoolExecutor | None = None

    def __init__(
        self,
        world: ServedWorld,
        start: Source,
        num_envs: int,
        *,
        judge: Judge = indifferent,
        frame: str = "",
        chunk: int = 1,
        max_steps: int = 300,
        history: int = 64,
        autoreset_mode: AutoresetMode = AutoresetMode.NEXT_STEP,
    ) -> None:
        num_envs = whole("num_envs", num_envs, 1)
        make = partial(
            ImaginedEnv, world, start, judge=judge, frame=frame, chunk=chunk, max_steps=max_steps, history=history
        )
        world.hold()  # so that the server of a world outlives a failure below
        envs: list[ImaginedEnv] = []
        try:
            envs.extend(make(render_mode="rgb_array") for _ in range(num_envs))
        except BaseException:
            for env in envs:
                env.close()
            raise
        finally:
            world.release()
        self._set_up(envs, autoreset_mode)

    def _set_up(self, envs: Sequence[ImaginedEnv], mode: AutoresetMode) -> None:
        self.envs, self.num_envs, self.autoreset_mode = tuple(envs), len(envs), AutoresetMode(mode)
        self.metadata = {**envs[0].metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = "rgb_array"
        self.single_observation_space = envs[0].observation_space
        self.single_action_space = envs[0].action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._threads = ThreadPoolExecutor(self.num_envs, thread_name_prefix="imagined")

    @property
    def over(self) -> Bools:
        """``bool[num_envs]``: whose episode has ended and not begun anew."""
        return np.array([env.present.over for env in self.envs])

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[NDArray[np.uint8], Info]:
        """Begin all episodes, or those of ``options["reset_mask"] bool[num_envs]``."""
        check_options(options, ("reset_mask",))
        seeds = self._seeds(seed)
        mask = self._mask((options or {}).get("reset_mask"))
        begun = self._all(
            [partial(env.reset, seed=s) if m else None for env, s, m in zip(self.envs, seeds, mask, strict=True)]
        )
        infos: Info = {}
        for i, made in enumerate(begun):
            if made is not None:
                infos = self._add_info(infos, made[1], i)
        return self._observations(), infos

    def step(self, actions: NDArray[np.float32]) -> tuple[NDArray[np.uint8], NDArray[np.float64], Bools, Bools, Info]:
        """``actions float32[num_envs, ...]``; those of episodes that begin anew at this step are not looked at.

        Raises:
            StateError: with autoreset disabled, an episode is over.
        """
        given = np.asarray(actions)
        if given.shape != self.action_space.shape:
            raise InvalidInput(f"actions have shape {list(given.shape)}, wanted {list(self.action_space.shape or ())}")
        over = self.over
        if self.autoreset_mode is AutoresetMode.DISABLED and over.any():
            text = f"the episodes of envs {np.flatnonzero(over).tolist()} are over: reset them with a reset_mask"
            raise StateError(text, reason=Reason.BAD_REQUEST)
        made = self._all([partial(self._one, i, given[i]) for i in range(self.num_envs)])
        infos: Info = {}
        rewards, ended, cut = np.zeros(self.num_envs), np.zeros(self.num_envs, bool), np.zeros(self.num_envs, bool)
        for i, one in enumerate(made):
            assert one is not None
            _, rewards[i], ended[i], cut[i], info, final = one
            if final is not None:
                infos = self._add_info(infos, {"final_obs": final[0], "final_info": final[1]}, i)
            infos = self._add_info(infos, info, i)
        return self._observations(), rewards, ended, cut, infos

    def fork(self, *, seed: int | None = None) -> ImaginedVectorEnv:
        """Another vector env whose episodes stand where these do; see :meth:`ImaginedEnv.fork`."""
        children: list[ImaginedEnv] = []
        try:
            children.extend(env.fork(seed=seed) for env in self.envs)
        except BaseException:
            for child in children:
                child.close()
            raise
        twin = ImaginedVectorEnv.__new__(ImaginedVectorEnv)
        twin._set_up(children, self.autoreset_mode)
        return twin

    def rewind(self, calls: int = 1, mask: Bools | None = None) -> tuple[NDArray[np.uint8], Info]:
        """Take back the last ``calls`` of ``step`` of all episodes, or of those of ``mask bool[num_envs]``; see
        :meth:`ImaginedEnv.rewind`."""
        chosen = zip(self.envs, self._mask(mask), strict=True)
        back = self._all([partial(env.rewind, calls) if m else None for env, m in chosen])
        infos: Info = {}
        for i, made in enumerate(back):
            if made is not None:
                infos = self._add_info(infos, made[1], i)
        return self._observations(), infos

    def render(self) -> tuple[Frame, ...]:
        """The present frame of each."""
        return tuple(env.present.frame.copy() for env in self.envs)

    def close_extras(self, **kwargs: Any) -> None:
        with ExitStack() as all_of_them:  # also when one of them fails
            if self._threads is not None:
                all_of_them.callback(self._threads.shutdown)
            for env in self.envs:
                all_of_them.callback(env.close)

    def _one(self, i: int, action: NDArray[np.float32]) -> Stepped:
        env = self.envs[i]
        if env.present.over:  # NEXT_STEP: this step begins the next episode
            frame, info = env.reset()
            return frame, 0.0, False, False, info, None
        frame, reward, ended, cut, info = env.step(action)
        if self.autoreset_mode is AutoresetMode.SAME_STEP and (ended or cut):
            final = frame, info
            frame, info = env.reset()
            return frame, reward, ended, cut, info, final
        return frame, reward, ended, cut, info, None

    def _all(self, calls: Sequence[Callable[[], T] | None]) -> list[T | None]:
        """Results of ``calls``, made at the same time; the first error, once all have answered."""
        if self.closed:
            raise StateError("the imagined envs are closed", reason=Reason.CLOSED)
        threads = self._threads
        assert threads is not None  # there is one from the end of __init__ on
        futures: list[Future[T] | None] = [threads.submit(call) if call else None for call in calls]
        errors = [f.exception() for f in futures if f is not None]
        for error in errors:
            if error is not None:
                raise error
        return [None if f is None else f.result() for f in futures]

    def _seeds(self, seed: Any) -> list[int | None]:
        if seed is None:
            return [None] * self.num_envs
        if np.ndim(seed) == 0:
            first = whole("seed", seed, 0)
            return [first + i for i in range(self.num_envs)]
        if len(seed) != self.num_envs:
            raise InvalidInput(f"{len(seed)} seeds for {self.num_envs} envs")
        return list(seed)

    def _mask(self, mask: Any) -> Bools:
        if mask is None:
            return np.ones(self.num_envs, bool)
        chosen = np.asarray(mask)
        if chosen.shape != (self.num_envs,) or chosen.dtype != np.bool_ or not chosen.any():
            got = f"{chosen.dtype}{list(chosen.shape)}"
            raise InvalidInput(f"a mask is bool[{self.num_envs}] with at least one of them, not {got}")
        return chosen

    def _observations(self) -> NDArray[np.uint8]:
        return np.stack(self.render())
