"""PushT as the robot of another project's client."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from omni_loop import registry

EPISODE, STEPS, PROMPT = 7, 300, "push the T onto the goal"


class Table:
    """One episode: at most ``steps`` actions, or until the T covers its goal."""

    def __init__(self, steps: int = STEPS) -> None:
        self.env = registry.build(registry.ENVS, "pusht", {})
        self.seen: dict[str, Any] = dict(self.env.reset(EPISODE))
        self.most, self.steps, self.success = steps, 0, False
        self.ended = threading.Event()
        self.actions: list[np.ndarray[Any, Any]] = []

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    def act(self, action: np.ndarray[Any, Any]) -> None:
        if self.over:
            return
        self.actions.append(np.array(action))
        step = self.env.step(np.clip(action, 0, 512).astype(np.float32))
        self.seen = dict(step.arrays)
        self.steps += 1
        self.success = bool(step.success)
        if self.success or self.steps >= self.most:
            self.ended.set()

    def check(self) -> None:
        """It was played to its end, with actions of a policy that looks: valid ones, that differ."""
        self.env.close()
        assert self.over
        played = np.stack(self.actions)
        assert np.isfinite(played).all()
        assert 0 <= played.min() <= played.max() <= 512
        assert np.ptp(played, axis=0).min() > 20


def lerobot_robot() -> tuple[Any, Any, Table]:
    """A configuration of a LeRobot robot over a :class:`Table`, what makes the robot of it, and the table."""
    from lerobot.robots import Robot, RobotConfig

    table = Table()

    @RobotConfig.register_subclass("pusht_table")
    @dataclass(kw_only=True)
    class TableConfig(RobotConfig):
        pass

    class TableRobot(Robot):
        config_class, name = TableConfig, "pusht_table"
        motors = ("before_x", "before_y", "x", "y")

        @property
        def observation_features(self) -> dict[str, Any]:
            return {**dict.fromkeys(self.motors, float), "image": (96, 96, 3)}

        @property
        def action_features(self) -> dict[str, Any]:
            return {"x": float, "y": float}

        is_connected = True
        is_calibrated = True

        def connect(self, calibrate: bool = True) -> None:
            pass

        def calibrate(self) -> None:
            pass

        def configure(self) -> None:
            pass

        def disconnect(self) -> None:
            pass

        def get_observation(self) -> dict[str, Any]:
            numbers = table.seen["agent_pos"].reshape(-1)
            return {**dict(zip(self.motors, map(float, numbers), strict=True)), "image": table.seen["image"]}

        def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
            table.act(np.array([action["x"], action["y"]], np.float32))
            return action

    return TableConfig(), TableRobot, table
