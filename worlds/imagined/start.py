"""Where an imagined episode begins: real observations, and the actions between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.env import Env
from omni_loop.errors import UnknownName, nearest
from omni_loop.messages import Scalar
from omni_loop.types import Array


@dataclass(frozen=True, slots=True)
class Start:
    """``arrays [n, ...]``: n real steps by the pipeline's observation keys; ``executed float32[n - 1, action_dim]``:
    what led from each to the next. The episode begins at the last of them."""

    arrays: Mapping[str, Array]
    executed: NDArray[np.float32] | None = None


#: Start of the episode of a seed: a pure function of it, called from several threads by a vector env.
Source = Callable[[int], Start]


@dataclass
class EnvStart:
    """One real step: the first observation of the registered env ``env`` under the seed. ``keys`` maps the pipeline's
    observation keys to the env's, where they are called otherwise."""

    env: str
    wanted: tuple[str, ...] = ("image",)  # of the pipeline
    keys: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Scalar] = field(default_factory=dict)  # of the env

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._made: Env | None = None

    def __call__(self, seed: int) -> Start:
        names = {key: self.keys.get(key, key) for key in self.wanted}
        with self._lock:
            env = self.open()
            arrays = env.reset(seed, tuple(names.values()))
        return Start({key: arrays[name][None] for key, name in names.items()})

    def open(self) -> Env:
        """The env, made at the first call.

        Raises:
            UnknownName: it lacks an observation.
        """
        if self._made is None:
            made: Env = registry.build(registry.ENVS, self.env, self.options)
            known = [spec.name for spec in made.observations]
            for key in self.wanted:
                if (name := self.keys.get(key, key)) not in known:
                    made.close()
                    raise UnknownName(f"env {self.env!r} has no observation {name!r}.{nearest(name, known)}")
            self._made = made
        return self._made

    def close(self) -> None:
        if self._made is not None:
            self._made.close()
            self._made = None
