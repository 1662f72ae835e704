"""An environment of ``lerobot.envs`` by its config name: what ``lerobot-eval --env.type=NAME`` would run.

env: lerobot
env_options: {type: pusht, obs_type: environment_state_agent_pos}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.errors import ConfigError, Unsupported, nearest
from omni_loop.types import Array, ArraySpec

from ..gymnasium_adapter import modules_of
from .config import Built, build, configure
from .observations import naming, specs
from .sims import sim_of

_SUCCESS = "is_success"  # what LeRobot reads
_TOLD = "task_description"  # and what it tells a policy


class LeRobotEnv(BaseEnv):
    """LeRobot's env ``type``; all other options are fields of its config (``task``, ``obs_type``, ``fps``, ...).

    Observations are called as LeRobot's policies call them, without ``observation.``: ``state``, ``environment_state``,
    ``image``, ``images.<camera>``. Every episode is a function of its seed alone. Frames of pusht, aloha and metaworld
    are drawn only when they are asked for; other simulators draw them at every step, as LeRobot has it.

    ``max_steps`` None: as the config or the simulator says. ``task_id`` chooses among the tasks of a benchmark.
    ``success_key``: the entry of ``info`` that says so, which has to be there at every step. Where the simulation
    diverges (aloha) the episode ends without success, and with ``diverged`` 1 in ``info``.

    Raises:
        MissingExtra: lerobot, or the simulator, is not installed.
        UnknownName, ConfigError, Unsupported: no such config, a field or value it does not take, one that is none here.
    """

    def __init__(
        self,
        max_steps: int | None = None,
        *,
        type: str,
        task_id: int | None = None,
        success_key: str = _SUCCESS,
        **fields: Any,
    ) -> None:
        config = configure(type, fields, max_steps)
        built = build(config, task_id)
        try:
            self._take(type, config, built, max_steps, success_key)
        except BaseException:
            built.vector.close()
            raise

    def _take(self, type: str, config: Any, built: Built, max_steps: int | None, success_key: str) -> None:
        """Become the env of what was ``built``."""
        limit = max_steps or getattr(config, "episode_length", None) or getattr(built.env, "_max_episode_steps", None)
        if limit is None:
            raise ConfigError(f"LeRobot's env {type!r} says no length of its episodes; name max_steps")
        super().__init__(int(limit))
        self.name, self.kind, self.control_hz = f"lerobot/{type}", type, float(config.fps)
        self._env, self._vector, self._after = built.env, built.vector, built.postprocess
        self._sim = sim_of(type, built.env.unwrapped)
        self.packages = ("lerobot", *modules_of(built.env), *self._sim.packages)
        self._name = naming(built.preprocess)
        self._success_key, self.score = success_key, self._sim.score
        # The space is asked before anything is drawn on demand; it has all keys.
        self.observations = specs(self._name, built.env.observation_space)
        self._images = {spec.name for spec in self.observations if spec.dtype == "uint8"}
        self.action = _action(self.name, built.env.action_space, self._sim.bounds)
        self._raw: Any = {}
        self._seen: dict[str, Array] = {}  # of the present state, as far as somebody looked
        self.instruction_of_episode = self._sim.told_anew and hasattr(self.simulator, _TOLD)

    @property
    def simulator(self) -> Any:
        """LeRobot's environment under all wrappers: for experts."""
        return self._env.unwrapped

    @property
    def instruction(self) -> str:
        """What LeRobot tells a policy: the task in words, or else its name; "" where there is neither. Of the present
        episode, where ``instruction_of_episode``."""
        return str(getattr(self.simulator, _TOLD, getattr(self.simulator, "task", "")))

    @property
    def hold(self) -> Callable[[], NDArray[np.float32]]:
        """As an env's own. Unsupported, and that before any episode begins: of this simulator nobody knows which action
        does least."""
        if not self._sim.holds:
            raise Unsupported(f"env {self.name!r} does not say which action holds still")
        return self._hold

    def _hold(self) -> NDArray[np.float32]:
        held = np.broadcast_to(np.asarray(self._sim.hold(), np.float32), self.action.shape)
        return np.clip(held, self.action.low, self.action.high).astype(np.float32)

    def _reset(self, seed: int) -> None:
        self._sim.before_reset(seed)
        self._raw, _ = self._env.reset(seed=seed)
        self._seen = {}

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        self._raw, reward, terminated, truncated, info = self._sim.step(self._env, self._sent(action))
        self._seen = {}
        success = self._number(info, self._success_key, "success key") > 0.5
        kept = {} if self.score is None else {self.score: self._number(info, self.score, "score")}
        kept |= {key: self._number(info, key, "entry") for key in self._sim.kept}
        return EnvStep({}, float(reward), bool(terminated), bool(truncated), success, kept)

    def _sent(self, action: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._after is None:
            return action
        import torch

        given = self._after({"action": torch.from_numpy(action.copy())[None]})
        return np.asarray(given["action"].numpy()[0], np.float32)

    def _number(self, info: Mapping[str, Any], key: str, what: str) -> float:
        if key not in info:
            raise ConfigError(f"env {self.name!r} reports no {what} {key!r}.{nearest(key, info)}")
        return float(np.asarray(info[key]).item())

    def _array(self, key: str) -> Array:
        if key not in self._seen:
            raw = self._raw
            if key in self._images and (drawn := self._sim.pictures()):
                raw = {**raw, **drawn}
            self._seen |= self._name(raw)
        array = self._seen[key]
        spec = next(s for s in self.observations if s.name == key)
        if array.shape != spec.shape:
            shapes = f"{list(array.shape)}, its space says {list(spec.shape)}"
            raise ConfigError(f"env {self.name!r}: {key!r} has shape {shapes}")
        return array.copy()

    def _render(self) -> NDArray[np.uint8]:
        self._sim.before_drawing()
        frame = self._env.render()
        if not isinstance(frame, np.ndarray) or frame.ndim != 3:
            raise Unsupported(f"env {self.name!r} draws no picture: its render_mode is {self._env.render_mode!r}")
        return np.ascontiguousarray(frame, np.uint8)

    def _close(self) -> None:
        self._sim.close()
        self._vector.close()


def _action(name: str, space: Any, bounds: tuple[float, float] | None) -> ArraySpec:
    """``bounds``, or the widest of the space: LeRobot clips nothing, and one bound for all is what a spec has."""
    if not hasattr(space, "low") or len(space.shape) != 1:
        raise ConfigError(f"env {name!r}: actions must be a one-dimensional Box, not {space}")
    low, high = bounds or (float(np.min(space.low)), float(np.max(space.high)))
    finite = np.isfinite([low, high])
    return ArraySpec(
        "action", "float32", space.shape, low=low if finite[0] else None, high=high if finite[1] else None
    )  # fmt: skip
