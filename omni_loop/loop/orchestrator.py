"""The orchestrator: every session's progress through its pipeline, in one event-driven loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..messages import Scalar
from ..types import SessionSpec, TickResult
from .request import SessionInfo, TickRequest

if TYPE_CHECKING:
    from ..config import Deployment

OnPart = Callable[[TickResult], None]


class Orchestrator:
    """Admits, advances and answers ticks; all methods belong to one event loop."""

    @classmethod
    async def start(cls, deployment: Deployment) -> Orchestrator:
        """Build the pipelines' runners, warm them up, and be ready."""
        raise NotImplementedError

    @property
    def specs(self) -> Mapping[str, SessionSpec]:
        """The spec of every pipeline served, by name."""
        raise NotImplementedError

    @property
    def ready(self) -> bool:
        """Every stage has run once, every runner lives, and the server is not draining."""
        raise NotImplementedError

    async def ping(self) -> None:
        """Pass through the work loop of every runner; raises ServerUnavailable when one is gone."""
        raise NotImplementedError

    def session(self, session: str, token: str) -> SessionInfo:
        """The owner's view of an open session (spec for the codec, epoch); UnknownSession otherwise."""
        raise NotImplementedError

    def last_seq(self, session: str, token: str) -> int:
        """Highest seq answered so far with a result; 0: none in this epoch."""
        raise NotImplementedError

    async def open(
        self,
        pipeline: str,
        seed: int | None = None,
        prompt: str = "",
        observation_keys: Sequence[str] = (),
        options: Mapping[str, Scalar] | None = None,
    ) -> SessionInfo:
        """Open a session. ``seed`` None: drawn here; no ``observation_keys``: exactly the required ones."""
        raise NotImplementedError

    async def tick(self, request: TickRequest, on_part: OnPart | None = None) -> TickResult:
        """Run one seq. ``on_part`` hears the answer early when frames come besides it."""
        raise NotImplementedError

    async def reset(self, session: str, token: str, seed: int | None = None, prompt: str | None = None) -> int:
        """Begin a new epoch, after the ticks accepted before; returns it."""
        raise NotImplementedError

    async def close(self, session: str, token: str) -> None:
        """Free everything of the session; its ticks in flight are cancelled."""
        raise NotImplementedError

    async def stop(self, grace_s: float = 5.0) -> None:
        """Refuse new work, let ticks in flight finish within ``grace_s``, then end everything."""
        raise NotImplementedError
