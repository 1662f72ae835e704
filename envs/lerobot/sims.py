"""What LeRobot's simulators need besides, each by its config name.

LeRobot draws a frame at every step, whoever looks. :meth:`Sim.pictures` is what an observation lacks because it is
drawn when it is asked for: the very frame, of the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from ..drawable import drawable

Stepped = tuple[Any, Any, bool, bool, dict[str, Any]]  # as gymnasium has it


class Sim:
    """Any simulator: LeRobot's own ``reset(seed=...)``, its frames at every step, the bounds of its action space."""

    packages: tuple[str, ...] = ()  # that decide what happens, besides LeRobot and what it makes
    score: str | None = None  # entry of info that says how near success is
    kept: tuple[str, ...] = ()  # entries of info besides, that are kept
    bounds: tuple[float, float] | None = None  # of actions, where the action space says others than a policy may use
    holds = False  # whether it is known which action does least
    mujoco = False  # whether it is MuJoCo that draws
    told_anew = True  # whether the instruction may be another in every episode

    def __init__(self, sim: Any) -> None:
        self.sim = sim

    def before_reset(self, seed: int) -> None:
        """Whatever of the last episode would change this one."""

    def step(self, env: gymnasium.Env[Any, Any], action: NDArray[np.float32]) -> Stepped:
        """One step of ``env``, the simulator within its wrappers."""
        return env.step(action)

    def hold(self) -> Any:
        """Where it ``holds``: the action that does least in the present state, or one number for all of it."""
        return 0.0

    def before_drawing(self) -> None:
        """MissingExtra: it needs OpenGL, which is not on this machine."""
        if self.mujoco:
            drawable()

    def pictures(self) -> Mapping[str, Any]:
        """Parts of the raw observation that are drawn on demand; empty: they are in it."""
        return {}

    def close(self) -> None:
        """Free what LeRobot's own ``close`` leaves."""


class PushT(Sim):
    packages = ("pymunk", "shapely")
    score = "coverage"
    holds = True

    def __init__(self, sim: Any) -> None:
        from ..pusht.simulator import steady

        super().__init__(sim)
        steady(sim)
        if sim.obs_type in ("pixels", "pixels_agent_pos"):
            sim.get_obs = lambda: {} if sim.obs_type == "pixels" else {"agent_pos": np.array(sim.agent.position)}

    def before_reset(self, seed: int) -> None:
        self.sim._last_action = None  # it would go on drawing the last episode's action

    def pictures(self) -> Mapping[str, Any]:
        return {"pixels": self.sim._render()} if "pixels" in self.sim.obs_type else {}

    def hold(self) -> Any:
        return self.sim.agent.position


class Aloha(Sim):
    """Its action space says -1..1, which joints in radians leave; LeRobot does not clip, and neither may we. Joints
    that are told to jump can make the simulation diverge; then the episode ends, and what is seen is what was before.
    """

    packages = ("dm_control", "mujoco")
    kept = ("diverged",)
    holds = mujoco = True
    told_anew = False
    bounds = (-3.15, 3.15)  # rad: the widest joint's range; grippers are 0..1

    def __init__(self, sim: Any) -> None:
        super().__init__(sim)
        self._cameras = ("top",) if "pixels" in sim.obs_type else ()
        task = sim._env.task
        # It draws three cameras of 640 x 480 at every step, of which one is seen.
        task.get_observation = lambda physics: {"qpos": task.get_qpos(physics), "images": {}}
        sim._format_raw_obs = lambda raw: {"agent_pos": raw["qpos"]} if sim.obs_type == "pixels_agent_pos" else {}

    def step(self, env: gymnasium.Env[Any, Any], action: NDArray[np.float32]) -> Stepped:
        from dm_control.rl.control import PhysicsError

        data = self.sim._env.physics.data
        before = [np.array(part) for part in (data.qpos, data.qvel, data.ctrl)]
        try:
            raw, reward, terminated, truncated, info = env.step(action)
        except PhysicsError:
            return self._before(before), 0.0, True, False, {"is_success": False, "diverged": True}
        return raw, reward, terminated, truncated, {**info, "diverged": False}

    def _before(self, state: Sequence[NDArray[np.float64]]) -> Any:
        """The observation of ``state``, put back so that it can be drawn."""
        physics = self.sim._env.physics
        for part, kept in zip((physics.data.qpos, physics.data.qvel, physics.data.ctrl), state, strict=True):
            part[:] = kept
        with physics.suppress_physics_errors():  # it may be on the brink
            physics.forward()
        return self.sim._format_raw_obs({"qpos": self.sim._env.task.get_qpos(physics)})

    def hold(self) -> Any:
        from ..aloha.env import told

        return told(self.sim._env.physics)

    def pictures(self) -> Mapping[str, Any]:
        self.before_drawing()
        drawn = {c: self.sim._env.physics.render(height=480, width=640, camera_id=c) for c in self._cameras}
        return {"pixels": drawn} if self.sim.obs_type == "pixels_agent_pos" else drawn

    def close(self) -> None:
        # Left to the garbage collector, a context that has drawn may wait for its thread forever.
        self.sim._env.physics.free()


class MetaWorld(Sim):
    """LeRobot's adapter begins another episode within the step that succeeds: its state would be that one's."""

    packages = ("metaworld", "mujoco")
    holds = mujoco = True  # actions are displacements of the hand
    told_anew = False

    def __init__(self, sim: Any) -> None:
        super().__init__(sim)
        reset = sim.reset

        def only_asked(seed: int | None = None, **options: Any) -> Any:
            return ({}, {}) if seed is None else reset(seed=seed, **options)

        sim.reset = only_asked
        sim._format_raw_obs = lambda raw: {"agent_pos": raw[:4]} if sim.obs_type == "pixels_agent_pos" else {}

    def pictures(self) -> Mapping[str, Any]:
        self.before_drawing()
        return {"pixels": self.sim.render()}


class Libero(Sim):
    """LeRobot counts initial states on from episode to episode, so that one depends on how many were before it: here
    the seed chooses."""

    packages = ("libero", "robosuite", "mujoco")
    told_anew = False

    def __init__(self, sim: Any) -> None:
        super().__init__(sim)
        self.holds = getattr(sim, "control_mode", "") == "relative"

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
