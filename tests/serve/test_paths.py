"""A call whose path is no text ends nothing but itself (with grpcio 1.84 and 1.85 it ends the server)."""

from __future__ import annotations

import asyncio
import socket
import struct

from omni_loop.client import connect_async
from omni_loop.config import Deployment, Listen
from omni_loop.serve.app import Server
from omni_loop.testing.bad_inputs import good_arrays
from omni_loop.testing.toy_core import ToyCore

ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    return b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value


def call(address: str, path: bytes) -> None:
    """One call of ``path`` in raw HTTP/2, until the server ends it or falls silent."""
    host, port = address.rsplit(":", 1)
    fields = [(b":path", path), (b":authority", b"a"), (b"te", b"trailers"), (b"content-type", b"application/grpc")]
    headers = b"\x83\x86" + b"".join(header(*field) for field in fields)  # POST, http
    with socket.create_connection((host, int(port)), timeout=0.3) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers))
        connection.sendall(frame(0, 1, 1, bytes(5)))
        try:
            while connection.recv(4096):
                pass
        except OSError:
            pass  # silent, or reset: what the others see is what counts


async def test_a_path_that_is_no_text_ends_nothing() -> None:
    async def start(_: Deployment) -> ToyCore:
        return ToyCore()

    server = Server(Deployment(pipelines=("toy",), listen=Listen(port=0)), start)  # type: ignore[arg-type]
    address = await server.start()
    try:
        async with connect_async(address) as client, await client.open("toy") as session, session.stream() as stream:
            for n in range(3):
                await asyncio.to_thread(call, address, b"/omni_loop.v1.Loop/\xae\xff")
                seq = await stream.infer(ARRAYS, n)
                async for event in stream:
                    assert getattr(event, "seq", None) == seq
                    break
                async with connect_async(address, timeout_s=5) as other:
                    assert (await other.info()).ready
    finally:
        await server.stop(1.0)
