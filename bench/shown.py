"""A robot of LeRobot's kind that shows what it is given, which LeRobot finds by its module's name; and the step that a
policy without cameras needs behind LeRobot's server."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from lerobot.processor import ObservationProcessorStep, ProcessorStepRegistry
from lerobot.robots.config import RobotConfig
from lerobot.robots.robot import Robot


@RobotConfig.register_subclass("shown")
@dataclass
class ShownConfig(RobotConfig):  # type: ignore[misc]  # LeRobot is not typed
    """``joints`` make the feature observation.state; ``views`` are cameras by name, of a size ``(h, w)``."""

    joints: int = 1
    actions: int = 1
    views: dict[str, tuple[int, int]] = field(default_factory=dict)


class Shown(Robot):  # type: ignore[misc]  # LeRobot is not typed
    """Observes :attr:`scene`, and does nothing with what it is sent."""

    config_class = ShownConfig
    name = "shown"

    def __init__(self, config: ShownConfig) -> None:
        super().__init__(config)
        self.config = config
        self.scene: dict[str, Any] = {}

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        cameras = {name: (*size, 3) for name, size in self.config.views.items()}
        return {f"j{i}.pos": float for i in range(self.config.joints)} | cameras

    @cached_property
    def action_features(self) -> dict[str, type]:
        return {f"a{i}.pos": float for i in range(self.config.actions)}

    @property
    def is_connected(self) -> bool:
        return True

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None: ...

    def calibrate(self) -> None: ...

    def configure(self) -> None: ...

    def get_observation(self) -> dict[str, Any]:
        return dict(self.scene)

    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        return action

    def disconnect(self) -> None: ...


@ProcessorStepRegistry.register("shown_state_twice")
class StateTwice(ObservationProcessorStep):  # type: ignore[misc]
    """LeRobot's server hands a policy the state and images alone, and an ACT without images reads the environment's
    state too: it gets the same numbers."""

    def observation(self, observation: dict[str, Any]) -> dict[str, Any]:
        return observation | {"observation.environment_state": observation["observation.state"]}

    def transform_features(self, features: Any) -> Any:
        return features
