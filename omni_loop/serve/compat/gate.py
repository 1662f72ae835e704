"""Who calls, and how much they may take, as these endpoints ask it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Gate(Protocol):
    """Raises :class:`~omni_loop.errors.OmniLoopError`: UNAUTHENTICATED, or a quota that is reached."""

    def authenticate(self, header: str | None) -> str:
        """The principal of an ``authorization`` header; "" where no tokens are asked for."""

    def charge(self, principal: str, nbytes: int) -> None:
        """``nbytes`` of a request have come."""

    def stream(self, principal: str) -> AbstractContextManager[object]:
        """Held while a connection is open."""


class OpenGate:
    """Lets everybody in, as nobody in particular: for a deployment without ``access``."""

    def authenticate(self, header: str | None) -> str:
        return ""

    def charge(self, principal: str, nbytes: int) -> None:
        pass

    def stream(self, principal: str) -> AbstractContextManager[object]:
        return nullcontext()


def bearer(header: str | None) -> str | None:
    """openpi's clients write ``Api-Key <key>`` where others write ``Bearer <key>``."""
    scheme, _, key = (header or "").partition(" ")
    return f"Bearer {key.strip()}" if scheme.lower() == "api-key" else header
