"""Row S6: one principal cannot take what is others': sessions, streams, bytes, snapshots, handshakes, pings."""

from __future__ import annotations

import asyncio
import random
import struct
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from ...client import AsyncClient, AsyncSession
from ...endpoints import AccessConfig, QuotaConfig
from ...errors import OmniLoopError, Reason
from ...record.snapshot import ZarrSnapshots
from ...serve.tls import HANDSHAKE_MS
from ..board import Broken, expect
from .served import Served, served, with_canary
from .toys import NAME, WIDTH

ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32
SESSIONS, STREAMS, SNAPSHOTS, BYTES = 3, 2, 2, 4096
CONNECTIONS, PINGS = 100, 2000
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def measure(seed: int, full: bool) -> float:
    """Takings refused."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(seed, Path(folder), full))


async def _measure(seed: int, folder: Path, full: bool) -> float:
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"alice {ALICE}\nbob {BOB}\n")
    quota = QuotaConfig(sessions=SESSIONS, streams=STREAMS, snapshots=SNAPSHOTS, bytes_per_s=BYTES)
    access = AccessConfig(tokens=str(tokens), quotas={"alice": quota})
    refused = 0
    async with served(access=access, store=ZarrSnapshots(folder / "kept", 1 << 30)) as made:
        refused += await _takes(made, seed)
    async with served() as made:
        await with_canary(made, seed, _connections(made, random.Random(seed), full))
        await with_canary(made, seed, _pings(made))
    return refused + CONNECTIONS + 1


async def _takes(made: Served, seed: int) -> int:
    refused = 0
    async with made.client(token=ALICE) as alice, made.client(token=BOB) as bob:
        theirs = await bob.open(NAME, seed=seed)
        for step, attack in enumerate((_sessions, _streams, _snapshots, _bytes)):
            refused += await attack(alice)
            await _answers(theirs, step)
        await theirs.close()
    return refused


async def _sessions(alice: AsyncClient) -> int:
    """Openings at once, forks, and a place that is free again."""
    opened = await asyncio.gather(*(alice.open(NAME) for _ in range(4 * SESSIONS)), return_exceptions=True)
    mine = [session for session in opened if isinstance(session, AsyncSession)]
    over = [error for error in opened if not isinstance(error, AsyncSession)]
    expect(len(mine) == SESSIONS, f"{len(mine)} sessions were opened, the quota is {SESSIONS}")
    for error in over:
        _check_quota(error)
    await _over(mine[0].fork)
    await mine.pop().close()
    mine.append(await mine[0].fork())
    for session in mine:
        await session.close()
    return len(over) + 1


async def _streams(alice: AsyncClient) -> int:
    session = await alice.open(NAME)
    others = [await alice.open(NAME) for _ in range(STREAMS - 1)]
    async with AsyncExitStack() as stack:
        for one in (session, *others):
            await stack.enter_async_context(one.stream())
        more = await alice.open(NAME)
        await _over(lambda: stack.enter_async_context(more.stream()))
    await _until(lambda: _streamed(more))  # its streams have ended
    for one in (session, *others, more):
        await one.close()
    return 1


async def _streamed(session: AsyncSession) -> None:
    async with session.stream():
        pass


async def _snapshots(alice: AsyncClient) -> int:
    async with await alice.open(NAME) as session:
        for number in range(SNAPSHOTS):
            await session.snapshot(f"s{number}")
        await _over(lambda: session.snapshot("more"))
        await session.snapshot("s0")  # what is there may be replaced
    return 1


async def _bytes(alice: AsyncClient) -> int:
    """A flood is refused, with a time after which it is not; the session is as it was."""
    refused, step = 0, 0
    async with await alice.open(NAME, seed=1) as session:
        while refused < 5:
            try:
                await session.infer({"x": np.full(WIDTH, step, np.float32)}, step)
                step += 1
            except OmniLoopError as error:
                _check_quota(error)
                expect(0 < error.retry_after_ms <= 1000, f"retry after {error.retry_after_ms} ms")
                await asyncio.sleep(error.retry_after_ms / 1e3)
                refused += 1
                await _until(lambda: session.infer({"x": np.full(WIDTH, 1, np.float32)}, step))  # noqa: B023
                step += 1
        await _until(session.close)
    return refused


async def _until(call: Callable[[], Awaitable[Any]]) -> None:
    """Until it is not refused for a quota any more."""
    for _ in range(200):
        try:
            await call()
            return
        except OmniLoopError as error:
            _check_quota(error)
            await asyncio.sleep(max(error.retry_after_ms, 10) / 1e3)
    raise Broken("a quota does not come free again")


async def _over(call: Callable[[], Awaitable[Any]]) -> None:
    try:
        await call()
    except OmniLoopError as error:
        _check_quota(error)
        return
    raise Broken("a quota is not kept")


def _check_quota(error: BaseException) -> None:
    right = isinstance(error, OmniLoopError) and error.reason is Reason.QUOTA
    expect(right, f"refused for another reason than the quota: {error}")


async def _answers(session: AsyncSession, step: int) -> None:
    try:
        await session.infer({"x": np.zeros(WIDTH, np.float32)}, step)
    except OmniLoopError as error:
        raise Broken(f"another principal is refused meanwhile: {error.text}") from error


async def _connections(made: Served, draw: random.Random, full: bool) -> None:
    """Connections that never finish their first words; gRPC hangs up on them."""
    host, _, port = made.address.rpartition(":")
    opened = [await asyncio.open_connection(host, int(port)) for _ in range(CONNECTIONS)]
    try:
        for _, writer in opened:
            writer.write(_PREFACE[: draw.randrange(len(_PREFACE))])
        if full:
            async with asyncio.timeout(HANDSHAKE_MS / 1e3 + 20):
                for reader, _ in opened:
                    with suppress(ConnectionError):  # hung up on, as it should be
                        await reader.read(-1)
    except TimeoutError:
        raise Broken("connections that never shake hands are kept") from None
    finally:
        for _, writer in opened:
            writer.transport.abort()


async def _pings(made: Served) -> None:
    """Pings without a call, one by one: the server hangs up after a few of them."""
    host, _, port = made.address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_PREFACE + _frame(4, b""))
    answered = 0
    try:
        async with asyncio.timeout(60):
            for number in range(PINGS):
                writer.write(_frame(6, struct.pack(">Q", number)))
                if not await reader.read(1 << 16):
                    break
                answered += 1
    except ConnectionError:
        pass  # it has hung up, without a word
    except TimeoutError:
        raise Broken("a flood of pings is neither answered nor ended") from None
    finally:
        writer.transport.abort()
    expect(answered < PINGS, f"{answered} pings were answered, and the connection goes on")


def _frame(kind: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, 0)) + bytes(4) + payload
