"""What the evaluator needs of a client: :mod:`omni_loop.client` has it, and so does a test's double."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from omni_loop.client import Tls
from omni_loop.client import connect as connect_to
from omni_loop.env import Env
from omni_loop.types import Array, SessionSpec, TickResult


class LoopSession(Protocol):
    """One open session; errors are those of :mod:`omni_loop.errors`."""

    @property
    def id(self) -> str: ...

    @property
    def spec(self) -> SessionSpec: ...

    def infer(
        self,
        arrays: Mapping[str, Array],
        *,
        step: int,
        executed: NDArray[np.float32] | None = None,
        frames: int = 0,
        executed_through: int | None = None,
    ) -> TickResult: ...

    def predict(self, actions: NDArray[np.float32] | None = None, *, steps: int = 0) -> TickResult: ...

    def close(self) -> None: ...


class LoopClient(Protocol):
    """A connection to a server."""

    def open(
        self,
        pipeline: str,
        *,
        prompt: str = "",
        seed: int | None = None,
        keys: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
    ) -> LoopSession: ...

    def close(self) -> None: ...


Connect = Callable[[], LoopClient]  # every worker has a connection of its own


@dataclass(frozen=True)
class Server:
    """A server by its address: a :data:`Connect` that another process can be told of, so that episodes are sharded over
    processes. ``timeout_s`` bounds every call; ``serves`` says what of its deployment an answer depends on, "" where
    nobody knows."""

    address: str
    timeout_s: float = 120.0
    token: str | None = field(default=None, repr=False)
    tls: Tls | None = None
    serves: str = ""

    def __call__(self) -> LoopClient:
        return connect_to(self.address, timeout_s=self.timeout_s, token=self.token, tls=self.tls)


@runtime_checkable
class ActsInEnv(Protocol):
    """A client that acts on an env itself, not on what it is sent: :mod:`.bounds`."""

    def attach(self, env: Env) -> None:
        """Act in ``env`` from now on; before ``open``."""


def attach(client: LoopClient, env: Env) -> None:
    """Hand ``env`` to a client that acts in it; one of a server has no use for it."""
    if isinstance(client, ActsInEnv):
        client.attach(env)
