"""Real-time chunking through a real server: what the shipped pipelines do with ``executed_through``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from omni_loop.client import Client, Session
from omni_loop.errors import InvalidInput
from omni_loop.types import ActionChunk

Episode = list[dict[str, Any]]
KEYS = ("image", "agent_pos")


def infer(session: Session, episode: Episode, step: int, through: int | None = None) -> ActionChunk:
    arrays = {key: episode[step][key] for key in session.keys}
    chunk = session.infer(arrays, step, executed_through=through).chunk
    assert chunk is not None
    return chunk


def opened(client: Client, pipeline: str = "pusht", seed: int = 3) -> Session:
    return client.open(pipeline, seed=seed, keys=KEYS)


def test_a_chunk_of_the_embedded_policy_joins_the_one_before(client: Client, episode: Episode) -> None:
    with opened(client) as session, opened(client) as plain:
        first = infer(session, episode, 0, 3)
        assert (first.frozen, first.joined) == (0, "")
        assert (infer(plain, episode, 0).actions == first.actions).all()
        second, afresh = infer(session, episode, 6, 9), infer(plain, episode, 6)
        assert (second.frozen, second.joined, second.first_step) == (4, "inpainted", 6)
        assert (second.actions[:4] == first.actions[6:10]).all()
        assert (afresh.frozen, afresh.joined) == (0, "")
        guided, free = (np.abs(c.actions[4:8] - first.actions[10:14]).mean() for c in (second, afresh))
        assert guided < free
        third = infer(session, episode, 12, 13)
        assert (third.actions[:2] == second.actions[6:8]).all()


def test_a_session_that_is_not_asked_is_answered_to_the_bit_as_ever(client: Client, episode: Episode) -> None:
    """A chunk depends on what its own observation asks for alone, not on what those before did."""
    with opened(client) as asked, opened(client) as plain:
        for session, through in ((asked, 9), (plain, None)):
            infer(session, episode, 0)
            session.infer(
                {k: episode[6][k] for k in KEYS}, 6, executed=np.zeros((6, 2), "f4"), executed_through=through
            )
        rows = np.zeros((6, 2), np.float32)
        both = [s.infer({k: episode[12][k] for k in KEYS}, 12, executed=rows).chunk for s in (asked, plain)]
        assert both[0] is not None
        assert both[1] is not None
        assert (both[0].actions == both[1].actions).all()


def test_forks_and_rewinds_join_what_they_were_sent(client: Client, episode: Episode) -> None:
    with opened(client) as session:
        first = infer(session, episode, 0)
        with session.fork() as child:
            infer(session, episode, 4)
            forked = infer(child, episode, 6, 8)
            assert (forked.actions[:3] == first.actions[6:9]).all()
            assert forked.joined == "inpainted"
        session.rewind(0)
        again = infer(session, episode, 6, 8)
        assert (again.actions[:3] == first.actions[6:9]).all()
        assert again.joined == "inpainted"
        session.reset()
        assert infer(session, episode, 0, 5).joined == ""


def test_the_best_of_several_overlaps(client: Client, episode: Episode) -> None:
    with opened(client, "pusht-plan") as session:
        first, second = infer(session, episode, 0), infer(session, episode, 6, 7)
        assert (second.frozen, second.joined) == (2, "overlap")
        assert (second.actions[:2] == first.actions[6:8]).all()


def test_frames_besides_a_chunk_show_the_actions_that_are_frozen(client: Client, episode: Episode) -> None:
    """The world imagines the chunk as it is sent, not as the policy would have had it."""
    arrays = {key: episode[6][key] for key in KEYS}
    with opened(client) as session, opened(client) as plain:
        for one in (session, plain):
            infer(one, episode, 0)
        rows = np.full((6, 2), 256, np.float32)
        shown = [
            one.infer(arrays, 6, executed=rows, frames=4, executed_through=through)
            for one, through in ((session, 11), (plain, None))
        ]
        assert shown[0].frames is not None
        assert shown[1].frames is not None
        assert shown[0].chunk is not None
        assert shown[0].chunk.frozen == 6
        assert (shown[0].frames.frames != shown[1].frames.frames).any()


@pytest.mark.parametrize("through", [4, -1])
def test_a_step_before_the_observation_is_refused_where_it_was_said(
    client: Client, episode: Episode, through: int
) -> None:
    with opened(client) as session:
        infer(session, episode, 0, -1)  # nothing is executed meanwhile
        with pytest.raises(InvalidInput, match="executed_through is"):
            infer(session, episode, 6, through)
        infer(session, episode, 6, 5)
