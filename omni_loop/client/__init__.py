"""Clients of a server; they need numpy, grpcio and protobuf only, and Python 3.10.

with connect("127.0.0.1:50051") as client, client.open("pusht", keys=("image", "agent_pos")) as session:
    result = session.infer({"image": image, "agent_pos": agent_pos}, step=0)
    result.chunk.actions  # float32[horizon, action_dim]
"""

from __future__ import annotations

from .aio import AsyncClient, AsyncSession
from .book import ServerInfo, SessionList, SessionSummary
from .channel import TIMEOUT_S
from .credentials import Tls
from .playback import Played
from .player import ChunkPlayer, PlayerStats
from .resume import ResumingStream
from .stream import Draining, FramesLost, Refused, SessionStream, Skipped, WasReset, WasRewound
from .sync import Client, Session


def connect(address: str, *, timeout_s: float = TIMEOUT_S, token: str | None = None, tls: Tls | None = None) -> Client:
    """A client of the server at ``host:port``; ``timeout_s`` bounds every call. Connects at the first call. ``token``:
    what the server knows this client by; ``tls``: None is plaintext.

    Raises:
        InvalidInput: an address, a time, a token or a PEM file that cannot be right, named with what is.
    """
    return Client(address, timeout_s, token, tls)


def connect_async(
    address: str, *, timeout_s: float = TIMEOUT_S, token: str | None = None, tls: Tls | None = None
) -> AsyncClient:
    """As :func:`connect`, for asyncio: ``async with connect_async(address) as client``."""
    return AsyncClient(address, timeout_s, token, tls)


__all__ = [
    "AsyncClient",
    "AsyncSession",
    "ChunkPlayer",
    "Client",
    "Draining",
    "FramesLost",
    "Played",
    "PlayerStats",
    "Refused",
    "ResumingStream",
    "ServerInfo",
    "Session",
    "SessionList",
    "SessionStream",
    "SessionSummary",
    "Skipped",
    "Tls",
    "WasReset",
    "WasRewound",
    "connect",
    "connect_async",
]
