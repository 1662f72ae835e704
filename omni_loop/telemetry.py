"""Counters, gauges, histograms and spans: prometheus-client's where installed, otherwise nothing is kept.

Instruments are made at import time of the module that owns them, by name; asking twice for one name gives the same
instrument. Label values are bounded sets (stage, pipeline, reason), never a session's id.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class Counter(Protocol):
    def inc(self, amount: float = 1, **labels: str) -> None:
        """Count ``amount`` more."""


class Gauge(Protocol):
    def set(self, value: float, **labels: str) -> None:
        """The present value."""

    def follow(self, read: Callable[[], float], **labels: str) -> None:
        """The value is what ``read`` gives whenever somebody looks, on a thread of theirs."""


class Histogram(Protocol):
    def observe(self, value: float, **labels: str) -> None:
        """One more sample."""


class _Nothing:
    """Where prometheus-client is missing (a robot's client) measuring costs nothing."""

    def inc(self, amount: float = 1, **labels: str) -> None:
        pass

    def set(self, value: float, **labels: str) -> None:
        pass

    def follow(self, read: Callable[[], float], **labels: str) -> None:
        pass

    def observe(self, value: float, **labels: str) -> None:
        pass


class _Prometheus:
    """Gives prometheus-client's three kinds one calling convention: labels as keywords."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._children: dict[tuple[tuple[str, str], ...], Any] = {}  # a look-up of prometheus-client's takes longer

    def _child(self, labels: dict[str, str]) -> Any:
        if not labels:
            return self._metric
        key = tuple(labels.items())
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._metric.labels(**labels)
        return child

    def inc(self, amount: float = 1, **labels: str) -> None:
        self._child(labels).inc(amount)

    def set(self, value: float, **labels: str) -> None:
        self._child(labels).set(value)

    def follow(self, read: Callable[[], float], **labels: str) -> None:
        self._child(labels).set_function(read)

    def observe(self, value: float, **labels: str) -> None:
        self._child(labels).observe(value)


class Metrics:
    """A set of instruments. The process has one, :data:`metrics`; tests make their own."""

    def __init__(self) -> None:
        self._instruments: dict[str, _Prometheus | _Nothing] = {}

    @functools.cached_property
    def _registry(self) -> Any:
        import prometheus_client

        return prometheus_client.CollectorRegistry()

    def _make(self, kind: str, name: str, text: str, labels: tuple[str, ...], **options: Any) -> _Prometheus | _Nothing:
        if name not in self._instruments:
            if find_spec("prometheus_client") is None:
                self._instruments[name] = _Nothing()
            else:
                import prometheus_client

                make = getattr(prometheus_client, kind)
                self._instruments[name] = _Prometheus(make(name, text, labels, registry=self._registry, **options))
        return self._instruments[name]

    def counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return self._make("Counter", name, text, labels)

    def gauge(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
        return self._make("Gauge", name, text, labels)

    def histogram(
        self, name: str, text: str, labels: tuple[str, ...] = (), buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        return self._make("Histogram", name, text, labels, buckets=buckets)

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Seconds spent inside, as a sample of ``omni_loop_span_seconds{span=name}``."""
        histogram = self.histogram("omni_loop_span_seconds", "Time spent inside a named part", ("span",))
        began = time.perf_counter()
        try:
            yield
        finally:
            histogram.observe(time.perf_counter() - began, span=name)

    def exposition(self) -> bytes:
        """All instruments in Prometheus' text format; empty where prometheus-client is missing."""
        if find_spec("prometheus_client") is None:
            return b""
        import prometheus_client

        return bytes(prometheus_client.generate_latest(self._registry))


metrics = Metrics()
