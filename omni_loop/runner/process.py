"""A runner in a process of its own: spawned, fed through a pipe, its payloads in shared memory.

The pipe carries packed messages (:mod:`.packing`). A thread here only reads it and hands reports to the event loop;
sending happens on the loop, and never more than the pipe takes without blocking, so that a hung child cannot stop
the loop. When the child dies, every pending request fails at once and what it left in shared memory is unlinked.
"""

from __future__ import annotations

import asyncio
import atexit
import multiprocessing
import select
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection

import msgspec

from ..connect.base import Connector
from ..connect.shm import ShmConnector, new_prefix, sweep
from ..errors import InvalidInput, OmniLoopError, Reason, ServerUnavailable, StateError
from ..messages import Command, Done, Failed, Part, PayloadKey, ReleasePayloads, Report, Scalar
from .batcher import Batcher
from .handle import OnPart, Pending, ping
from .packing import pack, unpack
from .runner import Factory, RunnerSettings, StageEntry, build, stage_names

_MAX_BYTES = 128 << 10  # of a message: what a pipe always takes that says it can be written to
_STOP = b""


class _Plan(msgspec.Struct):
    """All a child needs. It answers ``request`` when its stages are built."""

    request: int
    stages: list[tuple[str, str, dict[str, Scalar]]]
    settings: RunnerSettings
    prefix: str


class ProcessRunner:
    """See :class:`~omni_loop.runner.handle.RunnerHandle`. Factories must be names of the registry, or importable.

    Raises:
        InvalidInput: a factory that another process cannot find.
    """

    def __init__(
        self,
        name: str,
        stages: Sequence[StageEntry],
        settings: RunnerSettings | None = None,
        *,
        stop_s: float = 30.0,
    ) -> None:
        self.name = name
        self.stages = stage_names(stages)
        self.revisions: Mapping[str, str] = {}
        self._entries = [(stage, _factory_name(factory), dict(options)) for stage, factory, options in stages]
        self._settings = settings or RunnerSettings()
        self._stop_s = stop_s
        self._prefix = new_prefix()  # of the child's segments
        self.connector: Connector = ShmConnector()
        self._pending = Pending(name, self._release)
        self._outbox: deque[bytes] = deque()
        self._link: _Link | None = None
        self._open = False

    @property
    def shares_fate(self) -> bool:
        return False

    @property
    def alive(self) -> bool:
        return self._open

    @property
    def pid(self) -> int | None:
        return self._link.process.pid if self._link else None

    async def start(self) -> None:
        if self._link is not None:
            raise StateError(f"runner {self.name!r} was started before")
        request, built = self._pending.add()
        plan = msgspec.msgpack.encode(_Plan(request, self._entries, self._settings, self._prefix))
        self._link = _Link(self.name, plan, self._heard, self._gone)
        try:
            await self._link.start()
            self.revisions = (await built).revisions
        except BaseException:
            await self.stop()
            raise
        self._open = True

    async def submit(self, command: Command, on_part: OnPart | None = None) -> Done:
        if not self._open:
            raise ServerUnavailable(f"runner {self.name!r} is not running")
        return await self._send(command, on_part)

    async def ping(self) -> None:
        if not self._open:
            raise ServerUnavailable(f"runner {self.name!r} is not running")
        await ping(self.name, self.submit, self.connector)

    async def stop(self) -> None:
        link, by_itself, asked = self._link, True, False
        self._open = False
        try:
            if link is None:
                return
            if asked := not link.ended.done():
                self._outbox.append(_STOP)
                self._flush()
                if not (by_itself := await link.wait(self._stop_s)):
                    link.process.kill()
                    await link.ended
            await link.close()
        finally:
            self.connector.close()
            sweep(self._prefix)
        if not by_itself:
            raise ServerUnavailable(f"runner {self.name!r} did not end within {self._stop_s:g} s and was killed")
        if asked and link.process.exitcode:
            raise ServerUnavailable(f"runner {self.name!r} ended with exit code {link.process.exitcode}")

    def _send(self, command: Command, on_part: OnPart | None = None) -> asyncio.Future[Done]:
        request, future = self._pending.add(on_part)
        try:
            data = pack(request, command, time.monotonic_ns())
            if len(data) > _MAX_BYTES:
                text = f"a {type(command).__name__} of {len(data)} bytes is too large; at most {_MAX_BYTES}"
                raise InvalidInput(text, reason=Reason.TOO_LARGE)
        except BaseException:
            self._pending.drop(request)
            raise
        self._outbox.append(data)
        self._flush()
        return future

    def _flush(self) -> None:
        """Send what the pipe takes; the rest follows when it takes more."""
        assert self._link is not None
        while self._outbox:
            if not self._link.writable:
                self._link.when_writable(self._flush)
                return
            if not self._link.send(self._outbox.popleft()):
                return

    def _release(self, keys: tuple[PayloadKey, ...]) -> None:
        if self._open:
            self._send(ReleasePayloads(keys)).cancel()  # nobody waits for the answer

    def _heard(self, report: Report) -> None:
        self._pending.resolve(report)

    def _gone(self) -> None:
        self._open = False
        self._outbox.clear()
        self._pending.fail_all(f"runner {self.name!r} is gone")
        sweep(self._prefix)


class _Link:
    """The child process, the pipe to it, and the thread that listens."""

    def __init__(self, name: str, plan: bytes, heard: Callable[[Report], None], gone: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._heard, self._gone = heard, gone
        self.ended: asyncio.Future[None] = self._loop.create_future()
        context = multiprocessing.get_context("spawn")  # fork would copy the threads and locks of gRPC and torch
        self._pipe, self._theirs = context.Pipe(duplex=True)
        self._room = select.poll()
        self._room.register(self._pipe.fileno(), select.POLLOUT)
        # No daemon, since those may start no processes and stages may; it ends with this process all the same.
        self.process = context.Process(target=_child, args=(self._theirs, plan), name=f"runner-{name}")
        self._reader = threading.Thread(target=self._read, name=f"reader-{name}", daemon=True)

    async def start(self) -> None:
        try:
            await asyncio.to_thread(self.process.start)
            atexit.register(self.process.terminate)  # runs before multiprocessing waits for it
        finally:
            self._theirs.close()  # so that the child's death is the end of the pipe
            self._reader.start()

    @property
    def writable(self) -> bool:
        """Whether :meth:`send` will not block; so it is when the child has died."""
        return bool(self._room.poll(0))

    def when_writable(self, send: Callable[[], None]) -> None:
        """Call ``send`` once, when the pipe can be written to."""

        def call() -> None:
            self._loop.remove_writer(self._pipe.fileno())
            send()

        self._loop.add_writer(self._pipe.fileno(), call)

    def send(self, data: bytes) -> bool:
        try:
            self._pipe.send_bytes(data)
        except OSError:  # it has died; the reader finds out as well, and fails all that is pending
            return False
        return True

    async def wait(self, seconds: float) -> bool:
        """Whether the child ended within ``seconds``."""
        done, _ = await asyncio.wait([self.ended], timeout=seconds)
        return bool(done)

    async def close(self) -> None:
        """Once it has ended: reap the child, and close the pipe."""
        await asyncio.to_thread(self.process.join)
        atexit.unregister(self.process.terminate)
        await asyncio.to_thread(self._reader.join)
        self._pipe.close()

    def _read(self) -> None:
        try:
            while True:
                message = unpack(self._pipe.recv_bytes())[1]
                if not isinstance(message, Done | Failed | Part):
                    raise TypeError(f"a runner sent a {type(message).__name__}")
                self._call(self._heard, message)
        except (EOFError, OSError):
            pass  # the child has ended; what that means is for _end to say
        finally:
            self._call(self._end)

    def _end(self) -> None:
        self._loop.remove_writer(self._pipe.fileno())
        self._gone()
        self.ended.set_result(None)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():  # closed: nobody is left to be told
                raise


def _factory_name(factory: Factory | str) -> str:
    if isinstance(factory, str):
        return factory
    module, name = getattr(factory, "__module__", None), getattr(factory, "__qualname__", None)
    if module is None or name is None or "<" in name:
        raise InvalidInput(f"the stage factory {factory!r} cannot be imported by another process; name a function")
    return f"{module}:{name}"


def _child(pipe: Connection, encoded: bytes) -> None:
    """The child's main: build, answer, serve until told to stop or the parent is gone, close."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops us
    plan = msgspec.msgpack.decode(encoded, type=_Plan)
    connector = ShmConnector(plan.prefix)
    try:
        try:
            runner = build(plan.stages, connector, plan.settings)
        except OmniLoopError as e:
            pipe.send_bytes(pack(plan.request, Failed(plan.request, e.code, e.reason, e.retryable, e.text)))
            return
        pipe.send_bytes(pack(plan.request, Done(plan.request, revisions=runner.revisions)))
        # When the parent dies nobody is left to answer, but what we hold must go.
        with closing(runner), suppress(EOFError, BrokenPipeError):
            _serve(pipe, Batcher(runner))
    finally:
        connector.close()
        pipe.close()


def _serve(pipe: Connection, batcher: Batcher) -> None:
    """Answer what comes until told to stop, and all that came before it."""
    arrivals = select.poll()  # one for good: Connection.poll makes a selector each time
    arrivals.register(pipe.fileno(), select.POLLIN)
    while True:
        wait = batcher.wait_s()
        while wait is None or arrivals.poll(wait * 1e3):
            data = pipe.recv_bytes()  # waits for nothing but the rest of a message
            if data == _STOP:
                for reports in batcher.drain():
                    _answer(pipe, reports)
                return
            request, command, sent_ns = unpack(data)
            if isinstance(command, Done | Failed | Part):
                raise TypeError(f"a runner was sent a {type(command).__name__}")
            batcher.add(request, command, sent_ns)
            wait = 0.0
        _answer(pipe, batcher.step())


def _answer(pipe: Connection, reports: list[Report]) -> None:
    for report in reports:
        pipe.send_bytes(pack(report.request, report))
