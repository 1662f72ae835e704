"""``pusht`` end to end over gRPC: an observation in, an action chunk out, frames of the chunk on request."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from omni_loop.client import Client, Session, connect
from omni_loop.errors import InvalidInput, OmniLoopError, StateError, TensorError, UnknownName, Unsupported
from omni_loop.types import Op, TickResult

pytestmark = pytest.mark.timeout(300)

IMAGE, STATE = ("image", "agent_pos"), ("image", "agent_pos", "block_pose")
Seen = dict[str, Any]


def pick(seen: Seen, keys: tuple[str, ...]) -> Seen:
    return {key: seen[key] for key in keys}


def chunk(result: TickResult) -> np.ndarray[Any, np.dtype[np.float32]]:
    assert result.chunk is not None
    return result.chunk.actions


def check(result: TickResult, session: Session, seq: int, step: int) -> None:
    assert (result.seq, result.epoch) == (seq, session.epoch)
    assert result.chunk is not None
    assert (result.chunk.seq, result.chunk.first_step, result.chunk.epoch) == (seq, step, session.epoch)
    actions = result.chunk.actions
    assert actions.dtype == np.float32
    assert actions.shape == (session.spec.horizon, 2) == (16, 2)
    assert np.isfinite(actions).all()
    assert 0 <= actions.min() <= actions.max() <= 512
    assert re.fullmatch(r"[0-9a-f]{12}\+[0-9a-f]{8}", result.chunk.policy_revision), "act's, and the other stages'"
    assert result.progress is not None
    assert (result.progress.seq, result.progress.step) == (seq, step)
    assert 0 <= result.progress.progress <= 1
    assert 0 <= result.progress.done <= 1
    assert set(result.timings.stages_ms) >= {"context", "act"}
    assert 0 < result.timings.model_ms <= result.timings.total_ms


@pytest.mark.parametrize("keys", [IMAGE, STATE])
def test_a_loop_of_observations_and_chunks(client: Client, episode: list[Seen], keys: tuple[str, ...]) -> None:
    with client.open("pusht", prompt="push the T onto the goal", seed=3, keys=keys) as session:
        assert session.keys == keys
        for seq, step in enumerate((0, 8, 16, 24, 29), start=1):
            result = session.infer(pick(episode[step], keys), step)
            check(result, session, seq, step)
            assert result.frames is None


def test_frames_of_the_chunk_come_besides(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht", seed=3, keys=IMAGE) as session:
        for seq, (step, n) in enumerate([(0, 4), (8, 16), (16, 0), (24, 1)], start=1):
            result = session.infer(pick(episode[step], IMAGE), step, frames=n)
            check(result, session, seq, step)
            assert result.frames_error is None
            if n == 0:
                assert result.frames is None
                continue
            assert result.frames is not None
            assert (result.frames.seq, result.frames.first_step) == (seq, step + 1)
            assert result.frames.frames.dtype == np.uint8
            assert result.frames.frames.shape == (n, 96, 96, 3)
            assert result.frames.scene is not None
            assert result.frames.scene.shape == (n, 9, 2)
            assert np.isfinite(result.frames.scene).all()


def test_asking_for_frames_does_not_change_the_chunks(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht", seed=3) as plain, client.open("pusht", seed=3) as watched:
        for step in (0, 8, 16):
            a = plain.infer(pick(episode[step], IMAGE), step)
            b = watched.infer(pick(episode[step], IMAGE), step, frames=2)
            assert (chunk(a) == chunk(b)).all()


def test_the_state_given_is_used_and_so_are_prompt_and_seed(client: Client, episode: list[Seen]) -> None:
    chunks = {}
    for name, options in {
        "plain": {"seed": 3, "keys": IMAGE},
        "again": {"seed": 3, "keys": IMAGE},
        "state": {"seed": 3, "keys": STATE},
        "seed": {"seed": 4, "keys": IMAGE},
        "prompt": {"seed": 3, "keys": IMAGE, "prompt": "something else entirely"},
    }.items():
        with client.open("pusht", **options) as session:  # type: ignore[arg-type]
            chunks[name] = chunk(session.infer(pick(episode[0], session.keys), 0))
    assert (chunks["again"] == chunks["plain"]).all()
    for other in ("state", "seed", "prompt"):
        assert (chunks[other] != chunks["plain"]).any(), other
    moved = {**pick(episode[0], STATE), "block_pose": episode[0]["block_pose"] + np.float32(60)}
    with client.open("pusht", seed=3, keys=STATE) as session:
        assert (chunk(session.infer(moved, 0)) != chunks["state"]).any()


def test_executed_actions_are_those_of_the_last_chunk_unless_told(client: Client, episode: list[Seen]) -> None:
    with (
        client.open("pusht", seed=3) as silent,
        client.open("pusht", seed=3) as told,
        client.open("pusht", seed=3) as lied,
    ):
        first = [chunk(s.infer(pick(episode[0], IMAGE), 0)) for s in (silent, told, lied)]
        same = silent.infer(pick(episode[8], IMAGE), 8)
        explicit = told.infer(pick(episode[8], IMAGE), 8, executed=first[1][:8])
        other = lied.infer(pick(episode[8], IMAGE), 8, executed=512 - first[2][:8])
    assert (chunk(same) == chunk(explicit)).all()
    assert (chunk(same) != chunk(other)).any()


def test_a_reset_begins_anew(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht", seed=3) as session:
        first = chunk(session.infer(pick(episode[0], IMAGE), 0))
        session.infer(pick(episode[8], IMAGE), 8)
        epoch = session.epoch
        assert session.reset(seed=3) == epoch + 1
        again = session.infer(pick(episode[0], IMAGE), 0)
        assert again.epoch == epoch + 1
        assert (chunk(again) != first).any()  # an episode of its own: other noise


def wrong(seen: Seen) -> dict[str, tuple[type[OmniLoopError], str, dict[str, Any]]]:
    """Error, what its text must name, and the call."""
    good = pick(seen, IMAGE)
    nan = np.full((2, 2), np.nan, np.float32)
    return {
        "missing key": (InvalidInput, "agent_pos", {"arrays": {"image": good["image"]}}),
        "extra key": (InvalidInput, "block_pose", {"arrays": pick(seen, STATE)}),
        "misspelt key": (InvalidInput, "agent_pos", {"arrays": {"image": good["image"], "agent_poss": nan}}),
        "image size": (TensorError, "image", {"arrays": {**good, "image": np.zeros((64, 64, 3), np.uint8)}}),
        "image dtype": (TensorError, "image", {"arrays": {**good, "image": np.zeros((96, 96, 3), np.float32)}}),
        "nan": (TensorError, "agent_pos", {"arrays": {**good, "agent_pos": nan}}),
        "out of range": (TensorError, "agent_pos", {"arrays": {**good, "agent_pos": np.full((2, 2), 900, np.float32)}}),
        "rank": (TensorError, "agent_pos", {"arrays": {**good, "agent_pos": np.zeros(2, np.float32)}}),
        "action width": (TensorError, "executed", {"arrays": good, "executed": np.zeros((8, 3), np.float32)}),
        "action count": (InvalidInput, "executed", {"arrays": good, "executed": np.zeros((7, 2), np.float32)}),
        "action range": (TensorError, "executed", {"arrays": good, "executed": np.full((8, 2), 513, np.float32)}),
        "frames": (InvalidInput, "17", {"arrays": good, "frames": 17}),
        "beyond the chunk": (InvalidInput, "executed", {"arrays": good, "step": 40}),
        "a step back": (StateError, "step 3", {"arrays": good, "step": 3}),
    }


def test_wrong_inputs_are_named_and_the_session_goes_on(client: Client, episode: list[Seen]) -> None:
    with client.open("pusht", seed=3) as session, client.open("pusht", seed=3) as undisturbed:
        for s in (session, undisturbed):
            s.infer(pick(episode[4], IMAGE), 4)
        for name, (error, named, call) in wrong(episode[12]).items():
            with pytest.raises(error, match=named) as caught:
                session.infer(call.pop("arrays"), call.pop("step", 12), **call)
            assert "/" not in caught.value.text.replace("n/a", ""), name
        a, b = (s.infer(pick(episode[12], IMAGE), 12) for s in (session, undisturbed))
        assert (chunk(a) == chunk(b)).all()


def test_what_the_pipeline_cannot_do_is_said(client: Client, episode: list[Seen]) -> None:
    assert set(client.info().pipelines["pusht"].ops) == {Op.INFER}
    with pytest.raises(UnknownName, match="Did you mean 'pusht'"):
        client.open("pushed")
    with pytest.raises(InvalidInput, match="Did you mean 'block_pose'"):
        client.open("pusht", keys=("image", "agent_pos", "block_poses"))
    with pytest.raises(InvalidInput, match="image"):
        client.open("pusht", keys=("agent_pos",))
    with client.open("pusht") as session:
        with pytest.raises(Unsupported, match="infer"):
            session.predict(steps=2)
        check(session.infer(pick(episode[0], IMAGE), 0), session, 2, 0)


def test_a_runner_in_a_spawned_process_gives_the_same_chunks(
    address: str, spawned_address: str, episode: list[Seen]
) -> None:
    """Bit for bit, through shared memory instead of references; also frames, and imagined ones fed back."""
    answers = []
    for where in (address, spawned_address):
        with connect(where, timeout_s=60) as client, client.open("pusht", seed=3, keys=STATE) as session:
            results = [session.infer(pick(episode[step], STATE), step, frames=2) for step in (0, 8, 16, 24)]
            with client.open("pusht-imagine", seed=3) as dream:
                results.append(dream.infer(pick(episode[0], IMAGE), 0, frames=3))
                results += [dream.predict(steps=2) for _ in range(2)]
        answers.append(results)
    for local, spawned in zip(*answers, strict=True):
        assert (chunk(local) == chunk(spawned)).all()
        assert local.frames is not None
        assert spawned.frames is not None
        assert (local.frames.frames == spawned.frames.frames).all()
        assert local.progress == spawned.progress
