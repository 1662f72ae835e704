"""FetchPickAndPlace as LeRobot has environments, so that ``lerobot-eval`` can run what ``fetch-act`` runs: importing
this registers the config ``omni_loop_fetch``. It is the env of that suite, observed as LeRobot names things."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gymnasium
import numpy as np
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.envs.configs import EnvConfig

from omni_loop import registry

CONFIG, _ID, _ENV = "omni_loop_fetch", "omni_loop/FetchPickAndPlace-v0", "fetch-pick-place"
_NAMES = {"agent_pos": "state", "environment_state": "environment_state"}  # LeRobot's of ours


class Fetch(gymnasium.Env[Any, Any]):
    """The registered env, one episode at a time; it ends at its first success, as the evaluator ends it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012  gymnasium's own way
    render_mode = "rgb_array"

    def __init__(self) -> None:
        self._env = registry.load(registry.ENVS, _ENV)()
        box, shapes = gymnasium.spaces.Box, {spec.name: spec.shape for spec in self._env.observations}
        spaces: dict[str, gymnasium.Space[Any]] = {
            theirs: box(-np.inf, np.inf, shapes[ours], np.float32) for theirs, ours in _NAMES.items()
        }
        action = self._env.action
        self.observation_space = gymnasium.spaces.Dict(spaces)
        self.action_space = box(action.low, action.high, action.shape, np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = int(self.np_random.integers(1 << 31)) if seed is None else seed
        return self._named(self._env.reset(chosen, tuple(_NAMES.values()))), {"is_success": False}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        low, high = self._env.action.low, self._env.action.high
        step = self._env.step(np.clip(action, low, high), tuple(_NAMES.values()))
        ended = step.terminated or step.success
        return (
            self._named(step.arrays), step.reward, ended, step.truncated and not ended, {"is_success": step.success}
        )  # fmt: skip

    def _named(self, arrays: Any) -> dict[str, Any]:
        return {theirs: arrays[ours] for theirs, ours in _NAMES.items()}

    def render(self) -> Any:
        return self._env.render()

    def close(self) -> None:
        self._env.close()


gymnasium.register(_ID, f"{__name__}:Fetch")


@EnvConfig.register_subclass(CONFIG)
@dataclass
class FetchConfig(EnvConfig):  # type: ignore[misc]  # LeRobot is not typed
    task: str | None = "FetchPickAndPlace-v0"
    fps: int = 25
    episode_length: int = 50
    features: dict[str, Any] = field(
        default_factory=lambda: {
            "action": PolicyFeature(FeatureType.ACTION, (4,)),
            "agent_pos": PolicyFeature(FeatureType.STATE, (28,)),
            "environment_state": PolicyFeature(FeatureType.ENV, (18,)),
        }
    )
    features_map: dict[str, str] = field(
        default_factory=lambda: {
            "action": "action",
            "agent_pos": "observation.state",
            "environment_state": "observation.environment_state",
        }
    )

    @property
    def gym_id(self) -> str:
        return _ID

    @property
    def gym_kwargs(self) -> dict[str, Any]:
        return {"max_episode_steps": self.episode_length}
