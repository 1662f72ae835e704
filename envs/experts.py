"""Experts that act on an env's ``state``, as the registry's: by the env alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import Env
from omni_loop.errors import Unsupported


class Solver(Protocol):
    def reset(self, seed: int) -> None: ...

    def act(self, state: NDArray[np.floating]) -> NDArray[np.float32]: ...


class StateExpert:
    """``solver`` for ``env``, as :class:`omni_loop.env.Expert`."""

    def __init__(self, env: Any, solver: Solver) -> None:
        self._env, self._solver = env, solver

    def reset(self, seed: int) -> None:
        self._solver.reset(seed)

    def act(self) -> NDArray[np.float32]:
        return self._solver.act(self._env.state)


def expert_of(kind: type[Any], solver: Callable[[], Solver]) -> Callable[[Env], StateExpert]:
    """A registry entry: the expert of envs of class ``kind``, which acts on their ``state``."""

    def make(env: Env) -> StateExpert:
        return StateExpert(readable(env, kind), solver())

    return make


def readable(env: Env, kind: type[Any]) -> Any:
    """``env``, if it is the adapter itself, whose simulator an expert can read. One that runs in another process or is
    wrapped shows no more than its observations: :class:`Unsupported`."""
    if not isinstance(env, kind):
        raise Unsupported(
            f"the expert of {getattr(kind, 'name', kind.__name__)!r} reads the simulator; it has no use for env "
            f"{env.name!r} ({type(env).__name__})"
        )
    return env
