"""What an orchestrator holds of a runner, wherever it runs: commands in, reports or typed errors out."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from typing import Protocol

import numpy as np

from ..connect.base import Connector, Outcome, as_numpy, payload_error
from ..errors import ServerUnavailable, rebuild
from ..messages import Command, Done, Failed, Part, PayloadKey, PayloadKind, Probe, Receipt, ReleasePayloads, Report
from ..stage import Payload
from ..telemetry import metrics

log = logging.getLogger(__name__)
OnPart = Callable[[Part], None]  # of a stage that still runs
SERVER = "server"  # the process of runners in threads
_used = metrics.gauge("omni_loop_state_bytes", "Sessions' state, as of the last ping", ("process", "device"))


class RunnerHandle(Protocol):
    """All methods belong to one event loop."""

    @property
    def name(self) -> str: ...

    @property
    def stages(self) -> frozenset[str]:
        """Full names, ``pipeline/stage``."""

    @property
    def revisions(self) -> Mapping[str, str]:
        """Of the stages, by full name; empty before they are built."""

    @property
    def connector(self) -> Connector:
        """Where inputs for this runner are put and its outputs are got."""

    @property
    def alive(self) -> bool:
        """Started, not stopped, not died."""

    @property
    def shares_fate(self) -> bool:
        """Whether it cannot be lost without the server itself: what it was sent in order, it does."""

    async def start(self) -> None:
        """Build the stages and warm them up. Raises what that raises, as a typed error."""

    async def submit(self, command: Command, on_part: OnPart | None = None) -> Done:
        """Execute ``command`` after all submitted before for the same session. If the caller is cancelled meanwhile,
        the command still runs, and the payloads it put are released. ``on_part`` hears what it shows until then.

        Raises:
            OmniLoopError: rebuilt from the runner's report.
            ServerUnavailable: the runner is gone (RUNNER_GONE), also when it dies meanwhile.
        """

    async def ping(self) -> None:
        """Pass through the runner's work loop, with payloads there and back: at most one forward pass is waited for.

        Raises:
            PayloadError: payloads do not come through.
            ServerUnavailable: as :meth:`submit`.
        """

    async def stop(self) -> None:
        """End the runner after the commands submitted so far, within a bound; then nothing is left of it.

        Raises:
            ServerUnavailable: it did not end by itself.
        """


class Pending:
    """Requests that wait for their report, answered on the event loop."""

    def __init__(self, runner: str, release: Callable[[tuple[PayloadKey, ...]], None]) -> None:
        self._runner = runner
        self._release = release  # of payloads nobody waits for any more
        self._next = itertools.count(1)
        self._futures: dict[int, asyncio.Future[Done]] = {}
        self._listeners: dict[int, OnPart] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def add(self, on_part: OnPart | None = None) -> tuple[int, asyncio.Future[Done]]:
        request = next(self._next)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._futures[request] = future
        if on_part is not None:
            self._listeners[request] = on_part
        return request, future

    def drop(self, request: int) -> None:
        """It was never sent."""
        del self._futures[request]
        self._listeners.pop(request, None)

    def resolve(self, report: Report) -> None:
        if isinstance(report, Part):
            self._show(report)
            return
        future = self._futures.pop(report.request, None)
        self._listeners.pop(report.request, None)
        if isinstance(report, Failed) and report.detail:
            log.error("runner %r: %s\n%s", self._runner, report.text, report.detail)
        if future is None or future.done():
            if isinstance(report, Done) and report.outputs:
                self._release(tuple(receipt.key for receipt in report.outputs.values()))
        elif isinstance(report, Done):
            future.set_result(report)
        else:
            future.set_exception(
                rebuild(
                    report.code,
                    report.reason,
                    report.retryable,
                    report.text,
                    report.retry_after_ms,
                    report.missing_bytes,
                )
            )

    def _show(self, part: Part) -> None:
        listener, future = self._listeners.get(part.request), self._futures.get(part.request)
        if listener is None or future is None or future.done():
            self._release(tuple(receipt.key for receipt in part.outputs.values()))
        else:
            listener(part)

    def resolve_all(self, reports: Iterable[Report]) -> None:
        left = iter(reports)
        for report in left:
            try:
                self.resolve(report)
            except BaseException:
                self.resolve_all(left)  # whatever one met, nobody else is left without an answer
                raise

    def fail_all(self, text: str) -> None:
        for future in self._futures.values():
            if not future.done():
                future.set_exception(ServerUnavailable(text))
        self._futures.clear()
        self._listeners.clear()


_PROBE = np.arange(256, dtype=np.uint8)
_probes = itertools.count(1)


async def ping(process: str, submit: Callable[[Command], Awaitable[Done]], connector: Connector) -> None:
    """Send a payload through a runner's work loop and memory of its device and get it back, by every backend of
    ``connector``; see :meth:`RunnerHandle.ping`. ``process`` names it in the metrics."""
    key, put = PayloadKey("health", f"health-{next(_probes)}", 0, 0), list[PayloadKey]()
    try:
        connector.health()
        receipts: dict[str, Receipt] = {}
        for backend in connector.backends:
            put.append(replace(key, edge=f"health/{backend}"))
            receipts[backend] = connector.put(put[-1], Payload(PayloadKind.TOKENS, {"tokens": _PROBE}))
        done = await submit(Probe(receipts))
        for device, nbytes in done.used.items():
            _used.set(nbytes, process=process, device=device)
        try:
            for backend in connector.backends:
                back = as_numpy(connector.get(done.outputs[backend]).arrays["tokens"])
                if not np.array_equal(back, _PROBE):
                    raise payload_error(Outcome.CORRUPT, key, f"a probe came back changed through {backend!r}")
        finally:
            await submit(ReleasePayloads(tuple(r.key for r in done.outputs.values())))
    except OSError as e:
        raise payload_error(Outcome.GONE, key, f"the connector does not work: {e.strerror}") from e
    finally:
        for one in put:
            connector.cleanup(one)
