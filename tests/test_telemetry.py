from __future__ import annotations

import importlib.util

import pytest

from omni_loop import telemetry
from omni_loop.telemetry import Metrics


def test_instruments_appear_in_the_exposition() -> None:
    metrics = Metrics()
    metrics.counter("ticks", "Ticks", ("reason",)).inc(3, reason="late")
    metrics.gauge("sessions", "Sessions").set(2)
    metrics.histogram("seconds", "Time", buckets=(1.0, 2.0)).observe(1.5)
    text = metrics.exposition().decode()
    assert 'ticks_total{reason="late"} 3.0' in text
    assert "sessions 2.0" in text
    assert 'seconds_bucket{le="1.0"} 0.0' in text
    assert 'seconds_bucket{le="2.0"} 1.0' in text


def test_one_name_is_one_instrument() -> None:
    metrics = Metrics()
    for _ in range(2):
        metrics.counter("ticks", "Ticks").inc()
    assert "ticks_total 2.0" in metrics.exposition().decode()


def test_a_span_counts_also_when_its_body_raises() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError), metrics.span("decode"):
        raise KeyError
    assert 'omni_loop_span_seconds_count{span="decode"} 1.0' in metrics.exposition().decode()


def test_without_prometheus_measuring_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> object | None:
        return None if name == "prometheus_client" else importlib.util.find_spec(name)

    monkeypatch.setattr(telemetry, "find_spec", find)
    metrics = Metrics()
    metrics.counter("ticks", "Ticks", ("reason",)).inc(reason="late")
    with metrics.span("decode"):
        pass
    assert metrics.exposition() == b""
