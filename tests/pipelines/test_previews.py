"""The shipped pipelines show frames while they are made: flagged, and the answer is the same bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_loop.client import Client
from omni_loop.types import FramePrediction, TickResult

pytestmark = pytest.mark.timeout(300)

Seen = dict[str, Any]


def check(parts: list[FramePrediction], whole: TickResult, plain: TickResult, n: int) -> None:
    assert whole.frames is not None
    assert plain.frames is not None
    np.testing.assert_array_equal(whole.frames.frames, plain.frames.frames)
    np.testing.assert_array_equal(whole.frames.scene, plain.frames.scene)
    assert (whole.frames.part, whole.frames.preview, len(whole.frames.frames)) == (0, False, n)
    assert parts
    assert [part.preview for part in parts] == [True] + [False] * (len(parts) - 1)
    assert parts[0].first_step == whole.frames.first_step
    for part in parts:
        assert part.frames.shape == (1, 96, 96, 3)
        at = part.first_step - whole.frames.first_step
        off = np.abs(part.frames[0].astype(int) - whole.frames.frames[at].astype(int))
        # A frame decoded alone rounds otherwise than one in a batch, at most; a preview is another picture.
        assert part.preview or off.max() <= 1


def test_frames_of_ones_own_actions(client: Client, episode: list[Seen]) -> None:
    image = np.stack([seen["image"] for seen in episode[:2]])
    lead = np.stack([seen["action"] for seen in episode[:1]])
    actions = np.stack([seen["action"] for seen in episode[1:9]])
    with client.open("pusht-world", seed=3) as watched, client.open("pusht-world", seed=3) as plain:
        for session in (watched, plain):
            session.recondition({"image": image}, executed=lead)
        for _ in range(2):
            parts: list[FramePrediction] = []
            check(parts, watched.predict(actions, on_part=parts.append), plain.predict(actions), 8)


def test_frames_that_a_policy_imagines(client: Client, episode: list[Seen]) -> None:
    arrays = {name: episode[0][name] for name in ("image", "agent_pos")}
    with client.open("pusht-imagine", seed=3) as watched, client.open("pusht-imagine", seed=3) as plain:
        parts: list[FramePrediction] = []
        whole, same = watched.infer(arrays, 0, on_part=parts.append), plain.infer(arrays, 0)
        check(parts, whole, same, 8)
        assert whole.chunk is not None
        assert same.chunk is not None
        np.testing.assert_array_equal(whole.chunk.actions, same.chunk.actions)
        parts = []
        check(parts, watched.predict(steps=4, on_part=parts.append), plain.predict(steps=4), 4)


def test_frames_besides_a_chunk(client: Client, episode: list[Seen]) -> None:
    arrays = {name: episode[0][name] for name in ("image", "agent_pos")}
    with client.open("pusht", seed=3) as watched, client.open("pusht", seed=3) as plain:
        parts: list[FramePrediction] = []
        check(parts, watched.infer(arrays, 0, frames=8, on_part=parts.append), plain.infer(arrays, 0, frames=8), 8)
