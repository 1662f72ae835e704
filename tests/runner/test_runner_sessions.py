"""Forks, rewinds, exports, imports and evictions, as a runner is asked for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from omni_loop.connect.local import LocalConnector
from omni_loop.errors import (
    Exhausted,
)
from omni_loop.messages import (
    CloseSession,
    Commit,
    Discard,
    ExportSession,
    ForkSession,
    ImportSession,
    OpenSession,
    PayloadKey,
    PayloadKind,
    Receipt,
    ReleasePayloads,
    ResetSession,
    RewindSession,
)
from omni_loop.runner.batcher import Batcher
from omni_loop.runner.runner import RunnerSettings, build
from omni_loop.stage import Payload

from .runner_bench import STAGE, Bench


@pytest.fixture
def bench(toys: str) -> Iterator[Bench]:
    bench = Bench(f"{toys}:toy")
    bench.done(OpenSession("s", 1, "push"))
    yield bench
    bench.runner.close()
    assert [pool.owned for pool in bench.runner.state.stats().pools.values()] == [0]


def test_a_fork_goes_on_as_its_parent_would(bench: Bench) -> None:
    for x in range(4):
        bench.tick_once(x)
    before = bench.runner.state.stats().pools["p/toy.kv"].owned
    bench.done(ForkSession("s", "same"))
    bench.done(ForkSession("s", "other", seed=2))
    assert bench.runner.state.stats().pools["p/toy.kv"].owned == before
    answers = {name: bench.y(bench.done(bench.run(9, tick=5, session=name))) for name in ("s", "same", "other")}
    assert answers["same"] == answers["s"] != answers["other"]
    assert bench.failed(ForkSession("s", "late")).reason == "busy"  # a tick is undecided
    assert bench.failed(CloseSession("late")).reason == "unknown_session"
    bench.done(Commit("same", 0, 5, (STAGE,)))
    bench.done(Discard("s", 0, 5, (STAGE,)))
    assert bench.failed(ForkSession("s", "same")).reason == "busy"
    assert bench.y(bench.done(bench.run(9, tick=5))) == answers["s"]


def test_a_rewound_session_is_as_it_was_and_a_refused_one_as_it_is(bench: Bench) -> None:
    for x in range(5):
        bench.tick_once(x)
    bench.done(ResetSession("s", 2))
    bench.tick = 0
    for x in range(4):
        bench.done(run := bench.run(x, epoch=2))
        bench.done(Commit("s", 2, run.tick, (STAGE,)))
    report = bench.failed(RewindSession("s", 3, 0, 2))
    assert (report.code, report.reason) == ("failed_precondition", "bad_request")
    bench.done(bench.run(9, tick=5, epoch=2))  # a refused rewind does not begin an epoch
    bench.done(RewindSession("s", 3, 2, 2))
    assert bench.failed(RewindSession("s", 2, 2, 1)).reason == "stale_epoch"
    assert bench.failed(Commit("s", 3, 5, (STAGE,))).reason == "stale_seq"
    done = bench.done(bench.run(7, tick=3, epoch=3))
    assert bench.connector.get(done.outputs["y"]).meta == {"ticks": 3, "total": 6, "length": 6, "prompt": "push"}


def exported(bench: Bench) -> dict[str, Payload]:
    done = bench.done(ExportSession("s"))
    payloads = {stage: bench.connector.get(receipt) for stage, receipt in done.outputs.items()}
    bench.done(ReleasePayloads(tuple(receipt.key for receipt in done.outputs.values())))
    return payloads


def imported(bench: Bench, payloads: dict[str, Payload], session: str = "s", epoch: int = 0) -> ImportSession:
    """The command to import them; they are put."""
    receipts = {}
    for stage, payload in payloads.items():
        receipts[stage] = bench.connector.put(PayloadKey(f"import>{stage}", session, epoch, 0), payload)
    return ImportSession(session, 1, "push", epoch, receipts)


def test_an_exported_session_goes_on_elsewhere_bit_for_bit(bench: Bench, toys: str) -> None:
    for x in range(7):
        bench.tick_once(x)
    payloads = exported(bench)
    assert [(stage, p.kind) for stage, p in payloads.items()] == [(STAGE, PayloadKind.STATE)]
    there = Bench(f"{toys}:toy")
    there.done(imported(there, payloads))
    there.tick = bench.tick
    assert [there.tick_once(x) for x in range(4)] == [bench.tick_once(x) for x in range(4)]
    assert there.failed(imported(there, payloads)).reason == "busy"
    there.done(bench_close := CloseSession("s"))
    assert there.failed(bench_close).reason == "unknown_session"


def test_an_export_of_an_undecided_tick_or_beyond_the_connectors_room_leaves_nothing(toys: str) -> None:
    class Full(LocalConnector):
        def put(self, key: PayloadKey, payload: Payload) -> Receipt:
            if key.edge.startswith("q/"):
                raise Exhausted("no room")
            return super().put(key, payload)

    bench = Bench(f"{toys}:toy")
    bench.runner = build([(STAGE, f"{toys}:toy", {}), ("q/toy", f"{toys}:toy", {})], Full(), RunnerSettings())
    bench.batcher, bench.connector = Batcher(bench.runner), bench.runner.connector  # type: ignore[assignment]
    bench.done(OpenSession("s", 1, ""))
    bench.done(bench.run(tick=1))
    assert bench.failed(ExportSession("s")).reason == "busy"
    bench.done(Commit("s", 0, 1, (STAGE,)))
    before = bench.connector.health().payloads
    assert bench.failed(ExportSession("s")).reason == "out_of_blocks"
    assert bench.connector.health().payloads == before


@pytest.mark.parametrize("damage", ["revision", "array", "fact", "stage", "gone"])
def test_a_state_that_does_not_fit_is_refused_and_nothing_is_opened(bench: Bench, damage: str) -> None:
    bench.tick_once(1)
    payload = exported(bench)[STAGE]
    command = imported(bench, {STAGE: payload}, "t")
    arrays, meta = dict(payload.arrays), dict(payload.meta)
    want = "bad_snapshot"
    if damage == "revision":
        meta["revision"] = "toy-0"
    elif damage == "array":
        arrays["mean"] = arrays["mean"][:3]
    elif damage == "fact":
        del meta["ticks"]
    elif damage == "gone":
        want = "payload_gone"
    changed = {("p/toi" if damage == "stage" else STAGE): Payload(payload.kind, arrays, meta)}
    command = imported(bench, changed, "t")
    if damage == "stage":
        want = "unknown_name"
    if damage == "gone":
        bench.connector.cleanup(command.stages[STAGE].key)
    before = bench.runner.state.stats()
    assert bench.failed(command).reason == want
    assert bench.runner.state.stats() == before
    assert bench.failed(CloseSession("t")).reason == "unknown_session"
    bench.connector.cleanup_session("t")


def test_an_evicted_session_says_so_until_it_is_reset_or_imported(bench: Bench) -> None:
    bench.tick_once(1)
    state = exported(bench)
    for revive in (ResetSession("s", 4), imported(bench, state, epoch=4)):
        bench.runner.state.evict("s")
        late = bench.run(tick=2, epoch=4)
        for refused in (late, Commit("s", 4, 1, (STAGE,)), ForkSession("s", "t"), ExportSession("s")):
            assert bench.failed(refused).reason == "evicted"
        bench.done(Discard("s", 4, 2, (STAGE,)))  # it has nothing staged
        bench.done(revive)
    done = bench.done(bench.run(tick=2, epoch=4))
    assert bench.connector.get(done.outputs["y"]).meta["ticks"] == 2
