"""What the evaluator needs of a client: :mod:`omni_loop.client` has it, and so does a test's double."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

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
