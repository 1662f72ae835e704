"""What LeRobot's simulators need besides, each by its config name.

LeRobot draws a frame at every step, whoever looks. :meth:`Sim.pictures` is what an observation lacks because it is
drawn when it is asked for: the very frame, of the same state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


class Sim:
    """Any simulator: LeRobot's own ``reset(seed=...)``, its frames at every step, the bounds of its action space."""

    packages: tuple[str, ...] = ()  # that decide what happens, besides LeRobot and what it makes
    score: str | None = None  # entry of info that says how near success is
    bounds: tuple[float, float] | None = None  # of actions, where the action space says others than a policy may use

    def __init__(self, sim: Any) -> None:
        self.sim = sim

    def before_reset(self, seed: int) -> None:
        """Whatever of the last episode would change this one."""

    def pictures(self) -> Mapping[str, Any]:
        """Parts of the raw observation that are drawn on demand; empty: they are in it."""
        return {}


class PushT(Sim):
    packages = ("pymunk", "shapely")
    score = "coverage"

    def __init__(self, sim: Any) -> None:
        super().__init__(sim)
        if sim.obs_type in ("pixels", "pixels_agent_pos"):
            sim.get_obs = lambda: {} if sim.obs_type == "pixels" else {"agent_pos": np.array(sim.agent.position)}

    def before_reset(self, seed: int) -> None:
        self.sim._last_action = None  # it would go on drawing the last episode's action

    def pictures(self) -> Mapping[str, Any]:
        return {"pixels": self.sim._render()} if "pixels" in self.sim.obs_type else {}


class Aloha(Sim):
    """Its action space says -1..1, which joints in radians leave; LeRobot does not clip, and neither may we."""

    packages = ("dm_control", "mujoco")
    bounds = (-3.15, 3.15)  # rad: the widest joint's range; grippers are 0..1

    def __init__(self, sim: Any) -> None:
        super().__init__(sim)
        self._cameras = ("top",) if "pixels" in sim.obs_type else ()
        task = sim._env.task
        # It draws three cameras of 640 x 480 at every step, of which one is seen.
        task.get_observation = lambda physics: {"qpos": task.get_qpos(physics), "images": {}}
        sim._format_raw_obs = lambda raw: {"agent_pos": raw["qpos"]} if sim.obs_type == "pixels_agent_pos" else {}

    def pictures(self) -> Mapping[str, Any]:
        drawn = {c: self.sim._env.physics.render(height=480, width=640, camera_id=c) for c in self._cameras}
        return {"pixels": drawn} if self.sim.obs_type == "pixels_agent_pos" else drawn


class MetaWorld(Sim):
    """LeRobot's adapter begins another episode within the step that succeeds: its state would be that one's."""

    packages = ("metaworld", "mujoco")

    def __init__(self, sim: Any) -> None:
        super().__init__(sim)
        reset = sim.reset

        def only_asked(seed: int | None = None, **options: Any) -> Any:
            return ({}, {}) if seed is None else reset(seed=seed, **options)

        sim.reset = only_asked
        sim._format_raw_obs = lambda raw: {"agent_pos": raw[:4]} if sim.obs_type == "pixels_agent_pos" else {}

    def pictures(self) -> Mapping[str, Any]:
        return {"pixels": self.sim.render()}


class Libero(Sim):
    """LeRobot counts initial states on from episode to episode, so that one depends on how many were before it: here
    the seed chooses."""

    packages = ("libero", "robosuite", "mujoco")

    def before_reset(self, seed: int) -> None:
        self.sim.init_state_id = seed


_SIMS: Mapping[str, type[Sim]] = {
    "pusht": PushT,
    "aloha": Aloha,
    "metaworld": MetaWorld,
    "libero": Libero,
    "libero_plus": Libero,
}


def sim_of(kind: str, sim: Any) -> Sim:
    """``sim``: the environment under all wrappers, as the config ``kind`` made it."""
    return _SIMS.get(kind, Sim)(sim)
