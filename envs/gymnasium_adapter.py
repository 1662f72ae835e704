"""Any gymnasium environment as an env of this project.

The success key is named by whoever wraps the environment and must be in ``info`` at every step: simulators
call it ``is_success``, ``success`` or ``succeed``, and a reader of the wrong one would see 0 % in silence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep, versions_of
from omni_loop.errors import ConfigError, nearest
from omni_loop.types import Array, ArraySpec

RENDER = "render()"  # source of an array that is the environment's rendered frame
_ENGINES = frozenset({"mujoco", "dm_control", "pymunk", "Box2D"})  # modules of what simulators compute with
_SOURCE = re.compile(r"(?P<path>.*?)(?:\[(?P<first>\d*):(?P<last>\d*)\])?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Key:
    """One observation array: its spec, and where the environment's observation holds it.

    ``source`` is a path such as ``"images/top"`` into a dict observation, ``""`` for an observation that is
    an array itself, or :data:`RENDER`. ``"state[0:3]"`` takes a part of a vector; several sources are laid end to end.
    """

    spec: ArraySpec
    source: str | tuple[str, ...] = ""


class GymnasiumEnv(BaseEnv):
    """Wraps ``env``. ``action`` None takes spec and bounds from a one-dimensional Box action space.

    ``seed`` of a reset goes to the environment's own ``reset``; a simulator that ignores it fails the env
    contract and needs an adapter of its own.
    """

    def __init__(
        self,
        env: gymnasium.Env[Any, Any],
        *,
        name: str,
        observations: tuple[Key, ...],
        success_key: str,
        max_steps: int,
        control_hz: float | None = None,
        action: ArraySpec | None = None,
        info_keys: tuple[str, ...] = (),
        score: str | None = None,
    ) -> None:
        super().__init__(max_steps)
        self.name, self.score = name, score
        self._env, self._success_key, self._info_keys = env, success_key, info_keys
        self._keys = {key.spec.name: key for key in observations}
        self.observations = tuple(key.spec for key in observations)
        self.action = action or box_action(name, env.action_space)
        self.control_hz = float(control_hz or env.metadata.get("render_fps") or 0)
        if self.control_hz <= 0:
            raise ConfigError(f"env {name!r}: control_hz is unknown; name it")
        self._observation: Any = None

    @property
    def versions(self) -> Mapping[str, str]:
        return versions_of([*self.packages, *modules_of(self._env)])

    def _reset(self, seed: int) -> None:
        self._observation, _ = self._env.reset(seed=seed)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        self._observation, reward, terminated, truncated, info = self._env.step(action)
        success = self._entry(info, self._success_key, "success key") > 0.5
        kept = {key: self._entry(info, key, "info key") for key in self._info_keys}
        return EnvStep({}, float(reward), bool(terminated), bool(truncated), success, kept)

    def _entry(self, info: Mapping[str, Any], key: str, what: str) -> float:
        if key not in info:
            where = "" if "info" in what else " in its info"
            raise ConfigError(f"env {self.name!r} reports no {what} {key!r}{where}.{nearest(key, info)}")
        value = np.asarray(info[key])
        if value.size != 1 or value.dtype.kind not in "biuf":
            raise ConfigError(f"env {self.name!r}: {what} {key!r} is no single number: {info[key]!r}")
        return float(value.item())

    def _array(self, key: str) -> Array:
        entry = self._keys[key]
        value = self._render() if entry.source == RENDER else read(self.name, self._observation, entry.source)
        array = np.array(value, entry.spec.dtype, order="C")  # a copy: simulators reuse their buffers
        if array.shape != entry.spec.shape:
            raise ConfigError(
                f"env {self.name!r}: {key!r} has shape {list(array.shape)}, its spec says {list(entry.spec.shape)}"
            )
        return array

    def _render(self) -> NDArray[np.uint8]:
        return rendered(self.name, self._env)

    def _close(self) -> None:
        self._env.close()


def modules_of(env: gymnasium.Env[Any, Any]) -> list[str]:
    """Modules that decide what happens in ``env``: the one that it is of, and the engines that it holds parts of."""
    inner = env.unwrapped
    held = {_module(value) for value in getattr(inner, "__dict__", {}).values()}
    return [_module(inner), *sorted(held & _ENGINES)]


def _module(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def rendered(name: str, env: gymnasium.Env[Any, Any]) -> NDArray[np.uint8]:
    """What ``env`` renders: ``uint8[h, w, 3]``."""
    frame = env.render()
    if not isinstance(frame, np.ndarray) or frame.ndim != 3:
        raise ConfigError(f"env {name!r} renders no frame: make it with render_mode='rgb_array'")
    return np.ascontiguousarray(frame, np.uint8)


def read(name: str, observation: Any, source: str | tuple[str, ...]) -> Array:
    """The array that ``source`` names in what the environment ``name`` gave (see :class:`Key`)."""
    if isinstance(source, str):
        return _part(name, observation, source)
    return np.concatenate([np.ravel(_part(name, observation, one)) for one in source])


def _part(name: str, observation: Any, source: str) -> Array:
    found = _SOURCE.fullmatch(source)
    assert found is not None  # every text is a path, perhaps with a part
    value = observation
    for part in found["path"].split("/") if found["path"] else ():
        if not isinstance(value, Mapping) or part not in value:
            known = value if isinstance(value, Mapping) else ()
            raise ConfigError(f"env {name!r}: no {source!r} in its observation.{nearest(part, known)}")
        value = value[part]
    if isinstance(value, Mapping):
        inner = f"{found['path']}/{next(iter(value), '')}".removeprefix("/")
        raise ConfigError(f"env {name!r}: its observation holds several arrays at {source!r}; say {inner!r}, say")
    array = np.asarray(value)
    if found["first"] is None:
        return array
    first, last = (int(found[end]) if found[end] else None for end in ("first", "last"))
    if array.ndim != 1 or (last or 0) > len(array) or (first or 0) >= (len(array) if last is None else last):
        raise ConfigError(f"env {name!r}: no part {source!r} in an array of shape {list(array.shape)}")
    return array[first:last]


def box_action(name: str, space: gymnasium.Space[Any]) -> ArraySpec:
    """The action spec of a one-dimensional Box with the same bounds in every dimension."""
    if not isinstance(space, gymnasium.spaces.Box) or len(space.shape) != 1:
        raise ConfigError(f"env {name!r}: actions must be a one-dimensional Box, not {space}")
    low, high = np.unique(space.low), np.unique(space.high)
    if len(low) != 1 or len(high) != 1:
        raise ConfigError(f"env {name!r}: action bounds differ by dimension; give the action spec")
    return ArraySpec("action", "float32", space.shape, low=float(low[0]), high=float(high[0]))
