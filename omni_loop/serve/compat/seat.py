"""One robot's session in the core, for protocols that know no sessions."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from ...errors import OmniLoopError, Reason, StateError, UnknownSession
from ...loop.request import SessionInfo, TickRequest
from ...messages import Scalar
from ...types import Array, Op, TickResult

if TYPE_CHECKING:
    from ..auth import Gate
    from ..service import LoopService

_ENDED = (Reason.SESSION_LOST, Reason.CLOSED)


class Seat:
    """A session of ``pipeline`` that belongs to one connection, and to nobody after it.

    A session that ended by itself (its lease, a lost runner) is said once, as an error; the call after it begins anew.
    """

    def __init__(self, service: LoopService, pipeline: str, owner: str, gate: Gate) -> None:
        self._service, self._pipeline, self._owner, self._gate = service, pipeline, owner, gate
        self._info: SessionInfo | None = None
        self._prompt = ""
        self._seq = 0  # highest answered
        self.epoch = 0

    @property
    def keys(self) -> tuple[str, ...] | None:
        """Observation names of the session; None: it is not open."""
        return None if self._info is None else self._info.observation_keys

    async def open(
        self,
        keys: Collection[str],
        prompt: str = "",
        seed: int | None = None,
        options: Mapping[str, Scalar] | None = None,
    ) -> None:
        """Raises as :meth:`~omni_loop.loop.sessions.Sessions.open` does."""
        service = self._service
        service.limits.check_prompt(prompt)
        owner, core = self._owner, service.core
        async with self._gate.opening(owner, lambda: core.count(owner)):
            self._info = await core.open(self._pipeline, seed, prompt, tuple(keys), options, owner=owner)
        self._prompt, self._seq, self.epoch = prompt, self._info.last_seq, self._info.epoch

    async def infer(self, arrays: Mapping[str, Array], step: int, spent_ms: float) -> TickResult:
        """One observation. The session is as before when this raises; ``spent_ms`` is counted into the timings."""
        seq = self._seq + 1
        try:
            info = self._session()
            request = TickRequest(info.id, info.token, seq, Op.INFER, step, arrays, spent_ms=spent_ms)
            result = await self._service.core.tick(request)
        except OmniLoopError as error:
            raise self._ended(error) from error
        self._seq = seq
        return result

    async def reset(self, seed: int | None = None, prompt: str | None = None) -> None:
        """A new epoch: nothing of what was seen is left. Nothing to do while no session is open."""
        if self._info is None:
            return
        if prompt is not None:
            self._service.limits.check_prompt(prompt)
        try:
            self.epoch = await self._service.core.reset(self._info.id, self._info.token, seed, prompt)
        except OmniLoopError as error:
            raise self._ended(error) from error
        if prompt is not None:
            self._prompt = prompt

    def follows(self, prompt: str) -> bool:
        """Whether ``prompt`` is the session's instruction; anything is where its pipeline reads none."""
        return self._info is None or not self._info.spec.prompt or prompt == self._prompt

    async def close(self) -> None:
        """Free everything of the session, if it is still there."""
        info, self._info = self._info, None
        if info is not None:
            try:
                await self._service.core.close(info.id, info.token)
            except UnknownSession:
                return  # its lease ended, or the server did

    def _session(self) -> SessionInfo:
        if self._info is None:
            raise StateError("no session is open on this connection", reason=Reason.BAD_REQUEST)
        return self._service.core.session(self._info.id, self._info.token, self._owner)

    def _ended(self, error: OmniLoopError) -> OmniLoopError:
        gone = isinstance(error, UnknownSession) or error.reason in _ENDED
        if not gone and not (isinstance(error, StateError) and error.reason is Reason.EXPIRED):
            return error
        self._info = None
        text = "the session has ended, and what it knew with it; the next observation begins a new one"
        return StateError(f"{text} ({error.text})", reason=Reason.SESSION_LOST)
