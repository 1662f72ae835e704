from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from omni_loop.connect.local import LocalConnector
from omni_loop.errors import (
    CheckpointError,
    ConfigError,
    Exhausted,
    InvalidInput,
    OmniLoopError,
    StageFailed,
    UnknownName,
)
from omni_loop.messages import (
    CloseSession,
    Commit,
    Discard,
    OpenSession,
    PayloadKey,
    PayloadKind,
    Receipt,
    ReleasePayloads,
    ResetSession,
    RunStage,
    Scalar,
)
from omni_loop.runner.runner import Runner, RunnerSettings, build
from omni_loop.runner.state import Budget
from omni_loop.stage import Payload, StageItem
from omni_loop.types import Op, StageKind

from .runner_bench import STAGE, Bench


@pytest.fixture
def bench(toys: str) -> Iterator[Bench]:
    bench = Bench(f"{toys}:toy")
    bench.done(OpenSession("s", 1, "push"))
    yield bench
    bench.runner.close()
    assert [pool.owned for pool in bench.runner.state.stats().pools.values()] == [0]


def test_a_tick_gives_receipts_and_the_time_of_the_model(bench: Bench) -> None:
    done = bench.done(bench.run())
    assert set(done.outputs) == {"y", "kv"}
    key = PayloadKey("p/toy.y", "s", 0, 1)
    assert (done.outputs["y"].key, done.outputs["y"].kind) == (key, PayloadKind.HIDDEN)
    meta = bench.connector.get(done.outputs["y"]).meta
    assert meta == {"ticks": 1, "total": 2, "length": 2, "prompt": "push"}
    assert done.model_ms > 0


def test_the_same_seed_gives_the_same_ticks_and_another_seed_others(bench: Bench) -> None:
    first = [bench.tick_once(x) for x in range(6)]
    for seed, same in ((None, True), (2, False)):
        bench.tick = 0
        bench.done(ResetSession("s", 0, seed, None))
        assert ([bench.tick_once(x) for x in range(6)] == first) is same


@pytest.mark.parametrize(
    ("mode", "code", "reason", "text"),
    [
        ("raise", "internal", "stage_failed", "RuntimeError"),
        ("item", "internal", "stage_failed", "ValueError"),
        ("typed", "invalid_argument", "bad_request", "x is not to my taste"),
        ("exit", "internal", "stage_failed", "SystemExit"),
        ("nan", "internal", "bad_output", "'y'"),
        ("nan_state", "internal", "bad_output", "'mean'"),
    ],
)
def test_a_failed_tick_leaves_no_trace(toys: str, mode: str, code: str, reason: str, text: str) -> None:
    want, got = Bench(f"{toys}:toy"), Bench(f"{toys}:toy")
    for bench in (want, got):
        bench.done(OpenSession("s", 1, "push"))
        for x in range(5):
            bench.tick_once(x)
    before = got.connector.health().payloads
    report = got.failed(command := got.run(9.0, mode=mode, rewind=True, blocks=3))
    assert (report.code, report.reason) == (code, reason)
    assert text in report.text
    assert "secret" not in report.text
    assert ("secret" in report.detail) == (mode in ("raise", "item"))
    assert got.connector.health().payloads == before + 1  # its input
    got.done(Discard("s", 0, command.tick, (STAGE,)))
    assert got.runner.state.stats() == want.runner.state.stats()
    want.tick += 1
    assert [got.tick_once(x) for x in range(5)] == [want.tick_once(x) for x in range(5)]


def test_a_failed_stage_cannot_be_committed(bench: Bench) -> None:
    bench.failed(command := bench.run(mode="raise"))
    report = bench.failed(Commit("s", 0, command.tick, (STAGE,)))
    assert (report.code, "nothing is staged" in report.text) == ("failed_precondition", True)


def test_discard_undoes_a_tick_that_succeeded(bench: Bench) -> None:
    bench.tick_once(1)
    first = bench.y(bench.done(bench.run(2, tick=9)))
    bench.done(Discard("s", 0, 9, (STAGE,)))
    assert bench.y(bench.done(bench.run(2, tick=9))) == first


def test_an_undecided_tick_must_be_decided_first(bench: Bench) -> None:
    bench.done(bench.run(tick=1))
    report = bench.failed(bench.run(tick=2))
    assert (report.code, report.reason) == ("failed_precondition", "busy")
    assert "tick 1" in report.text
    bench.done(Commit("s", 0, 1, (STAGE,)))
    bench.done(bench.run(tick=2))


def test_an_older_epoch_is_stale_and_changes_nothing(bench: Bench) -> None:
    late = bench.run(tick=1)
    bench.done(bench.run(tick=2))
    bench.done(ResetSession("s", 3, None, "pull"))
    bench.done(command := bench.run(tick=1, epoch=3))
    for stale in (late, Commit("s", 0, 1, (STAGE,)), ResetSession("s", 2)):
        assert bench.failed(stale).reason == "stale_epoch"
    bench.done(Discard("s", 0, 1, (STAGE,)))  # of the older epoch: there is nothing left to undo
    bench.done(Commit("s", 3, command.tick, (STAGE,)))
    done = bench.done(bench.run(tick=2, epoch=3))
    assert bench.connector.get(done.outputs["y"]).meta == {"ticks": 2, "total": 4, "length": 4, "prompt": "pull"}


def test_a_newer_epoch_does_not_continue_an_older_ones_tick(bench: Bench) -> None:
    bench.done(bench.run(tick=1, epoch=0))
    done = bench.done(bench.run(tick=1, epoch=1))
    assert bench.connector.get(done.outputs["y"]).meta["ticks"] == 1


def test_unknown_names_are_refused(bench: Bench) -> None:
    assert bench.failed(CloseSession("t")).reason == "unknown_session"
    assert bench.failed(RunStage("t", 0, 1, STAGE, Op.INFER, 0, {})).reason == "unknown_session"
    report = bench.failed(RunStage("s", 0, 1, "p/toi", Op.INFER, 0, {}))
    assert (report.reason, "'p/toy'" in report.text) == ("unknown_name", True)
    assert bench.failed(OpenSession("s", 1, "")).reason == "busy"
    assert bench.failed(OpenSession("t", 1, "", {}, ("p/toi",))).reason == "unknown_name"


def test_an_input_that_is_gone_fails_before_anything_is_staged(bench: Bench) -> None:
    command = bench.run(tick=1)
    bench.connector.cleanup(command.inputs["observation"].key)
    assert bench.failed(command).reason == "payload_gone"
    bench.done(bench.run(tick=2))


def test_a_kv_output_is_no_view_of_the_pool(bench: Bench) -> None:
    done = bench.done(bench.run(1, tick=1))
    kv = bench.connector.get(done.outputs["kv"]).arrays["kv"]
    before = kv.clone()
    bench.done(Commit("s", 0, 1, (STAGE,)))
    for tick in range(2, 30):
        bench.done(bench.run(tick, tick=tick))
        bench.done(Commit("s", 0, tick, (STAGE,)))
    assert torch.equal(kv, before)
    assert not bench.runner.state.owns_memory(kv.data_ptr())


def test_release_and_close_give_payloads_back(bench: Bench) -> None:
    done = bench.done(bench.run())
    assert bench.connector.health().payloads == 3
    bench.done(ReleasePayloads((done.outputs["kv"].key,)))
    assert bench.connector.health().payloads == 2
    bench.done(CloseSession("s"))
    assert bench.connector.health().payloads == 0


def test_when_the_second_output_finds_no_room_the_first_is_taken_back(toys: str) -> None:
    class Small(LocalConnector):
        def put(self, key: PayloadKey, payload: Payload) -> Receipt:
            if payload.kind is PayloadKind.KV:
                raise Exhausted("no room")
            return super().put(key, payload)

    bench = Bench(f"{toys}:toy", Small())
    bench.done(OpenSession("s", 1, ""))
    assert bench.failed(bench.run()).reason == "out_of_blocks"
    assert bench.connector.health().payloads == 1
    assert bench.runner.state.stats().pools["p/toy.kv"].owned == 0


def test_an_exhausted_pool_fails_the_tick_and_others_go_on(toys: str) -> None:
    bench = Bench(f"{toys}:toy", budget=Budget(blocks=5))
    for session in ("s", "t"):
        bench.done(OpenSession(session, 1, ""))
    bench.done(bench.run(tick=1, blocks=4))
    report = bench.failed(bench.run(tick=1, session="t", blocks=2))
    assert (report.code, report.reason, report.retryable) == ("resource_exhausted", "out_of_blocks", True)
    assert "lacks 1 of 2 blocks" in report.text
    assert bench.runner.state.stats().pools["p/toy.kv"].free == 1
    bench.done(Commit("s", 0, 1, (STAGE,)))
    bench.done(bench.run(tick=1, session="t", blocks=1))
    bench.done(CloseSession("s"))
    bench.done(bench.run(tick=1, session="t", blocks=3))


class Odd:
    """A stage whose results are not what the protocol says."""

    kind = StageKind.ACT
    revision = "odd"

    def __init__(self, results: Callable[[], Any]) -> None:
        self.results = results

    def state_specs(self) -> dict[str, Any]:
        return {}

    def warm_up(self) -> None:
        pass

    def run(self, items: Sequence[StageItem]) -> Any:
        return self.results()


@pytest.mark.parametrize(
    "result",
    [None, [], [{}, {}], [None], [{"y": np.zeros(3)}], [{"y": Payload(PayloadKind.HIDDEN, {"y": np.array([np.inf])})}]],
)
def test_results_that_break_the_protocol_are_bad_output(result: Any) -> None:
    bench = Bench(lambda: Odd(lambda: result))
    bench.done(OpenSession("s", 1, ""))
    assert bench.failed(bench.run()).reason == "bad_output"


def test_large_finite_values_are_no_bad_output() -> None:
    huge = np.full(10, 3e38, np.float32)  # their sum overflows
    payload = Payload(PayloadKind.HIDDEN, {"y": huge, "n": np.array([1]), "e": np.zeros((0, 2), np.float32)})
    bench = Bench(lambda: Odd(lambda: [{"y": payload}]))
    bench.done(OpenSession("s", 1, ""))
    bench.done(bench.run())


def test_a_payload_that_cannot_be_read_is_a_failure_of_the_runner_with_a_public_text() -> None:
    broken: Any = Payload(PayloadKind.HIDDEN, None)  # type: ignore[arg-type]
    bench = Bench(lambda: Odd(lambda: [{"y": broken}]))
    bench.done(OpenSession("s", 1, ""))
    report = bench.failed(bench.run())
    assert report.text == "stage 'p/toy' failed: AttributeError"
    assert "Traceback" in report.detail


class Cold(Odd):
    def warm_up(self) -> None:
        raise ValueError("no heat")


def raising(error: BaseException) -> Callable[[], Any]:
    def factory() -> Any:
        raise error

    return factory


@pytest.mark.parametrize(
    ("factory", "error"),
    [
        ("contxt", UnknownName),
        ("omni_loop.stage:Payload", ConfigError),  # wants an option
        ("omni_loop.errors:nearest_", ConfigError),
        (raising(KeyError("x")), StageFailed),
        (raising(CheckpointError("a corrupt checkpoint")), CheckpointError),
        (raising(SystemExit(1)), StageFailed),
        (dict, InvalidInput),
    ],
)
def test_stages_that_cannot_be_built_are_typed_errors(factory: Any, error: type[OmniLoopError]) -> None:
    with pytest.raises(OmniLoopError) as caught:
        build([(STAGE, factory, {})], LocalConnector(), RunnerSettings())
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("factory", "options", "says"),
    [
        ("act", {"checkpoints": 5}, "option 'checkpoints' of 'act' is 5"),
        (raising(KeyError("x")), {}, "cannot be built: KeyError"),
        (lambda: Cold(lambda: None), {}, "cannot warm up: ValueError: no heat"),
    ],
)
def test_the_stage_that_cannot_be_built_is_named(factory: Any, options: dict[str, Scalar], says: str) -> None:
    with pytest.raises(OmniLoopError) as caught:
        build([(STAGE, factory, options)], LocalConnector(), RunnerSettings())
    assert f"stage {STAGE!r}" in caught.value.text
    assert says in caught.value.text


def test_threads_and_device_are_the_runners() -> None:
    seen: dict[str, Any] = {}

    def factory(**options: Any) -> Odd:
        seen.update(options)
        return Odd(lambda: [{}])

    before = torch.get_num_threads()
    try:
        Runner([(STAGE, factory, {"gain": 2.0})], LocalConnector(), RunnerSettings(threads=2, device="meta"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == {"gain": 2.0, "device": "meta"}
