"""A session through its life: reset, predict, recondition, close, refusals, many at once."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from omni_loop.errors import (
    Exhausted,
    InvalidInput,
    OmniLoopError,
    Reason,
    ServerUnavailable,
    StageFailed,
    StateError,
    UnknownName,
    UnknownSession,
    Unsupported,
)
from omni_loop.loop.request import SessionInfo, TickRequest
from omni_loop.types import Op

from .toy import DIM, Gate, actions, fail_for, infer, predict, recondition, ticks, toy


async def test_reset_begins_a_new_epoch() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1, prompt="push")
        await t.core.tick(infer(info, 1, step=0))
        await t.core.tick(predict(info, 2, steps=3))
        assert await t.core.reset(info.id, info.token, seed=5) == 1
        with pytest.raises(StateError, match="stale"):
            await t.core.tick(predict(info, 2, steps=3))  # nothing of the old epoch is answered again
        result = await t.core.tick(infer(info, 3, step=0))
        assert actions(result) == [[7, 1], [0, 0], [1, 0], [0, 5]]
        assert result.epoch == 1
        frames = (await t.core.tick(predict(info, 4, steps=1))).frames
        assert frames is not None
        assert frames.frames[0, 0, 0].tolist() == [1, 0, 0]  # neither state nor feedback of the old epoch
        assert t.core.session(info.id, info.token).seed == 5


async def test_reset_waits_for_the_tick_before_it() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["context"] = gate
        tick = asyncio.create_task(t.core.tick(infer(info, 1)))
        await gate.reached()
        reset = asyncio.create_task(t.core.reset(info.id, info.token))
        await asyncio.sleep(0)
        gate.open()
        assert (await tick).epoch == 0
        assert await reset == 1


async def test_predict_continues_step_by_step_with_feedback() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        with pytest.raises(StateError, match="continues from an observation: infer or recondition first"):
            await t.core.tick(predict(info, 1, steps=2))
        await t.core.tick(infer(info, 1, step=10))
        first = (await t.core.tick(predict(info, 2, steps=2))).frames
        moves = np.full((3, DIM), 2, np.float32)
        t.script.before["frames"] = fail_for(info.id, RuntimeError())  # type: ignore[assignment]
        with pytest.raises(StageFailed):
            await t.core.tick(predict(info, 3, actions=moves))
        t.script.before.clear()
        second = (await t.core.tick(predict(info, 3, actions=moves))).frames  # the feedback outlived the failure
        assert first is not None
        assert second is not None
        assert (first.first_step, second.first_step) == (11, 13)
        assert first.frames[0, 0, 0].tolist() == [1, 0, 0]
        assert second.frames[0, 0, 0].tolist() == [2, 2, 12]


async def test_recondition_to_the_past_begins_an_epoch_at_its_commit() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        assert (await t.core.tick(recondition(info, 1, first=0, n=3, rows=2))).epoch == 0
        await t.core.tick(predict(info, 2, steps=4))  # now at step 6
        t.script.before["context"] = fail_for(info.id, RuntimeError())  # type: ignore[assignment]
        with pytest.raises(StageFailed):
            await t.core.tick(recondition(info, 3, first=3, n=2, rows=2))
        assert t.core.session(info.id, info.token).epoch == 0
        t.script.before.clear()
        result = await t.core.tick(recondition(info, 3, first=3, n=2, rows=2))
        assert result.epoch == 1
        assert result.progress is not None
        assert result.progress.step == 4
        frames = (await t.core.tick(predict(info, 4, steps=1))).frames
        assert frames is not None
        assert frames.first_step == 5
        assert frames.epoch == 1
        assert frames.frames[0, 0, 0, 1] == 0  # what was imagined before is not continued
        onward = await t.core.tick(recondition(info, 5, first=6, n=1, rows=1))
        assert onward.epoch == 1  # nothing was replaced
        with pytest.raises(StateError, match="frames from step 9 leave a gap: the session is at step 6"):
            await t.core.tick(recondition(info, 6, first=9, n=1, rows=1))
        with pytest.raises(InvalidInput, match="'executed' has 0 rows for 1 frames, expected 1: each"):
            await t.core.tick(recondition(info, 7, first=7, n=1, rows=0))


async def test_close_ends_what_is_in_flight() -> None:
    async with toy() as t:
        info, other = await t.core.open("toy"), await t.core.open("toy")
        gate = Gate()
        t.script.before["context"] = gate
        calls = [asyncio.create_task(t.core.tick(infer(info, seq))) for seq in (1, 2)]
        await gate.reached()
        closing = asyncio.create_task(t.core.close(info.id, info.token))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [getattr(o, "reason", None) for o in outcomes] == [Reason.CLOSED, Reason.CLOSED]
        gate.open()
        await closing
        for call in (t.core.tick(infer(info, 3)), t.core.close(info.id, info.token)):
            with pytest.raises(UnknownSession):
                await call
        assert await ticks(t, other, 1, 0) == (1, 1)


async def test_two_hundred_sessions_at_once_keep_their_own() -> None:
    async with toy(max_sessions=200) as t:
        infos = await asyncio.gather(*(t.core.open("toy", seed=n) for n in range(200)))

        async def episode(n: int, info: SessionInfo) -> None:
            for seq in (1, 2, 3):
                result = await t.core.tick(infer(info, seq, step=seq, mark=n, frames=seq == 2))
                assert actions(result)[0] == [n, seq]
                assert actions(result)[3] == [seq, n % 100]
                assert (result.frames is not None) == (seq == 2)

        await asyncio.gather(*(episode(n, info) for n, info in enumerate(infos)))
        with pytest.raises(Exhausted, match="all 200 sessions are taken") as caught:
            await t.core.open("toy")
        assert caught.value.reason is Reason.TOO_MANY_SESSIONS


REFUSED = [
    (lambda i: TickRequest(i.id, i.token, 1, Op.INFER), InvalidInput, "observation keys: missing mark"),
    (
        lambda i: TickRequest(i.id, i.token, 1, Op.INFER, arrays={"mrak": np.zeros(1), "mark": np.zeros(1)}),
        InvalidInput,
        r"observation keys: extra mrak \(this session sends mark\)",
    ),
    (lambda i: infer(i, 1, step=-1), InvalidInput, "step is -1"),
    (lambda i: infer(i, 1, frames=9), InvalidInput, "frames is 9; pipeline 'toy' predicts 1..8"),
    (lambda i: infer(i, 1, deadline_ms=-1), InvalidInput, "deadline_ms"),
    (lambda i: infer(i, 1, steps=2), InvalidInput, "infer takes no actions"),
    (lambda i: infer(i, 1, executed=np.ones((2, DIM), np.float32)), InvalidInput, "no observation came before: send 0"),
    (lambda i: infer(i, 1, executed=np.ones((2, 3), np.float32)), InvalidInput, r"shape \[2, 3\], expected \[n, 2\]"),
    (lambda i: predict(i, 1), InvalidInput, "predict of 0 steps; pipeline 'toy' predicts 1..8"),
    (lambda i: predict(i, 1, steps=9), InvalidInput, "predict of 9 steps"),
    (lambda i: predict(i, 1, actions=np.ones((2, 3), np.float32)), InvalidInput, r"expected \[n, 2\]"),
    (lambda i: predict(i, 1, frames=2, steps=1), InvalidInput, "frames are asked for besides an infer"),
    (lambda i: recondition(i, 1, first=0, n=0, rows=0), InvalidInput, "same number of frames"),
    (lambda i: recondition(i, 1, first=0, n=2, rows=2), InvalidInput, "expected 1: the first has no predecessor"),
]


@pytest.mark.parametrize(("request_of", "error", "text"), REFUSED)
async def test_what_does_not_fit_is_refused_and_changes_nothing(
    request_of: object, error: type[OmniLoopError], text: str
) -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        with pytest.raises(error, match=text):
            await t.core.tick(request_of(info))  # type: ignore[operator]
        assert t.script.runs == []
        assert await ticks(t, info, 1, 0) == (1, 1)


async def test_open_refuses_what_does_not_fit() -> None:
    async with toy() as t:
        with pytest.raises(UnknownName, match=r"no pipeline 'tyo' is served. Did you mean 'toy'"):
            await t.core.open("tyo")
        with pytest.raises(InvalidInput, match=r"no observation key 'extar'. Did you mean 'extra'"):
            await t.core.open("toy", observation_keys=("mark", "extar"))
        with pytest.raises(InvalidInput, match="needs the observation keys mark too"):
            await t.core.open("toy", observation_keys=("extra",))
        with pytest.raises(InvalidInput, match=r"no option 'sclae'. Did you mean 'scale'"):
            await t.core.open("toy", options={"sclae": 2.0})
        with pytest.raises(InvalidInput, match="option 'scale' is 'big', expected float"):
            await t.core.open("toy", options={"scale": "big"})
        with pytest.raises(InvalidInput, match="seed -1"):
            await t.core.open("toy", seed=-1)


async def test_session_options_and_given_state_reach_the_stages() -> None:
    async with toy() as t:
        seen: dict[str, object] = {}
        t.script.before["context"] = lambda item: seen.update(item.params)
        info = await t.core.open("toy", observation_keys=("extra", "mark"), options={"scale": "2.5"})
        assert info.observation_keys == ("mark", "extra")
        result = await t.core.tick(infer(info, 1))
        assert actions(result)[2] == [1, 1]
        assert seen == {"scale": 2.5, "mode": "plain", "state_given": True, "frames": 0, "first_step": 0}


async def test_stop_refuses_new_work_and_ends_what_is_left() -> None:
    async with toy() as t:
        info = await t.core.open("toy")
        gate = Gate()
        t.script.before["context"] = gate
        tick = asyncio.create_task(t.core.tick(infer(info, 1)))
        await gate.reached()
        stopping = asyncio.create_task(t.core.stop(grace_s=20))
        await asyncio.sleep(0)
        assert not t.core.ready
        with pytest.raises(ServerUnavailable) as caught:
            await t.core.open("toy")
        assert caught.value.reason is Reason.DRAINING
        gate.open()
        assert actions(await tick)[0] == [7, 1]  # within the grace
        await stopping


async def test_unsupported_operations_name_what_the_pipeline_can() -> None:

    from .toy import SPEC, TOY

    spec = replace(SPEC, ops=(Op.INFER,), prompt=False)
    lean = replace(TOY, spec=lambda: spec, plans={Op.INFER: replace(TOY.plans[Op.INFER], besides=(), frames=None)})
    async with toy(lean) as t:
        info = await t.core.open("toy")
        with pytest.raises(Unsupported, match="pipeline 'toy' cannot predict; it can infer"):
            await t.core.tick(predict(info, 1, steps=1))
        with pytest.raises(Unsupported, match="predicts no frames besides a chunk"):
            await t.core.tick(infer(info, 1, frames=1))
        with pytest.raises(Unsupported, match="reads no prompt"):
            await t.core.open("toy", prompt="push")
