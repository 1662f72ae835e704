"""``executed_through``: frozen rows are those that were sent; the label says how the rest joins them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from omni_loop.action_queue import FROZEN, INPAINTED, JOINED, JOINS
from omni_loop.errors import InvalidInput, Reason, StageFailed
from omni_loop.stage import Outputs, Payload
from omni_loop.types import ActionChunk, TickResult

from .toy import HORIZON, infer, predict, recondition, toy


def chunk(result: TickResult) -> ActionChunk:
    assert result.chunk is not None
    return result.chunk


def label(how: str) -> dict[str, object]:
    def change(outputs: dict[str, Payload]) -> Outputs:
        made = outputs["actions"]
        return {"actions": replace(made, meta={**made.meta, JOINED: how})}

    return {"act": change}


async def test_a_policy_that_cannot_be_guided_overlaps() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        first = chunk(await t.core.tick(infer(info, 1, step=0)))
        second = chunk(await t.core.tick(infer(info, 2, step=1, executed_through=2)))
        assert (second.frozen, second.joined, second.first_step) == (2, "overlap", 1)
        assert (second.actions[:2] == first.actions[1:3]).all()
        plain = await t.core.open("toy", seed=1)
        await t.core.tick(infer(plain, 1, step=0))
        afresh = chunk(await t.core.tick(infer(plain, 2, step=1)))
        assert (afresh.frozen, afresh.joined) == (0, "")
        assert (second.actions[2:] == afresh.actions[2:]).all()
        assert (second.actions[:2] != afresh.actions[:2]).any()


async def test_the_third_chunk_repeats_the_second_as_it_was_sent() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        await t.core.tick(infer(info, 1, step=0))
        second = chunk(await t.core.tick(infer(info, 2, step=1, executed_through=2)))
        third = chunk(await t.core.tick(infer(info, 3, step=2, executed_through=3)))
        assert (third.actions[:2] == second.actions[1:3]).all()


async def test_a_policy_says_itself_that_it_was_guided() -> None:
    async with toy() as t:
        t.script.change |= label(INPAINTED)  # type: ignore[arg-type]
        info = await t.core.open("toy", seed=1)
        first = chunk(await t.core.tick(infer(info, 1, step=0)))
        assert (first.frozen, first.joined) == (0, "")  # nobody asked
        second = chunk(await t.core.tick(infer(info, 2, step=1, executed_through=1)))
        assert (second.frozen, second.joined) == (1, INPAINTED)
        assert (second.actions[0] == first.actions[1]).all()
        none = chunk(await t.core.tick(infer(info, 3, step=2, executed_through=1)))
        assert (none.frozen, none.joined) == (0, INPAINTED)


async def test_a_label_that_means_nothing_is_a_bad_output() -> None:
    async with toy() as t:
        t.script.change |= label("perhaps")  # type: ignore[arg-type]
        info = await t.core.open("toy", seed=1)
        await t.core.tick(infer(info, 1, step=0))
        with pytest.raises(StageFailed, match="'perhaps'") as failed:
            await t.core.tick(infer(info, 2, step=1, executed_through=1))
        assert failed.value.reason is Reason.BAD_OUTPUT
        t.script.change.clear()
        assert chunk(await t.core.tick(infer(info, 3, step=1))).joined == ""  # and the session goes on


async def test_more_than_is_left_freezes_what_is_left() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        first = chunk(await t.core.tick(infer(info, 1, step=0)))
        second = chunk(await t.core.tick(infer(info, 2, step=3, executed_through=900)))
        assert second.frozen == HORIZON - 3
        assert (second.actions[:1] == first.actions[3:]).all()


async def test_nothing_to_join_is_a_chunk_made_afresh() -> None:
    """The first chunk, one whose predecessor is over, and the first of an epoch."""
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        executed = np.zeros((HORIZON, 2), np.float32)
        first = chunk(await t.core.tick(infer(info, 1, step=0, executed_through=2)))
        later = chunk(await t.core.tick(infer(info, 2, step=HORIZON, executed_through=HORIZON + 1, executed=executed)))
        await t.core.reset(info.id, info.token)
        anew = chunk(await t.core.tick(infer(info, 3, step=0, executed_through=2)))
        assert [(c.frozen, c.joined) for c in (first, later, anew)] == [(0, "")] * 3


async def test_a_step_that_was_executed_before_the_observation_is_refused() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        await t.core.tick(infer(info, 1, step=0))
        with pytest.raises(InvalidInput, match="executed_through is 0; it must be at least 1"):
            await t.core.tick(infer(info, 2, step=2, executed_through=0))


async def test_forks_and_rewinds_join_the_chunk_they_stand_at() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        first = chunk(await t.core.tick(infer(info, 1, step=0)))
        child = await t.core.fork(info.id, info.token)
        await t.core.tick(infer(info, 2, step=1, mark=50))
        forked = chunk(await t.core.tick(infer(child, 2, step=1, executed_through=2)))
        assert (forked.actions[:2] == first.actions[1:3]).all()
        await t.core.rewind(info.id, info.token, 0)
        again = chunk(await t.core.tick(infer(info, 3, step=1, executed_through=2)))
        assert (again.actions[:2] == first.actions[1:3]).all()


async def test_an_imagined_chunk_is_not_joined_and_a_rewritten_past_leaves_none() -> None:
    async with toy() as t:
        info = await t.core.open("toy", seed=1)
        first = chunk(await t.core.tick(infer(info, 1, step=0)))
        await t.core.tick(predict(info, 2, steps=2))
        second = chunk(await t.core.tick(infer(info, 3, step=1, executed_through=1)))
        assert (second.actions[0] == first.actions[1]).all()
        await t.core.tick(recondition(info, 4, 0, 2, 1))
        assert chunk(await t.core.tick(infer(info, 5, step=1, executed_through=2))).frozen == 0


async def test_stages_are_told_only_when_it_is_asked_for() -> None:
    async with toy() as t:
        told: list[dict[str, object]] = []
        t.script.before["act"] = lambda item: told.append({k: item.params.get(k) for k in (FROZEN, JOINS)})
        info = await t.core.open("toy", seed=1)
        await t.core.tick(infer(info, 1, step=0, executed_through=1))
        await t.core.tick(infer(info, 2, step=1))
        await t.core.tick(infer(info, 3, step=2, executed_through=4))
        assert told == [{FROZEN: None, JOINS: None}] * 2 + [{FROZEN: 3, JOINS: 1}]
