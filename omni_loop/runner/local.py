"""A runner in a thread of this process. Payloads and weights are shared by reference; commands are messages all the
same, so nothing works here that would not work across processes."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

from ..connect.base import Connector
from ..connect.local import LocalConnector
from ..errors import OmniLoopError, ServerUnavailable, StateError
from ..messages import Command, Done, PayloadKey, Report
from .batcher import Batcher
from .handle import SERVER, OnPart, Pending, ping
from .ledger import Ledger
from .runner import RunnerSettings, StageEntry, build, stage_names

_Work = tuple[int, Command, int]  # request, command, when it was submitted


class LocalRunner:
    """See :class:`~omni_loop.runner.handle.RunnerHandle`."""

    def __init__(
        self,
        name: str,
        stages: Sequence[StageEntry],
        settings: RunnerSettings | None = None,
        connector: Connector | None = None,
        *,
        ledger: Ledger | None = None,
        stop_s: float = 30.0,
    ) -> None:
        self.name = name
        self.stages = stage_names(stages)
        self.revisions: Mapping[str, str] = {}
        self.connector: Connector = connector or LocalConnector()
        self._entries = tuple(stages)
        self._settings = settings or RunnerSettings()
        self._ledger = ledger  # of all runners in this process
        self._stop_s = stop_s
        self._queue: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._pending = Pending(name, self._release)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ended: asyncio.Future[None] | None = None
        self._open = False

    @property
    def shares_fate(self) -> bool:
        return True

    @property
    def alive(self) -> bool:
        return self._open and self._thread is not None and self._thread.is_alive()

    async def start(self) -> None:
        if self._thread is not None:
            raise StateError(f"runner {self.name!r} was started before")
        self._loop = asyncio.get_running_loop()
        started, self._ended = self._loop.create_future(), self._loop.create_future()
        self._thread = threading.Thread(
            target=self._work, args=(started, self._ended), name=f"runner-{self.name}", daemon=True
        )
        self._thread.start()
        await started
        self._open = True

    async def submit(self, command: Command, on_part: OnPart | None = None) -> Done:
        if not self._open:
            raise ServerUnavailable(f"runner {self.name!r} is not running")
        request, future = self._pending.add(on_part)
        self._queue.put((request, command, time.monotonic_ns()))
        return await future

    async def ping(self) -> None:
        if not self._open:
            raise ServerUnavailable(f"runner {self.name!r} is not running")
        await ping(SERVER, self.submit, self.connector)

    async def stop(self) -> None:
        self._open = False
        if self._thread is None or self._ended is None:
            self.connector.close()
            return
        self._queue.put(None)
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), self._stop_s)
        except TimeoutError:
            text = f"runner {self.name!r} did not end within {self._stop_s:g} s"
            self._pending.fail_all(text)
            raise ServerUnavailable(text) from None
        finally:
            self.connector.close()
        self._thread.join()

    def _release(self, keys: tuple[PayloadKey, ...]) -> None:
        for key in keys:
            self.connector.cleanup(key)

    def _work(self, started: asyncio.Future[None], ended: asyncio.Future[None]) -> None:
        """The worker thread: build, serve until the sentinel, close."""
        try:
            runner = build(self._entries, self.connector, self._settings, self._ledger)
        except OmniLoopError as e:
            self._tell(started, e)
            self._tell(ended, None)
            return
        self.revisions = runner.revisions
        self._tell(started, None)
        try:
            with closing(runner):
                self._serve(Batcher(runner))
            runner.state.free()  # for the other runners on its ledger
        except Exception as e:
            self._call(self._gone)
            self._tell(ended, e)
        else:
            self._tell(ended, None)

    def _serve(self, batcher: Batcher) -> None:
        """Answer what comes until the sentinel, and all that came before it."""
        inbox = self._queue
        while True:
            wait = batcher.wait_s()
            if wait != 0.0 or not inbox.empty():
                try:
                    work = inbox.get(timeout=wait)
                    while work is not None:
                        batcher.add(*work)
                        if inbox.empty():
                            break
                        work = inbox.get()
                    else:
                        for reports in batcher.drain():
                            self._answer(reports)
                        return
                except queue.Empty:
                    pass  # nobody joined; what waited is due
            self._answer(batcher.step())

    def _answer(self, reports: list[Report]) -> None:
        if reports:
            self._call(self._pending.resolve_all, reports)

    def _gone(self) -> None:
        self._open = False
        self._pending.fail_all(f"runner {self.name!r} is gone")

    def _tell(self, future: asyncio.Future[None], error: BaseException | None) -> None:
        self._call(_settle, future, error)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            if not self._loop.is_closed():  # closed: nobody is left to be told
                raise


def _settle(future: asyncio.Future[None], error: BaseException | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
