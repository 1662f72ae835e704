"""What the proxy says it does to a connection, it does: exactly so, and to nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from omni_loop.testing.fault_proxy import FaultProxy

WAIT_S = 10.0
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    writer.close()


@asynccontextmanager
async def proxied(serve: Serve = echo) -> AsyncIterator[FaultProxy]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    try:
        async with FaultProxy() as proxy:
            await proxy.start(f"{host}:{port}")
            yield proxy
    finally:
        server.close()
        await asyncio.wait_for(server.wait_closed(), WAIT_S)


@asynccontextmanager
async def dialled(proxy: FaultProxy) -> AsyncIterator[Pair]:
    host, port = proxy.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def say(pair: Pair, data: bytes) -> bytes:
    """Send ``data`` and read as much."""
    reader, writer = pair
    writer.write(data)
    await writer.drain()
    return await asyncio.wait_for(reader.readexactly(len(data)), WAIT_S)


async def ended(reader: asyncio.StreamReader) -> bytes:
    """What still comes until the connection ends, in order or by a reset."""
    data = b""
    try:
        while piece := await asyncio.wait_for(reader.read(1 << 16), WAIT_S):
            data += piece
    except ConnectionResetError:
        pass
    return data


async def quiet(reader: asyncio.StreamReader) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(reader.read(1), 0.1)


async def test_passes_everything_and_counts_it() -> None:
    data = bytes(range(256)) * 4000
    async with proxied() as proxy, dialled(proxy) as one, dialled(proxy) as two:
        one[1].write(data)
        assert await asyncio.wait_for(one[0].readexactly(len(data)), WAIT_S) == data
        assert await say(two, b"two") == b"two"
        assert proxy.passed == {"up": len(data) + 3, "down": len(data) + 3}
        assert (proxy.accepted, proxy.links, proxy.cuts, proxy.flipped) == (2, 2, 0, 0)


async def test_the_end_is_passed_on() -> None:
    async with proxied() as proxy, dialled(proxy) as (reader, writer):
        writer.write(b"last words")
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(-1), WAIT_S) == b"last words"


async def test_cut_ends_every_connection_and_a_new_one_is_whole() -> None:
    async with proxied() as proxy:
        async with dialled(proxy) as one, dialled(proxy) as two:
            await say(one, b"a")
            await say(two, b"b")
            assert proxy.cut() == 2
            with pytest.raises(ConnectionResetError):
                await asyncio.wait_for(one[0].read(1), WAIT_S)
            assert await ended(two[0]) == b""
        assert (proxy.links, proxy.cuts) == (0, 2)
        async with dialled(proxy) as three:
            assert await say(three, b"c") == b"c"


@pytest.mark.parametrize("count", [0, 1, 4095, 65536, 99_999])
async def test_cut_after_lets_exactly_so_many_bytes_arrive(count: int) -> None:
    data = bytes(range(250)) * 400
    async with proxied() as proxy:
        async with dialled(proxy) as (reader, writer):
            proxy.cut_after(count, "down")
            writer.write(data)
            assert await ended(reader) == data[:count]
        assert proxy.cuts == 1
        async with dialled(proxy) as again:
            assert await say(again, data) == data, "once"


async def test_cut_after_of_what_the_client_sends() -> None:
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        got.put_nowait(await ended(reader))
        writer.close()

    async with proxied(keep) as proxy, dialled(proxy) as (reader, writer):
        proxy.cut_after(5, "up")
        writer.write(b"hello, world")
        assert await asyncio.wait_for(got.get(), WAIT_S) == b"hello"
        assert await ended(reader) == b""


async def test_half_close_ends_one_direction_alone() -> None:
    got: asyncio.Queue[bytes] = asyncio.Queue()

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"!")
        while data := await reader.read(100):
            got.put_nowait(data)
        writer.close()

    async with proxied(keep) as proxy, dialled(proxy) as (reader, writer):
        assert await asyncio.wait_for(reader.read(1), WAIT_S) == b"!"
        proxy.half_close("down")
        assert await asyncio.wait_for(reader.read(1), WAIT_S) == b""
        writer.write(b"still heard")
        assert await asyncio.wait_for(got.get(), WAIT_S) == b"still heard"


async def test_frozen_nothing_passes_and_healed_it_flows_on() -> None:
    async with proxied() as proxy, dialled(proxy) as (reader, writer):
        await say((reader, writer), b"a")
        proxy.freeze()
        writer.write(b"held")
        await quiet(reader)
        assert proxy.links == 1
        proxy.heal()
        assert await asyncio.wait_for(reader.readexactly(4), WAIT_S) == b"held"


async def test_refused_connections_are_reset_and_old_ones_stay() -> None:
    async with proxied() as proxy, dialled(proxy) as old:
        await say(old, b"a")
        proxy.refuse()
        async with dialled(proxy) as (reader, _):
            assert await ended(reader) == b""
        assert await say(old, b"b") == b"b"
        proxy.heal()
        async with dialled(proxy) as new:
            assert await say(new, b"c") == b"c"


async def test_delay_and_throttle_take_their_time_and_change_nothing() -> None:
    loop = asyncio.get_running_loop()
    async with proxied() as proxy, dialled(proxy) as pair:
        proxy.delay(60)
        began = loop.time()
        assert await say(pair, b"late") == b"late"
        assert loop.time() - began >= 0.12, "both ways"
        proxy.heal()
        proxy.throttle(20_000)
        began = loop.time()
        data = bytes(range(200)) * 20
        assert await say(pair, data) == data
        assert loop.time() - began >= 0.2, "4000 bytes at 20 kB/s"


@pytest.mark.parametrize(("at", "bit"), [(0, 0), (3, 7), (70_000, 4)])
async def test_flip_spoils_one_bit(at: int, bit: int) -> None:
    data = bytes(100_000)
    async with proxied() as proxy, dialled(proxy) as pair:
        await say(pair, b"before")
        proxy.flip(at, "down", bit)
        pair[1].write(data)
        got = await asyncio.wait_for(pair[0].readexactly(len(data)), WAIT_S)
        assert [(i, b) for i, b in enumerate(got) if b] == [(at, 1 << bit)]
        assert proxy.flipped == 1
        assert await say(pair, b"after") == b"after"


async def test_what_was_to_come_is_healed_too() -> None:
    async with proxied() as proxy, dialled(proxy) as pair:
        proxy.cut_after(2)
        proxy.flip(0)
        proxy.heal()
        assert await say(pair, b"untouched") == b"untouched"


async def test_a_target_that_is_gone_resets_and_one_that_came_back_serves() -> None:
    async with FaultProxy() as proxy:
        await proxy.start("127.0.0.1:1")
        async with dialled(proxy) as (reader, _):
            assert await ended(reader) == b""
        async with proxied() as other:
            proxy.target = other.address
            async with dialled(proxy) as pair:
                assert await say(pair, b"back") == b"back"


async def test_stop_ends_connections_whose_peer_does_not_read() -> None:
    async with proxied() as proxy, dialled(proxy) as (_, writer):
        writer.transport.pause_reading()
        writer.write(bytes(1 << 23))
        await asyncio.sleep(0.1)
        assert proxy.passed["up"]
        await asyncio.wait_for(proxy.stop(), WAIT_S)
