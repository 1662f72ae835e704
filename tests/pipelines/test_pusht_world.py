"""``pusht-world`` end to end over gRPC: real frames and executed actions in, predicted frames out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_loop.client import Client, Session
from omni_loop.errors import InvalidInput, OmniLoopError, StateError, TensorError, Unsupported
from omni_loop.types import Op, TickResult

pytestmark = pytest.mark.timeout(300)

Seen = dict[str, Any]
Frames = np.ndarray[Any, np.dtype[np.uint8]]


def images(episode: list[Seen], first: int, n: int) -> dict[str, Frames]:
    return {"image": np.stack([seen["image"] for seen in episode[first : first + n]])}


def actions(episode: list[Seen], first: int, n: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.stack([seen["action"] for seen in episode[first : first + n]])


def observe(session: Session, episode: list[Seen], first: int, n: int, fresh: bool = False) -> TickResult:
    lead = actions(episode, first, n - 1) if fresh and n > 1 else None
    if not fresh:
        lead = actions(episode, first - 1, n)
    return session.recondition(images(episode, first, n), executed=lead, first_step=first)


def frames(result: TickResult, first: int, n: int) -> Frames:
    assert result.frames is not None
    assert result.frames.first_step == first
    assert result.frames.seq == result.seq
    assert result.frames.frames.dtype == np.uint8
    assert result.frames.frames.shape == (n, 96, 96, 3)
    assert result.frames.scene is not None
    assert result.frames.scene.shape == (n, 9, 2)
    assert np.isfinite(result.frames.scene).all()
    assert result.chunk is None
    return result.frames.frames


def test_observe_predict_recondition_predict(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht-world", seed=3) as session:
        seen = observe(session, episode, 0, 3, fresh=True)
        assert (seen.seq, seen.frames, seen.chunk, seen.progress) == (1, None, None, None)
        frames(session.predict(actions(episode, 2, 4)), 3, 4)
        frames(session.predict(actions(episode, 6, 1)), 7, 1)
        assert session.epoch == seen.epoch
        after = observe(session, episode, 3, 4)
        assert session.epoch == after.epoch == seen.epoch + 1  # imagined steps were replaced
        frames(session.predict(actions(episode, 6, 16)), 7, 16)
        frames(session.predict(actions(episode, 22, 8)), 23, 8)


def test_a_prediction_that_was_replaced_leaves_no_trace(client: Client, episode: list[Seen]) -> None:
    """After 16 imagined frames the real ones take their place: what follows is what a straight history gives.
    Noise is a function of (seed, epoch, tick), so the straight session comes by the same."""
    with client.open("pusht-world", seed=3) as dreamer, client.open("pusht-world", seed=3) as straight:
        for session in (dreamer, straight):
            observe(session, episode, 0, 8, fresh=True)
        dreamer.predict(actions(episode, 7, 16))
        observe(dreamer, episode, 8, 4)
        observe(straight, episode, 8, 2)
        observe(straight, episode, 8, 4)
        assert dreamer.epoch == straight.epoch
        got, want = (frames(s.predict(actions(episode, 11, 3)), 12, 3) for s in (dreamer, straight))
        assert np.abs(got.astype(int) - want).max() <= 1
        assert (want[0] != want[1]).any()


def test_actions_steer_the_next_frame_and_none_before(client: Client, episode: list[Seen]) -> None:
    made = {}
    for name, at in {"plain": None, "last of first": 3, "first of second": 4}.items():
        given = actions(episode, 2, 8)
        if at is not None:
            given[at] = 512 - given[at]
        with client.open("pusht-world", seed=3) as session:
            observe(session, episode, 0, 3, fresh=True)
            first = frames(session.predict(given[:4]), 3, 4)
            made[name] = np.concatenate([first, frames(session.predict(given[4:]), 7, 4)])
    for name, at in {"last of first": 3, "first of second": 4}.items():
        assert (made[name][:at] == made["plain"][:at]).all()
        assert (made[name][at] != made["plain"][at]).any()


@pytest.mark.usefixtures("trained")
def test_the_agent_moves_in_the_frame_its_action_leads_to(client: Client, episode: list[Seen]) -> None:
    """An impulse to the far side, in the last action of the first call or in the first of the second."""
    agents = {}
    for name, at in {"plain": None, "last of first": 3, "first of second": 4}.items():
        given = actions(episode, 2, 8)
        if at is not None:
            given[at] = 512 - given[at]
        with client.open("pusht-world", seed=3) as session:
            observe(session, episode, 0, 3, fresh=True)
            results = [session.predict(given[:4]), session.predict(given[4:])]
        agents[name] = np.concatenate(
            [r.frames.scene[:, 0] for r in results if r.frames and r.frames.scene is not None]
        )
    for name, at in {"last of first": 3, "first of second": 4}.items():
        apart = np.linalg.norm(agents[name] - agents["plain"], axis=1)
        assert (apart[:at] == 0).all()
        assert apart[at] > 4  # px of the table: further than the readout errs


def test_a_session_may_begin_at_a_later_step(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht-world", seed=3) as session:
        observe(session, episode, 10, 2, fresh=True)
        frames(session.predict(actions(episode, 11, 2)), 12, 2)
        observe(session, episode, 12, 1)
        frames(session.predict(actions(episode, 12, 2)), 13, 2)


def test_other_seeds_imagine_other_frames(client: Client, episode: list[Seen]) -> None:
    made = []
    for seed in (3, 3, 4):
        with client.open("pusht-world", seed=seed) as session:
            observe(session, episode, 0, 2, fresh=True)
            made.append(frames(session.predict(actions(episode, 1, 3)), 2, 3))
    assert (made[0] == made[1]).all()
    assert (made[0] != made[2]).any()


def test_wrong_inputs_are_named_and_the_session_goes_on(client: Client, episode: list[Seen]) -> None:
    assert set(client.info().pipelines["pusht-world"].ops) == {Op.RECONDITION, Op.PREDICT, Op.PLAN}
    with pytest.raises(Unsupported, match="prompt"):
        client.open("pusht-world", prompt="push")
    wrong: dict[str, tuple[type[OmniLoopError], str, Any]] = {
        "no actions": (InvalidInput, "actions", lambda s: s.predict(steps=3)),
        "nothing asked": (InvalidInput, "0 steps", lambda s: s.predict()),
        "too many": (InvalidInput, "17", lambda s: s.predict(np.zeros((17, 2), np.float32))),
        "width": (TensorError, "actions", lambda s: s.predict(np.zeros((2, 3), np.float32))),
        "range": (TensorError, "actions", lambda s: s.predict(np.full((2, 2), -1, np.float32))),
        "nan": (TensorError, "actions", lambda s: s.predict(np.full((2, 2), np.nan, np.float32))),
        "infer": (Unsupported, "infer", lambda s: s.infer(pick_image(episode), 3)),
        "executed": (InvalidInput, "executed", lambda s: s.recondition(images(episode, 3, 2), first_step=3)),
        "gap": (StateError, "step 9", lambda s: observe(s, episode, 9, 1)),
        "size": (TensorError, "image", lambda s: s.recondition({"image": np.zeros((1, 64, 64, 3), np.uint8)})),
        "no frame": (InvalidInput, "frames", lambda s: s.recondition({"image": np.zeros((0, 96, 96, 3), np.uint8)})),
        "many frames": (InvalidInput, "18 frames", lambda s: observe(s, episode, 3, 18)),
        "a key": (InvalidInput, "agent_pos", lambda s: s.recondition({**images(episode, 3, 1), "agent_pos": [0]})),
    }
    with client.open("pusht-world", seed=3) as session, client.open("pusht-world", seed=3) as undisturbed:
        with pytest.raises(StateError, match="recondition"):
            session.predict(actions(episode, 2, 2))
        for s in (session, undisturbed):
            observe(s, episode, 0, 3, fresh=True)
        for name, (error, named, call) in wrong.items():
            with pytest.raises(error, match=named) as caught:
                pytest.fail(f"accepted: {name} {call(session)}")
            assert "Traceback" not in caught.value.text
        got, want = (frames(s.predict(actions(episode, 2, 3)), 3, 3) for s in (session, undisturbed))
        assert (got == want).all()


def pick_image(episode: list[Seen]) -> Seen:
    return {"image": episode[3]["image"]}
