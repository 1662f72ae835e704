"""A TCP proxy that loses, delays, holds back, slows and spoils what passes: a bad network between client and server.

It knows nothing of what it carries, so gRPC, websockets and TLS pass alike. Faults apply to every connection from the
call on; :meth:`FaultProxy.heal` ends those that last. Directions are seen from the client: "up" is what it sends.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

Direction = Literal["up", "down"]
_CHUNK = 1 << 16
_HELD = 16  # chunks of one direction read ahead; then the sender feels it, as on a real link
_SLICES_PER_S = 20  # a throttled direction moves in so many pieces a second
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: what is closed says RST, not FIN


@dataclass(eq=False)
class _Link:
    """One client's connection and the one made for it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    mute: set[Direction] = field(default_factory=set)  # half-closed: what comes is read and dropped
    task: asyncio.Task[None] | None = None

    def writer(self, direction: Direction) -> asyncio.StreamWriter | None:
        return self.server if direction == "up" else self.client

    @property
    def writers(self) -> list[asyncio.StreamWriter]:
        return [writer for writer in (self.client, self.server) if writer is not None]

    def abort(self) -> None:
        for writer in self.writers:
            _abort(writer)


class FaultProxy:
    """``address = await proxy.start("127.0.0.1:50051")``, then ``await proxy.stop()``; also an async context manager.

    ``target`` may be set to another address at any time: later connections go there (a server that came back).
    ``passed`` counts bytes forwarded by direction, ``accepted`` connections, ``cuts`` connections the proxy ended,
    ``flipped`` bits it flipped. All methods but start and stop act at once, on the loop that started it.
    """

    def __init__(self) -> None:
        self.target = ""
        self.address = ""
        self.passed: dict[Direction, int] = {"up": 0, "down": 0}
        self.accepted = 0
        self.cuts = 0
        self.flipped = 0
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._flows = asyncio.Event()
        self._delay_s = 0.0
        self._bps = 0.0
        self._refuses = False
        self._cut_at: dict[Direction, int] = {}  # by total of `passed`
        self._flips: dict[Direction, dict[int, int]] = {"up": {}, "down": {}}  # byte number -> mask

    @property
    def links(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    async def start(self, target: str) -> str:
        """Listen on a free loopback port and pass everything to ``target`` ("host:port"); the address to dial."""
        self.target = target
        self._flows.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self.address

    async def stop(self) -> None:
        """End every connection and stop listening. Safe to call twice."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

    async def __aenter__(self) -> FaultProxy:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    def cut(self) -> int:
        """Reset every connection now (RST to both ends); how many there were."""
        links = list(self._links)
        for link in links:
            self._cut(link)
        return len(links)

    def cut_after(self, nbytes: int, direction: Direction = "down") -> None:
        """Once ``nbytes`` more have passed in ``direction``, end the connection that carried the last of them: exactly
        these arrive, then the receiver sees the end and the sender a reset. Once."""
        self._cut_at[direction] = self.passed[direction] + nbytes

    def half_close(self, direction: Direction = "down") -> None:
        """Say the end (FIN) to the receivers of ``direction``; the other direction goes on."""
        for link in list(self._links):
            writer = link.writer(direction)
            if writer is not None and direction not in link.mute:
                link.mute.add(direction)
                writer.write_eof()

    def freeze(self) -> None:
        """Half-open: nothing passes any more and nobody is told. Connections may still be made."""
        self._flows.clear()

    def refuse(self) -> None:
        """New connections are reset at once."""
        self._refuses = True

    def delay(self, ms: float) -> None:
        """What is read from now on is passed on ``ms`` later; the bandwidth stays."""
        self._delay_s = ms / 1000

    def throttle(self, bps: float) -> None:
        """At most so many bytes a second and direction of each connection; 0: no bound."""
        self._bps = bps

    def flip(self, at: int, direction: Direction = "down", bit: int = 0) -> None:
        """Flip one bit of byte number ``at`` (0: the next) of what will pass in ``direction``. Once."""
        flips = self._flips[direction]
        number = self.passed[direction] + at
        flips[number] = flips.get(number, 0) ^ (1 << bit)

    def heal(self) -> None:
        """No delay, throttle, freeze or refusal any more, and no cut or flip to come. What was held flows on."""
        self._delay_s = self._bps = 0.0
        self._refuses = False
        self._cut_at.clear()
        for flips in self._flips.values():
            flips.clear()
        self._flows.set()

    def _cut(self, link: _Link) -> None:
        self.cuts += 1
        self._links.discard(link)
        link.abort()
        if link.task is not None:
            link.task.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        link = _Link(writer, task=asyncio.current_task())
        assert link.task is not None
        self._tasks.add(link.task)
        link.task.add_done_callback(self._tasks.discard)
        if self._refuses:
            link.abort()
            return
        self._links.add(link)
        try:
            host, _, port = self.target.rpartition(":")
            answers, link.server = await asyncio.open_connection(host.strip("[]"), int(port))
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pump(link, "up", reader))
                both.create_task(self._pump(link, "down", answers))
        except* OSError:  # one end is gone: so is the other, but for what is still on its way to it
            for writer in link.writers:
                if not writer.is_closing():
                    _abort(writer)
        except* asyncio.CancelledError:  # cut or stopped
            link.abort()
        try:
            for writer in link.writers:
                writer.close()
            await asyncio.gather(*(writer.wait_closed() for writer in link.writers), return_exceptions=True)
        finally:
            link.abort()
            self._links.discard(link)

    async def _pump(self, link: _Link, direction: Direction, reader: asyncio.StreamReader) -> None:
        """Until the sender says the end, which is passed on too."""
        held: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_HELD)
        reading = asyncio.create_task(self._read(reader, held))
        try:
            while True:
                due, data = await held.get()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                await self._flows.wait()
                if not data:
                    await reading  # the end may have been an error
                    break
                if direction not in link.mute:
                    await self._forward(link, direction, data)
            writer = link.writer(direction)
            if writer is not None and direction not in link.mute:
                writer.write_eof()
        finally:
            reading.cancel()

    async def _read(self, reader: asyncio.StreamReader, held: asyncio.Queue[tuple[float, bytes]]) -> None:
        loop = asyncio.get_running_loop()
        data = b"more"
        while data:
            try:
                data = await reader.read(_CHUNK)
            except OSError:
                await held.put((loop.time() + self._delay_s, b""))
                raise
            await held.put((loop.time() + self._delay_s, data))

    async def _forward(self, link: _Link, direction: Direction, data: bytes) -> None:
        writer = link.writer(direction)
        assert writer is not None
        size = max(1, int(self._bps / _SLICES_PER_S)) if self._bps else len(data)
        for begin in range(0, len(data), size):
            piece, over = self._spoiled(direction, data[begin : begin + size])
            if self._bps:
                await asyncio.sleep(len(piece) / self._bps)
            writer.write(piece)
            if over:
                writer.close()  # after what is written: exactly so much arrives
                self.cuts += 1
                self._links.discard(link)
                raise ConnectionResetError("cut")
            await writer.drain()

    def _spoiled(self, direction: Direction, data: bytes) -> tuple[bytes, bool]:
        """``data`` as it passes, counted, and whether the connection ends with it."""
        begin = self.passed[direction]
        end = begin + len(data)
        cut_at = self._cut_at.get(direction)
        over = cut_at is not None and cut_at <= end
        if over and cut_at is not None:
            del self._cut_at[direction]
            end = max(cut_at, begin)
            data = data[: end - begin]
        flips = self._flips[direction]
        if flips:
            spoiled = bytearray(data)
            for number in [n for n in flips if n < end]:
                spoiled[number - begin] ^= flips.pop(number)
                self.flipped += 1
            data = bytes(spoiled)
        self.passed[direction] = end
        return data, over


def _abort(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None and sock.fileno() >= 0:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()


__all__ = ["Direction", "FaultProxy"]
