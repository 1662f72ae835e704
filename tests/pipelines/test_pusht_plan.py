"""``pusht-plan`` and plans of ``pusht-world`` end to end over gRPC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_loop.client import Client
from omni_loop.errors import InvalidInput, StateError, Unsupported
from omni_loop.types import Op

pytestmark = pytest.mark.timeout(300)

IMAGE = ("image", "agent_pos")
Seen = dict[str, Any]


def pick(seen: Seen) -> Seen:
    return {key: seen[key] for key in IMAGE}


def test_one_of_several_chunks_is_chosen(client: Client, episode: list[Seen]) -> None:
    with (
        client.open("pusht-plan", seed=3, options={"samples": 6}) as planned,
        client.open("pusht-plan", seed=3, options={"samples": 6}) as watched,
    ):
        for step in (0, 8, 16):
            a, b = planned.infer(pick(episode[step]), step), watched.infer(pick(episode[step]), step, frames=5)
            assert a.chunk is not None
            assert b.chunk is not None
            assert a.chunk.actions.shape == (16, 2)
            assert a.chunk.first_step == step
            assert 0 <= a.chunk.actions.min() <= a.chunk.actions.max() <= 512
            assert a.chunk.policy_revision
            assert (a.chunk.actions == b.chunk.actions).all()
            assert a.progress == b.progress
            assert a.frames is None
            assert set(a.timings.stages_ms) == {"context", "act", "frames", "choose"}
            assert b.frames_error is None
            assert b.frames is not None
            assert b.frames.first_step == step + 1
            assert b.frames.frames.shape == (5, 96, 96, 3)


def test_with_one_sample_it_is_the_policy(client: Client, episode: list[Seen]) -> None:
    with (
        client.open("pusht-plan", seed=3, options={"samples": 1}) as planned,
        client.open("pusht-plan", seed=3, options={"samples": 12}) as many,
        client.open("pusht", seed=3) as plain,
    ):
        differ = []
        for step in (0, 8, 16):
            executed = None if step == 0 else np.full((8, 2), 200, np.float32)
            one, several, own = (s.infer(pick(episode[step]), step, executed=executed) for s in (planned, many, plain))
            assert one.chunk is not None
            assert several.chunk is not None
            assert own.chunk is not None
            assert (one.chunk.actions == own.chunk.actions).all()
            assert one.progress == own.progress
            differ.append((several.chunk.actions != own.chunk.actions).any())
        assert any(differ)


@pytest.mark.parametrize("samples", [0, 65])
def test_samples_are_bounded(client: Client, episode: list[Seen], samples: int) -> None:
    with (
        client.open("pusht-plan", options={"samples": samples}) as session,
        pytest.raises(InvalidInput, match=f"samples is {samples}"),
    ):
        session.infer(pick(episode[0]), 0)


def test_more_frames_than_were_imagined_are_refused(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht-plan") as session, pytest.raises(InvalidInput, match="9"):
        session.infer(pick(episode[0]), 0, frames=9)


def test_the_world_plans_and_stays_as_it_is(client: Client, episode: list[Seen]) -> None:
    images = np.stack([seen["image"] for seen in episode[:6]])
    executed = np.stack([seen["action"] for seen in episode[:5]])
    ahead = np.stack([seen["action"] for seen in episode[5:8]])
    with client.open("pusht-world", seed=3) as planned, client.open("pusht-world", seed=3) as plain:
        for session in (planned, plain):
            session.recondition({"image": images}, executed=executed)
        goal = episode[10]["image"]
        found = planned.plan(horizon=5, candidates=6, iterations=2, goal=goal)
        assert found.plan is not None
        assert (found.plan.candidates, found.plan.iterations, found.plan.horizon) == (6, 2, 5)
        assert found.plan.cost <= found.plan.first_cost
        assert not found.plan.out_of_time
        assert found.chunk is not None
        assert found.chunk.actions.shape == (5, 2)
        assert found.chunk.first_step == 5
        assert found.frames is not None
        assert found.frames.first_step == 6
        assert found.frames.frames.shape == (5, 96, 96, 3)
        progress = planned.plan(horizon=2, candidates=4, iterations=1, method="mppi")
        assert progress.plan is not None
        assert 0 <= progress.plan.cost <= 1
        begun = planned.plan(horizon=3, candidates=4, iterations=1, goal=goal, init=ahead)
        assert begun.plan is not None
        assert begun.plan.horizon == 3
        # The plans have taken seqs, and with those their noise; nothing else.
        for _ in range(3):
            plain.plan(horizon=1, candidates=4, iterations=1, goal=goal)
        a, b = planned.predict(ahead), plain.predict(ahead)
        assert a.frames is not None
        assert b.frames is not None
        assert a.frames.first_step == b.frames.first_step == 6
        assert (a.frames.frames == b.frames.frames).all()


def test_a_budget_is_kept_and_said(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht-world", seed=3) as session:
        session.recondition({"image": episode[0]["image"][None]})
        found = session.plan(horizon=2, candidates=4, iterations=60, goal=episode[4]["image"], budget_ms=1)
        assert found.plan is not None
        assert found.plan.iterations == 1
        assert found.plan.out_of_time


def test_what_cannot_be_planned_is_said(client: Client, episode: list[Seen]) -> None:
    assert set(client.info().pipelines["pusht-plan"].ops) == {Op.INFER}
    with client.open("pusht-world", seed=3) as session:
        with pytest.raises(StateError, match="recondition first"):
            session.plan(goal=episode[0]["image"])
        session.recondition({"image": episode[0]["image"][None]})
        with pytest.raises(InvalidInput, match="horizon is 17"):
            session.plan(horizon=17, goal=episode[0]["image"])
        with pytest.raises(InvalidInput, match="candidates is 2"):
            session.plan(candidates=2, goal=episode[0]["image"])
    with client.open("pusht") as session, pytest.raises(Unsupported, match="plan"):
        session.plan(goal=episode[0]["image"])
