"""One tick and its neighbours: answers, failures, repeats, deadlines, cancellation."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from omni_loop.errors import (
    DeadlineExceeded,
    Exhausted,
    InvalidInput,
    Reason,
    StageFailed,
    StateError,
)
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.types import MAX_COUNT, TickResult
from omni_loop.wire import codec

from . import toy as toys
from .toy import DIM, HORIZON, Gate, Script, ToyStage, actions, fail_for, infer, predict, recondition, ticks, toy


async def test_an_observation_becomes_a_chunk() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=42)
        result = await t.core.tick(infer(info, 1, step=3, mark=9))
        assert (result.seq, result.epoch) == (1, 0)
        assert actions(result) == [[9, 1], [0, 0], [1, 0], [3, 42]]
        assert result.chunk is not None
        assert (result.chunk.first_step, result.chunk.policy_revision) == (3, "toy-1")
        assert result.progress is not None
        assert (result.progress.step, result.progress.progress, result.progress.done) == (3, 0.25, 0.5)
        assert result.frames is None
        assert set(result.timings.stages_ms) == {"context", "act"}
        assert result.timings.total_ms >= result.timings.model_ms > 0
        assert result.chunk.timings == result.timings
        assert t.script.count("frames") == 0  # nobody asked


@pytest.mark.parametrize("placement", [(("context", "act", "frames"),), (("act",), ("frames", "context"))])
async def test_a_chunks_revision_is_of_every_stage(
    monkeypatch: pytest.MonkeyPatch, placement: Sequence[Sequence[str]]
) -> None:
    """A context or a world model that was trained anew under the same act head is another policy."""

    factory = toys._factory

    async def revision(**other: str) -> str:
        def made(name: str, script: Script) -> Callable[..., ToyStage]:
            stage = factory(name, script)
            return lambda **options: replace(stage(**options), revision=other.get(name, "toy-1"))

        monkeypatch.setattr(toys, "_factory", made)
        async with toy(placement=placement) as t:
            info = await t.core.open("toy")
            chunk = (await t.core.tick(infer(info, 1))).chunk
            assert chunk is not None
            return chunk.policy_revision

    first = await revision()
    assert first == "toy-1", "what is the same everywhere is said as it is"
    others = [
        await revision(context="toy-2"),
        await revision(frames="toy-2"),
        await revision(context="toy-2", frames="toy-2"),
        await revision(context="toy-3"),
    ]
    assert len({first, *others}) == 5
    assert all(re.fullmatch(r"toy-1\+[0-9a-f]{8}", one) for one in others)
    assert await revision(context="toy-2") == others[0]


async def test_executed_actions_come_from_the_last_chunk_or_from_the_client() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        first = await t.core.tick(infer(info, 1, step=0))
        assert first.chunk is not None
        taken = first.chunk.actions[:2].sum()
        assert actions(await t.core.tick(infer(info, 2, step=2)))[1] == [2, taken]
        sent = np.full((6, DIM), 0.5, np.float32)
        assert actions(await t.core.tick(infer(info, 3, step=8, executed=sent)))[1] == [6, 6.0]
        with pytest.raises(InvalidInput, match="send 'executed': the last chunk does not cover steps 8 to 13"):
            await t.core.tick(infer(info, 4, step=8 + HORIZON + 1))
        with pytest.raises(InvalidInput, match="'executed' has 6 rows, but step 9 follows step 8: send 1"):
            await t.core.tick(infer(info, 5, step=9, executed=sent))
        with pytest.raises(StateError, match="step 7 is before the session's last observation, step 8"):
            await t.core.tick(infer(info, 6, step=7))


async def test_a_failing_stage_ends_its_tick_only() -> None:
    async with toy() as t:
        good, bad = await t.core.open("toy"), await t.core.open("toy")
        assert await ticks(t, bad, 1, 0) == (1, 1)
        t.script.before["act"] = fail_for(bad.id, ValueError("of /secret/path"))  # type: ignore[assignment]
        outcomes = await asyncio.gather(
            t.core.tick(infer(bad, 2, 1)), t.core.tick(infer(good, 1, 0)), return_exceptions=True
        )
        assert isinstance(outcomes[0], StageFailed)
        assert "secret" not in outcomes[0].text
        assert isinstance(outcomes[1], TickResult)
        assert t.script.count("context") == 3  # the failed tick's context had run, and was undone
        t.script.before.clear()
        assert await ticks(t, bad, 2, 1) == (2, 2)  # the same seq again: state as before the failure
        assert await ticks(t, good, 2, 1) == (2, 2)


async def test_a_typed_error_of_a_stage_reaches_the_caller_as_it_is() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        t.script.before["context"] = fail_for(info.id, Exhausted("no blocks left"))  # type: ignore[assignment]
        with pytest.raises(Exhausted, match="no blocks left") as caught:
            await t.core.tick(infer(info, 1))
        assert (caught.value.reason, caught.value.retryable) == (Reason.OUT_OF_BLOCKS, True)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros((HORIZON, DIM), np.float64), "float64"),
        (np.zeros((HORIZON + 1, DIM), np.float32), "expected float32"),
        (np.full((HORIZON, DIM), 1000.5, np.float32), "above the spec's 1000"),
        (np.full((HORIZON, DIM), -1000.5, np.float32), "below the spec's -1000"),
        (np.full((HORIZON, DIM), np.nan, np.float32), "not finite"),
    ],
)
async def test_output_that_is_not_as_the_spec_says_is_undone(array: np.ndarray, text: str) -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        t.script.change["act"] = lambda outputs: {"actions": Payload(PayloadKind.ACTIONS, {"actions": array})}
        with pytest.raises(StageFailed, match=text) as caught:
            await t.core.tick(infer(info, 1))
        assert caught.value.reason is Reason.BAD_OUTPUT
        t.script.change.clear()
        assert await ticks(t, info, 1, 0) == (1, 1)


@pytest.mark.parametrize(
    ("stage", "output", "meta"),
    [
        ("act", "actions", {"revision": "\ud800"}),
        ("context", "progress", {"step": 1 << 63}),
        ("context", "progress", {"step": -1}),
    ],
)
async def test_what_could_not_be_encoded_is_not_committed(stage: str, output: str, meta: dict[str, str | int]) -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        t.script.change[stage] = lambda outputs: {**outputs, output: replace(outputs[output], meta=meta)}
        with pytest.raises(StageFailed) as caught:
            await t.core.tick(infer(info, 1))
        assert caught.value.reason is Reason.BAD_OUTPUT
        t.script.change.clear()
        assert await ticks(t, info, 1, 0) == (1, 1)


async def test_steps_and_seqs_end_where_an_answer_can_still_be_encoded() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        for request in (infer(info, 1, step=MAX_COUNT + 1), recondition(info, 1, MAX_COUNT + 1, 2, 1)):
            with pytest.raises(InvalidInput, match=f"step is {MAX_COUNT + 1}; it must be at most {MAX_COUNT}"):
                await t.core.tick(request)
        with pytest.raises(InvalidInput, match=f"seq is {MAX_COUNT + 1}; it must be at most {MAX_COUNT}"):
            await t.core.tick(infer(info, MAX_COUNT + 1))
        still = Payload(PayloadKind.ACTIONS, {"actions": np.zeros((HORIZON, DIM), np.float32)})
        t.script.change["act"] = lambda outputs: {"actions": still}  # the toy's own hold the step
        seq = MAX_COUNT - 2
        for request in (
            infer(info, seq, step=MAX_COUNT, frames=8),
            predict(info, seq + 1, steps=8),
            recondition(info, seq + 2, MAX_COUNT, 2, 1),
        ):
            reply = codec.encode_result(await t.core.tick(request))
            assert reply.seq == request.seq


async def test_a_missing_output_names_those_that_came() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        t.script.change["context"] = lambda outputs: {"hiden": outputs["hidden"], "progress": outputs["progress"]}
        with pytest.raises(StageFailed, match=r"'context' gave no output 'hidden'. Did you mean 'hiden'"):
            await t.core.tick(infer(info, 1))


async def test_the_answer_leaves_before_the_frames() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate, early = Gate(), asyncio.Event()
        parts: list[TickResult] = []
        t.script.before["frames"] = gate

        def on_part(part: TickResult) -> None:
            parts.append(part)
            early.set()

        tick = asyncio.create_task(t.core.tick(infer(info, 1, step=5, frames=3), on_part))
        await early.wait()
        assert not tick.done()  # the frames are behind the gate
        assert actions(parts[0])[0] == [7, 1]
        gate.open()
        result = await tick
        assert result.frames is not None
        assert (result.frames.first_step, result.frames.frames.shape) == (6, (3, 4, 4, 3))
        assert len(parts) == 1
        assert result.timings.total_ms > parts[0].timings.total_ms


async def test_frames_that_fail_lose_only_themselves() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        t.script.before["frames"] = fail_for(info.id, RuntimeError())  # type: ignore[assignment]
        result = await t.core.tick(infer(info, 1, frames=2))
        assert result.frames is None
        assert isinstance(result.frames_error, StageFailed)
        assert actions(result)[0] == [7, 1]
        assert await t.core.tick(infer(info, 1, frames=2)) is result  # the seq is answered
        t.script.before.clear()
        result = await t.core.tick(infer(info, 2, step=1, frames=2))
        assert actions(result)[0] == [7, 2]  # the first answer was committed
        assert result.frames is not None
        assert result.frames.frames[0, 0, 0].tolist() == [1, 0, 0]  # the first frames left no trace


async def test_a_repeated_seq_is_computed_once() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["act"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, 1))) for _ in range(3)]
        await gate.reached()
        gate.open()
        results = await asyncio.gather(*calls)
        assert results[0] is results[1] is results[2]
        assert await t.core.tick(infer(info, 1)) is results[0]
        assert t.script.count("context") == 1
        await t.core.tick(infer(info, 5, step=1))  # gaps are allowed
        assert await t.core.tick(infer(info, 1)) is results[0]  # still, and from no computation
        for stale in (2, 4):
            with pytest.raises(StateError, match=f"seq {stale} is stale: the session is at seq 5") as caught:
                await t.core.tick(infer(info, stale, step=1))
            assert caught.value.reason is Reason.STALE_SEQ
        with pytest.raises(InvalidInput, match="seq is 0"):
            await t.core.tick(infer(info, 0))
        assert t.core.last_seq(info.id, info.token) == 5


async def test_ticks_of_a_session_run_in_order_and_their_number_is_bounded() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["context"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, seq, step=seq))) for seq in (1, 2, 3, 4, 5)]
        await gate.reached()
        with pytest.raises(Exhausted, match="5 ticks of this session wait") as caught:
            await t.core.tick(infer(info, 6, step=6))
        assert caught.value.reason is Reason.BUSY
        gate.open()
        results = await asyncio.gather(*calls)
        assert [actions(r)[0][1] for r in results] == [1, 2, 3, 4, 5]
        assert await ticks(t, info, 6, 6) == (6, 6)  # the refused seq was not used up


async def test_a_deadline_ends_the_running_tick_and_undoes_it() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["act"] = gate
        with pytest.raises(DeadlineExceeded, match="20 ms") as caught:
            await t.core.tick(infer(info, 1, deadline_ms=20))
        assert caught.value.retryable
        again = asyncio.create_task(t.core.tick(infer(info, 1)))  # before the old one is undone
        await asyncio.sleep(0)
        gate.open()
        assert actions(await again)[0] == [7, 1]


async def test_a_deadline_is_honoured_while_waiting_for_the_turn() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["context"] = gate
        first = asyncio.create_task(t.core.tick(infer(info, 1)))
        await gate.reached()
        with pytest.raises(DeadlineExceeded):
            await t.core.tick(infer(info, 2, step=1, deadline_ms=5))
        gate.open()
        await first
        assert t.script.count("context") == 1  # expired work never ran
        assert await ticks(t, info, 2, 1) == (2, 2)


async def test_a_caller_that_leaves_during_the_frames_has_its_answer_kept() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["frames"] = gate
        call = asyncio.create_task(t.core.tick(infer(info, 1, frames=1)))
        await gate.reached()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        again = asyncio.create_task(t.core.tick(infer(info, 1, frames=1)))
        await asyncio.sleep(0)
        gate.open()
        result = await again
        assert actions(result)[0] == [7, 1]
        assert result.frames is None
        assert result.frames_error is not None
        assert result.frames_error.reason is Reason.CANCELLED
        assert t.script.count("context") == 1  # committed once
        assert await ticks(t, info, 2, 1) == (2, 2)


async def test_cancelling_the_last_caller_undoes_the_tick() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["act"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, 1))) for _ in range(2)]
        await gate.reached()
        calls[0].cancel()
        await asyncio.sleep(0)
        assert not calls[1].done()  # one caller still waits
        calls[1].cancel()
        assert all(isinstance(o, asyncio.CancelledError) for o in await asyncio.gather(*calls, return_exceptions=True))
        gate.open()
        assert await ticks(t, info, 1, 0) == (1, 1)
        assert t.script.count("context") == 2


async def test_one_cancelled_caller_does_not_take_the_result_from_the_other() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["act"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, 1))) for _ in range(2)]
        await gate.reached()
        calls[0].cancel()
        gate.open()
        assert actions(await calls[1])[0] == [7, 1]
        assert t.script.count("context") == 1
