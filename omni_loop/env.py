"""What a simulator must offer to be driven in closed loop.

An adapter derives from :class:`BaseEnv`, which owns what every env must get right: the life of an episode,
the checks on actions, the step limit. Observation arrays are made on demand: ``keys`` names the wanted ones
(None: all), so that a frame is rendered only when somebody will look at it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import metadata
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import InvalidInput, Reason, StateError, TensorError, UnknownName, nearest
from .types import Array, ArraySpec

#: Episodes of an evaluation are seeded from here on; demonstrations stay below.
EVALUATION_SEED = 2_000_000


@dataclass(frozen=True, slots=True)
class EnvStep:
    """What one control step led to. ``success`` is the task's own verdict at this step."""

    arrays: Mapping[str, Array]
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    info: Mapping[str, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


class Env(Protocol):
    """A seeded task. What happens is a pure function of the seed and the actions, to the bit."""

    @property
    def name(self) -> str: ...

    @property
    def observations(self) -> tuple[ArraySpec, ...]:
        """Every array the env can give."""

    @property
    def action(self) -> ArraySpec:
        """One action: ``float32[action_dim]`` with ``low`` and ``high``."""

    @property
    def control_hz(self) -> float: ...

    @property
    def max_steps(self) -> int: ...

    @property
    def score(self) -> str | None:
        """Entry of ``info`` that says how near the task is to success, if there is one."""

    def reset(self, seed: int, keys: Collection[str] | None = None) -> dict[str, Array]:
        """Begin the episode of ``seed``; returns the observation at step 0."""

    def step(self, action: Array, keys: Collection[str] | None = None) -> EnvStep:
        """One control step. Refuses a wrong action (:class:`TensorError`) and a step after the end or
        before ``reset`` (:class:`StateError`); a refused step changes nothing."""

    def observe(self, keys: Collection[str] | None = None) -> dict[str, Array]:
        """The present observation again; an unknown key is :class:`UnknownName`."""

    def render(self) -> NDArray[np.uint8]:
        """``uint8[h, w, 3]`` for people; may differ from what a policy sees."""

    def close(self) -> None:
        """Free everything; a second call does nothing."""


class Expert(Protocol):
    """Solves an env by reading what a policy does not see: for demonstrations, and as an upper bound. Made for one env,
    found under the env's name in the registry's experts."""

    def reset(self, seed: int) -> None:
        """Begin an episode; called after the env's own ``reset`` with the same seed."""

    def act(self) -> NDArray[np.float32]:
        """The action for the env's present state: ``float32[action_dim]`` within the bounds."""


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """What is installed of ``packages``, which are called by their own name or by that of a module of theirs: versions
    by name. A module that nobody packaged has none."""
    owners: Mapping[str, list[str]] | None = None
    found: dict[str, str] = {}
    for package in packages:
        try:
            names = [metadata.distribution(package).name]
        except metadata.PackageNotFoundError:
            owners = metadata.packages_distributions() if owners is None else owners  # it reads all there is
            names = owners.get(package, [])
        found |= {name: metadata.version(name) for name in names}
    return found


def check_action(spec: ArraySpec, action: Any) -> NDArray[np.float32]:
    """``action`` as ``float32[action_dim]`` within the spec's bounds, or :class:`TensorError`."""
    try:
        values = np.asarray(action, np.float32)
    except (TypeError, ValueError):
        raise TensorError(f"action is not an array of numbers: {type(action).__name__}") from None
    if values.shape != spec.shape:
        raise TensorError(f"action has shape {list(values.shape)}, wanted {list(spec.shape)}")
    if not np.isfinite(values).all():
        raise TensorError(f"action holds values that are not finite: {values.tolist()}")
    low, high = (-np.inf if spec.low is None else spec.low), (np.inf if spec.high is None else spec.high)
    if (values < low).any() or (values > high).any():
        raise TensorError(f"action {values.tolist()} is outside {low:g}..{high:g} {spec.unit}".rstrip())
    return values


class BaseEnv(ABC):
    """Base of adapters: they fill in the underscored methods and need no check of their own."""

    name: str
    observations: tuple[ArraySpec, ...]
    action: ArraySpec
    control_hz: float
    score: str | None = None
    packages: tuple[str, ...] = ()  # that decide what happens in an episode, besides this project's own

    def __init__(self, max_steps: int) -> None:
        if max_steps < 1:
            raise InvalidInput(f"max_steps is {max_steps}, wanted at least 1")
        self.max_steps = max_steps
        self._steps = 0
        self._phase = "fresh"  # fresh -> running -> done -> running ...; closed is final

    @abstractmethod
    def _reset(self, seed: int) -> None: ...

    @abstractmethod
    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        """The step without its arrays; the step limit is the base's."""

    @abstractmethod
    def _array(self, key: str) -> Array:
        """One observation array of the present state."""

    @abstractmethod
    def _render(self) -> NDArray[np.uint8]: ...

    def _close(self) -> None:
        return None

    @property
    def versions(self) -> Mapping[str, str]:
        """Of the packages that decide what happens in an episode, by name; results of two versions are not of one
        run."""
        return versions_of(self.packages)

    def hold(self) -> NDArray[np.float32]:
        """The action that does least in the present state, ``float32[action_dim]``: zero, or the middle of bounds that
        leave zero out. Envs whose actions are places say where they are instead."""
        low, high = (-np.inf if self.action.low is None else self.action.low), self.action.high
        still = 0.0 if low <= 0 <= (np.inf if high is None else high) else (low + (high or 0.0)) / 2
        return np.full(self.action.shape, still, np.float32)

    def reset(self, seed: int, keys: Collection[str] | None = None) -> dict[str, Array]:
        self._require("reset", "fresh", "running", "done")
        wanted = self._check_keys(keys)
        self._phase = "fresh"  # a reset that fails leaves an env that must be reset
        self._reset(seed)
        self._steps, self._phase = 0, "running"
        return {key: self._array(key) for key in wanted}

    def step(self, action: Array, keys: Collection[str] | None = None) -> EnvStep:
        self._require("step", "running")
        values, wanted = check_action(self.action, action), self._check_keys(keys)
        step = self._step(values)
        self._steps += 1
        truncated = not step.terminated and (step.truncated or self._steps >= self.max_steps)
        if step.terminated or truncated:
            self._phase = "done"
        return replace(step, arrays={key: self._array(key) for key in wanted}, truncated=truncated)

    def observe(self, keys: Collection[str] | None = None) -> dict[str, Array]:
        self._require("observe", "running", "done")
        return {key: self._array(key) for key in self._check_keys(keys)}

    def render(self) -> NDArray[np.uint8]:
        self._require("render", "running", "done")
        return self._render()

    def close(self) -> None:
        if self._phase != "closed":
            self._phase = "closed"
            self._close()

    def _require(self, verb: str, *phases: str) -> None:
        if self._phase in phases:
            return
        why = {
            "fresh": "reset it first",
            "done": "the episode is over: reset it first",
            "closed": "it is closed",
        }[self._phase]
        reason = Reason.CLOSED if self._phase == "closed" else Reason.BAD_REQUEST
        raise StateError(f"env {self.name!r} cannot {verb}: {why}", reason=reason)

    def _check_keys(self, keys: Collection[str] | None) -> tuple[str, ...]:
        known = tuple(spec.name for spec in self.observations)
        for key in keys or ():
            if key not in known:
                raise UnknownName(f"env {self.name!r} has no observation {key!r}.{nearest(key, known)}")
        return known if keys is None else tuple(keys)
