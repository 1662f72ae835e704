"""The rows of edges run, and what they measure is what they say."""

from __future__ import annotations

from omni_loop_bench.adapters_edges import BENCH, Edges
from omni_loop_bench.rows import Settings, find


def test_the_parts_stand_together() -> None:
    bench = find("adapters")
    assert set(BENCH.rows) <= set(bench.rows)
    assert {row.name for row in bench.select(["edges"])} == set(BENCH.rows)


def test_payloads_are_carried_and_checked() -> None:
    results = {
        r.row.name: r.value
        for r in find("adapters").run(["shm_1mib", "local_copied", "schema_check"], Settings(quick=True))
    }
    assert results["shm_1mib"].ours > 0
    assert results["shm_1mib"].baseline is not None
    assert (results["local_copied"].ours, results["local_copied"].baseline) == (0, 8 << 20)
    assert results["schema_check"].ours > 0


def test_previews_come_before_the_whole() -> None:
    with BENCH.subject(Settings(quick=True)) as edges:
        assert isinstance(edges, Edges)
        seen = edges.two_runners
    assert 0 < seen.first < seen.watched
    assert seen.plain > 0
    assert seen.parts >= 1
