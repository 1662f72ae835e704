"""One of Meta-World's tasks, of which every episode is a pure function of its seed and its actions.

As it comes, Meta-World ignores the seed of ``reset``, hides the goal, clips it to 0 when it is shown, and carries the
last episode's bodies and attributes into the next, whose first observation even shows some of them. What is done about
each stands where it is done.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import ConfigError, UnknownName, nearest

from .. import headless

headless.prepare()  # before mujoco is imported

import mujoco  # noqa: E402
from metaworld.env_dict import ALL_V3_ENVIRONMENTS  # noqa: E402

TASKS = tuple(sorted(ALL_V3_ENVIRONMENTS))  # MT50
STATE = 39
HIGHEST_REWARD = 10.0
SUCCESS = "success"
_NOW = 18  # numbers seen at one step
_PLACES = ("body_pos", "body_quat", "geom_pos", "geom_quat", "site_pos", "site_quat")  # of a model: tasks move these
_PLAIN = (bool, int, float, str, type(None), np.ndarray, dict, list, tuple)


class Simulator:
    """``task`` is a name of MT50, as ``"door-open-v3"``; another is :class:`UnknownName`.

    ``seen float64[39]`` is what Meta-World's observation holds: hand and objects now (18), a control step ago (18; at
    step 0 the same again), and the goal (3).
    """

    def __init__(self, task: str, max_steps: int) -> None:
        if task not in ALL_V3_ENVIRONMENTS:
            raise UnknownName(f"Meta-World has no task {task!r}.{nearest(task, TASKS)}")
        sim = ALL_V3_ENVIRONMENTS[task]()
        sim._set_task_called = True  # goals are drawn at reset instead of set by a task object
        sim._freeze_rand_vec = False
        sim.seeded_rand_vec = True  # from `seed()`, else from numpy's global state
        sim._partially_observable = False  # the goal is shown
        vars(sim).pop("sawyer_observation_space", None)  # made while it was hidden: steps would clip the goal to 0
        sim.max_path_length = max_steps + 1  # it raises at its own limit; the env's is the one that counts
        self.task, self._sim = task, sim
        self.model, self.data = sim.model, sim.data
        self.seen: NDArray[np.float64] = np.zeros(STATE)
        self._places = {name: getattr(self.model, name).copy() for name in _PLACES}
        self._attributes = {name: value for name, value in vars(sim).items() if _is_plain(value)}
        self._attributes = copy.deepcopy(self._attributes)
        self._still = False  # while drawing: the hand stays
        self._rest: _Rest | None = None
        sim._reset_hand, sim.touching_object = self._reset_hand, self._touching
        self._pads = [self.model.geom(name).id for name in ("leftpad_geom", "rightpad_geom")]

    def reset(self, seed: int) -> None:
        """Begin the episode of ``seed``: goal and objects as in a new Meta-World environment after ``seed(seed)`` and
        ``reset()``."""
        sim = self._sim
        self._forget()
        sim.seed(seed)
        self._still = True
        sim.reset_model()  # Meta-World's reset draws twice and keeps the second; here the first costs no simulation
        self._still = False
        self._forget()
        sim.reset_model()
        sim.curr_path_length = 0
        mujoco.mj_forward(self.model, self.data)  # else some objects are still seen where they stood before
        sim._prev_obs = sim._get_curr_obs_combined_no_goal()
        self.seen = np.asarray(sim._get_obs(), np.float64)

    def step(self, action: NDArray[np.float32]) -> tuple[float, bool]:
        """One control step of 1/80 s: reward in 0..10, and whether the task succeeds at this step."""
        self.seen, reward, _, _, info = self._sim.step(action)
        if SUCCESS not in info:
            raise ConfigError(f"task {self.task!r} reports no success key {SUCCESS!r}.{nearest(SUCCESS, info)}")
        return float(reward), bool(info[SUCCESS] > 0.5)

    def close(self) -> None:
        self._sim.close()

    def _forget(self) -> None:
        """As new: nothing of an episode before is left in model, data or attributes."""
        for name, value in self._places.items():
            getattr(self.model, name)[:] = value
        mujoco.mj_resetData(self.model, self.data)
        mujoco.mj_forward(self.model, self.data)
        vars(self._sim).update(copy.deepcopy(self._attributes))

    def _reset_hand(self, steps: int = 50) -> None:
        """In place of the simulator's own, which moves the hand to where it begins by ``steps`` control steps, as long
        as a short episode. It does so from the same state every time: where that led is kept."""
        sim = self._sim
        if self._still:
            sim.init_tcp = sim.tcp_center
            return
        before = self._fingerprint()
        if self._rest is None or self._rest.before != before:
            known = dict(vars(sim))
            type(sim)._reset_hand(sim, steps)
            found = {k: v for k, v in vars(sim).items() if known.get(k, sim) is not v and _is_plain(v)}
            data = mujoco.MjData(self.model)
            mujoco.mj_copyData(data, self.model, self.data)
            self._rest = _Rest(before, data, copy.deepcopy(found))
            return
        mujoco.mj_copyData(self.data, self.model, self._rest.data)
        vars(sim).update(copy.deepcopy(self._rest.attributes))

    def _touching(self, geom: int) -> bool:
        """In place of the simulator's own, which looks at every contact four times in Python: a fifth of a step."""
        contact = self.data.contact
        pairs, addresses = contact.geom, contact.efc_address
        by_object = (pairs == geom).any(axis=1)
        forces = (self.data.efc_force[addresses[by_object & (pairs == pad).any(axis=1)]].sum() for pad in self._pads)
        return all(force > 0 for force in forces)

    def _fingerprint(self) -> bytes:
        """Of all that moving the hand depends on."""
        parts = [getattr(self.model, name) for name in _PLACES]
        parts += [self.data.qpos, self.data.qvel, self.data.mocap_pos, np.asarray(self._sim.hand_init_pos)]
        return b"".join(part.tobytes() for part in parts)


class _Rest:
    """Where moving the hand from ``before`` led."""

    def __init__(self, before: bytes, data: Any, attributes: dict[str, Any]) -> None:
        self.before, self.data, self.attributes = before, data, attributes


def _is_plain(value: Any) -> bool:
    """Whether it is a value of its own: a view into the simulation moves by itself and must stay a view."""
    return isinstance(value, _PLAIN) and not (isinstance(value, np.ndarray) and value.base is not None)
