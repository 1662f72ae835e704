"""``pusht-imagine`` end to end over gRPC: one real observation, and from there the policy lives in its world model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_loop.client import Client, Session
from omni_loop.errors import InvalidInput, OmniLoopError, StateError, Unsupported
from omni_loop.types import TickResult

pytestmark = pytest.mark.timeout(300)

IMAGE, STATE = ("image", "agent_pos"), ("image", "agent_pos", "block_pose")
Seen = dict[str, Any]


def pick(seen: Seen, keys: tuple[str, ...] = IMAGE) -> Seen:
    return {key: seen[key] for key in keys}


def as_run(seen: list[Seen]) -> Seen:
    return {key: np.stack([s[key] for s in seen]) for key in IMAGE}


def check(result: TickResult, session: Session, step: int, n: int) -> None:
    """The tick looked at ``step`` and imagined the ``n`` steps after it."""
    assert result.epoch == session.epoch
    assert result.chunk is not None
    assert result.chunk.first_step == step
    assert result.chunk.actions.shape == (16, 2)
    assert 0 <= result.chunk.actions.min() <= result.chunk.actions.max() <= 512
    assert result.progress is not None
    assert result.progress.step == step
    assert 0 <= result.progress.progress <= 1
    assert 0 <= result.progress.done <= 1
    assert result.frames is not None
    assert result.frames.first_step == step + 1
    assert result.frames.frames.shape == (n, 96, 96, 3)
    assert result.frames.scene is not None
    assert result.frames.scene.shape == (n, 9, 2)


@pytest.mark.parametrize("keys", [IMAGE, STATE])
def test_a_hundred_steps_without_a_simulator(client: Client, episode: list[Seen], keys: tuple[str, ...]) -> None:
    with client.open("pusht-imagine", prompt="push the T onto the goal", seed=3, keys=keys) as session:
        check(session.infer(pick(episode[0], keys), 0), session, 0, 8)  # unless told: the steps a robot would execute
        for step in range(8, 104, 8):
            check(session.predict(steps=8), session, step, 8)


def test_ticks_of_any_length_follow_each_other(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht-imagine", seed=3) as session:
        step = 0
        check(session.infer(pick(episode[0]), 0, frames=3), session, 0, 3)
        step = 3
        for n in (1, 2, 8, 1):
            check(session.predict(steps=n), session, step, n)
            step += n


def test_the_same_seed_dreams_the_same_dream(client: Client, episode: list[Seen]) -> None:
    dreams = []
    for seed in (3, 3, 4):
        with client.open("pusht-imagine", seed=seed) as session:
            results = [session.infer(pick(episode[0]), 0), *(session.predict(steps=8) for _ in range(2))]
            dreams.append(np.concatenate([r.frames.frames for r in results if r.frames is not None]))
    assert (dreams[0] == dreams[1]).all()
    assert (dreams[0] != dreams[2]).any()


def test_a_real_observation_wakes_it_up(client: Client, episode: list[Seen]) -> None:
    """An Infer after imagined steps sees the real ones alone: no imagined tick stays in the context."""
    with client.open("pusht-imagine", seed=3) as dreamer, client.open("pusht-imagine", seed=3) as awake:
        executed = np.stack([seen["action"] for seen in episode[:16]])
        for session in (dreamer, awake):
            check(session.infer(pick(episode[0]), 0), session, 0, 8)
        check(dreamer.predict(steps=8), dreamer, 8, 8)
        results = [s.infer(pick(episode[16]), 16, executed=executed) for s in (dreamer, awake)]
        for session, result in zip((dreamer, awake), results, strict=True):
            check(result, session, 16, 8)
        assert results[0].progress is not None
        assert results[1].progress is not None
        assert abs(results[0].progress.progress - results[1].progress.progress) <= 1e-5
        check(dreamer.predict(steps=4), dreamer, 24, 4)


def test_wrong_inputs_are_named_and_the_session_goes_on(client: Client, episode: list[Seen]) -> None:
    wrong: dict[str, tuple[type[OmniLoopError], str, Any]] = {
        "actions": (InvalidInput, "steps", lambda s: s.predict(np.zeros((2, 2), np.float32))),
        "none": (InvalidInput, "0 steps", lambda s: s.predict()),
        "too many": (InvalidInput, "9", lambda s: s.predict(steps=9)),
        "frames": (InvalidInput, "9", lambda s: s.infer(pick(episode[8]), 8, frames=9)),
        "recondition": (Unsupported, "infer, predict", lambda s: s.recondition(as_run(episode[:1]))),
        "key": (InvalidInput, "agent_pos", lambda s: s.infer({"image": episode[8]["image"]}, 8)),
    }
    with client.open("pusht-imagine", seed=3) as session, client.open("pusht-imagine", seed=3) as undisturbed:
        with pytest.raises(StateError, match="observation"):
            session.predict(steps=2)
        for s in (session, undisturbed):
            s.infer(pick(episode[0]), 0)
        for name, (error, named, call) in wrong.items():
            with pytest.raises(error, match=named):
                pytest.fail(f"accepted: {name} {call(session)}")
        results = [s.predict(steps=3) for s in (session, undisturbed)]
        check(results[0], session, 8, 3)
        frames = [r.frames.frames for r in results if r.frames is not None]
        assert (frames[0] == frames[1]).all()
