"""Row B4: connections that speak no HTTP/2, or bad HTTP/2, or bad gRPC; a canary is served throughout."""

from __future__ import annotations

import asyncio
import gc
import random
import struct
from collections.abc import Callable

from ..board import expect
from .bed import nothing_leaks
from .served import Served, served, together, with_canary

CONNECTIONS, SCALED = 5000, 300
AT_ONCE = 8
RESETS = 20
LISTENS_S = 0.05  # for what the server says to it; then the connection is dropped
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RST, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW, _CONTINUATION = 0, 1, 3, 4, 5, 6, 7, 8, 9
_METHODS = ("Infer", "Stream", "OpenSession", "GetServerInfo", "Nothing")


def measure(seed: int, full: bool) -> float:
    """Connections that came and went."""
    with nothing_leaks():
        return asyncio.run(_measure(seed, CONNECTIONS if full else SCALED))


async def _measure(seed: int, count: int) -> float:
    done = 0
    async with served() as made:

        async def stranger(number: int) -> None:
            nonlocal done
            draw = random.Random(seed + number)
            for _ in range(number, count, AT_ONCE):
                await _visit(made, draw)
                done += 1

        await with_canary(made, seed, together(*(stranger(number) for number in range(AT_ONCE))))
        async with made.client() as late:  # a newcomer is served too
            expect((await late.info()).ready, "the server is not ready after garbage")
        gc.collect()
    return done


async def _visit(made: Served, draw: random.Random) -> None:
    host, _, port = made.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in _cut(draw, draw.choice(SPEECHES)(draw)):
            writer.write(piece)
            await asyncio.sleep(0)
        async with asyncio.timeout(LISTENS_S):
            await reader.read(-1)
    except (TimeoutError, ConnectionError):
        pass  # it listens longer than we do, or has hung up: both are right
    finally:
        writer.transport.abort()


def _cut(draw: random.Random, data: bytes) -> list[bytes]:
    """In one piece, or in a few."""
    ends = sorted(draw.randrange(len(data) + 1) for _ in range(draw.choice((0, 0, 1, 3))))
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


def _frame(kind: int, flags: int, stream: int, payload: bytes, length: int | None = None) -> bytes:
    size = len(payload) if length is None else length
    return size.to_bytes(3, "big") + bytes((kind & 255, flags & 255)) + struct.pack(">I", stream) + payload


def _literal(name: bytes, value: bytes) -> bytes:
    """A header field in HPACK: literal, neither indexed nor compressed (RFC 7541, 6.2.2); short ones only."""
    return b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value


def _call(draw: random.Random, stream: int, *more: bytes, path: bytes = b"") -> bytes:
    fields = [
        *((b":method", b"POST"), (b":scheme", b"http"), (b":authority", b"x")),
        (b":path", path or f"/omni_loop.v1.Loop/{draw.choice(_METHODS)}".encode()),
        *((b"content-type", b"application/grpc"), (b"te", b"trailers")),
    ]
    return _frame(_HEADERS, 4, stream, b"".join(_literal(*field) for field in fields) + b"".join(more))


def _hello(draw: random.Random) -> bytes:
    return _PREFACE + _frame(_SETTINGS, 0, 0, b"")


def _noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.choice((0, 1, 8, 100, 5000, 70_000)))


def _another_protocol(draw: random.Random) -> bytes:
    return draw.choice(
        (
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"POST /omni_loop.v1.Loop/Infer HTTP/1.1\r\nContent-Length: 9999999\r\n\r\n" + b"x" * 99,
            b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + draw.randbytes(500),  # a TLS hello
            b"SSH-2.0-OpenSSH_9.0\r\n",
            b"\x80\x04\x95" + draw.randbytes(40),  # a pickle
            _PREFACE[: draw.randrange(len(_PREFACE))],
            _PREFACE + b"\0" * 64,
        )
    )


def _random_frames(draw: random.Random) -> bytes:
    frames = []
    for _ in range(draw.randrange(1, 30)):
        payload = draw.randbytes(draw.choice((0, 1, 4, 5, 8, 64, 500)))
        stream = draw.choice((0, 1, 2, 3, 5, 0x7FFFFFFF, 0xFFFFFFFF))
        frames.append(_frame(draw.randrange(12), draw.getrandbits(8), stream, payload))
    return _hello(draw) + b"".join(frames)


def _odd_settings(draw: random.Random) -> bytes:
    values = [
        (draw.randrange(1, 9), draw.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 100))) for _ in range(draw.randrange(200))
    ]
    body = b"".join(struct.pack(">HI", *value) for value in values)
    return _PREFACE + _frame(_SETTINGS, 0, 0, body[: len(body) - draw.choice((0, 0, 1))]) + _call(draw, 1)


def _bad_headers(draw: random.Random) -> bytes:
    return (
        _hello(draw)
        + _frame(_HEADERS, 4, 1, draw.randbytes(draw.randrange(1, 400)))
        + _call(draw, 3, draw.randbytes(9))
    )


def _bad_paths(draw: random.Random) -> bytes:
    """Methods whose names are no text."""
    return _hello(draw) + _call(draw, 1, path=b"/" + draw.randbytes(draw.randrange(1, 60))) + _call(draw, 3)


def _rapid_reset(draw: random.Random) -> bytes:
    """Calls that are taken back at once (CVE-2023-44487). Few: with more than a thousand that wait, gRPC's core sheds
    calls of everybody; that is a flood, not garbage."""
    calls = (_call(draw, 2 * n + 1) + _frame(_RST, 0, 2 * n + 1, b"\0\0\0\x08") for n in range(RESETS))
    return _hello(draw) + b"".join(calls)


def _endless_headers(draw: random.Random) -> bytes:
    more = b"".join(_frame(_CONTINUATION, 0, 1, _literal(b"x", b"y" * 100) * 20) for _ in range(100))
    return _hello(draw) + _frame(_HEADERS, 0, 1, _literal(b":method", b"POST")) + more


def _floods(draw: random.Random) -> bytes:
    frame = draw.choice(
        (
            _frame(_PING, 0, 0, b"12345678"),
            _frame(_SETTINGS, 0, 0, b""),
            _frame(_WINDOW, 0, 0, struct.pack(">I", 0x7FFFFFFF)),
            _frame(_PUSH, 4, 1, b"\0\0\0\x02"),
            _frame(_GOAWAY, 0, 0, b"\0" * 8),
        )
    )
    return _hello(draw) + frame * 1000


def _bad_bodies(draw: random.Random) -> bytes:
    """A call that is right, with a body that is not: lengths that lie, a compression nobody agreed on, no message."""
    size = draw.choice((0, 1, 5, 1 << 20, (1 << 32) - 1))
    body = bytes((draw.choice((0, 1, 2, 255)),)) + struct.pack(">I", size) + draw.randbytes(draw.randrange(60))
    flags = draw.choice((0, 1))
    return _hello(draw) + _call(draw, 1) + _frame(_DATA, flags, 1, body)


def _never_comes(draw: random.Random) -> bytes:
    """A frame that says it is long, and is not."""
    return _hello(draw) + _call(draw, 1) + _frame(_DATA, 0, 1, b"abc", length=(1 << 24) - 1)


SPEECHES: tuple[Callable[[random.Random], bytes], ...] = (
    *(_noise, _another_protocol, _random_frames, _odd_settings, _bad_headers, _bad_paths),
    *(_rapid_reset, _endless_headers, _floods, _bad_bodies, _never_comes),
)
