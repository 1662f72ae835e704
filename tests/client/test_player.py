"""The player against a server: latency, lost connections, resets, lost sessions. Its loop never waits, never skips."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from omni_loop.client.playback import Played
from omni_loop.client.player import ChunkPlayer
from omni_loop.errors import (
    InvalidInput,
    OmniLoopError,
    Reason,
    ServerUnavailable,
    TensorError,
    UnknownName,
)
from omni_loop.serve.app import Server
from omni_loop.testing.fault_proxy import FaultProxy

from .conftest import RampCore

SEEN = {"image": np.full((16, 16, 3), 1.2), "agent_pos": np.ones((2, 2), np.float32)}


@asynccontextmanager
async def playing(address: str, **kwargs: Any) -> AsyncIterator[ChunkPlayer]:
    player = await asyncio.to_thread(lambda: ChunkPlayer(address, "toy", **kwargs))
    try:
        yield player
    finally:
        await asyncio.to_thread(player.close)
        assert not [t for t in threading.enumerate() if t.name == "player"]


async def period(player: ChunkPlayer, seconds: float = 0.003) -> Played:
    player.observe(SEEN)
    played = player.next_action()
    await asyncio.sleep(seconds)
    return played


async def until(player: ChunkPlayer, true: Callable[[], bool], played: list[Played] | None = None) -> None:
    """Play until it is ``true``; at most 20 s."""
    async with asyncio.timeout(20):
        while not true():
            one = await period(player)
            if played is not None:
                played.append(one)


def until_said(player: ChunkPlayer) -> None:
    """Until the player's thread has looked at the observation."""
    until = time.monotonic() + 20
    while player._thread.bad is None and time.monotonic() < until:
        time.sleep(0.005)


def check_ramp(played: list[Played], epoch: int | None = None) -> None:
    """Steps of an episode follow each other from 0 on, and each action is the one for its step."""
    chunks = [p for p in played if p.source == "chunk"]
    assert [p.step for p in chunks] == list(range(len(chunks)))
    for p in chunks:
        assert p.action is not None
        assert p.action[0] == p.step
        assert epoch is None or p.action[1] == epoch


@pytest.mark.parametrize("join", [True, False])
async def test_jittered_latency_gives_no_skip_and_no_repeat(server: Server, core: RampCore, join: bool) -> None:
    rng, played = np.random.default_rng(3), []
    async with FaultProxy() as proxy, playing(await proxy.start(server.address), join=join) as player:
        for _ in range(200):
            proxy.delay(float(rng.choice([0, 2, 8, 30])))
            played.append(await period(player))
        await until(player, lambda: player.stats().chunks >= 8, played)
        stats = player.stats()
    check_ramp(played)
    assert stats.played + stats.watchdog == len(played)
    assert stats.seams >= 7
    assert stats.jump == stats.stride == 1  # a ramp goes on across seams
    assert stats.latency_p99_ms >= stats.latency_ms > 0
    asked = [r.executed_through for r in core.requests]
    assert asked[0] is None
    assert any(through is not None for through in asked) == join


async def test_what_is_sent_is_what_was_executed(server: Server, core: RampCore) -> None:
    async with playing(server.address) as player:
        played: list[Played] = []
        await until(player, lambda: player.stats().chunks >= 5, played)
    last = 0
    for request in core.requests:
        if request.executed is not None:
            assert request.executed[:, 0].tolist() == list(range(last, request.step))
        last = request.step
    assert core.requests[0].arrays["image"].shape == (8, 8, 3)
    assert (core.requests[0].arrays["image"] == 255).all()  # 1.2 is white, and not 50


async def test_the_loop_never_waits_for_a_server_that_does_not_answer(server: Server, core: RampCore) -> None:
    async with playing(server.address, watchdog="stop") as player:
        core.gate.clear()
        stopped = [await period(player, 0) for _ in range(50)]
        assert all(p.source == "watchdog" and p.action is not None and not p.action.any() for p in stopped)
        assert player.step == 0
        core.gate.set()
        assert await asyncio.to_thread(player.wait, 20)
        played: list[Played] = []
        await until(player, lambda: player.stats().chunks >= 3, played)
        check_ramp(played)


async def test_a_lost_connection_is_attached_again_and_no_step_is_lost(server: Server, core: RampCore) -> None:
    played: list[Played] = []
    async with FaultProxy() as proxy, playing(await proxy.start(server.address)) as player:
        for n in range(1, 6):
            await until(player, lambda n=n: player.stats().chunks >= 2 * n, played)  # type: ignore[misc]
            assert proxy.cut() > 0
        await until(player, lambda: player.stats().chunks >= 14, played)
        stats = player.stats()
        assert stats.reconnects >= 5
        assert player.error is None
    check_ramp(played)
    steps = [request.step for request in core.requests]
    assert steps == sorted(set(steps))  # no observation was computed twice


async def test_after_a_reset_nothing_of_the_old_epoch_is_played(server: Server, core: RampCore) -> None:
    async with FaultProxy() as proxy, playing(await proxy.start(server.address)) as player:
        for episode in range(4):
            proxy.delay(10 * episode)
            played: list[Played] = []
            await until(player, lambda: len([p for p in played if p.source == "chunk"]) >= 20, played)  # noqa: B023
            check_ramp(played, epoch=1 + episode)
            player.reset()
            after = player.next_action()
            assert (after.action, after.step) == (None, 0)
            if episode == 2:
                proxy.cut()
        assert player.stats().resets == 4


async def test_resets_that_follow_each_other_end_in_the_last(server: Server, core: RampCore) -> None:
    async with playing(server.address, seed=3) as player:
        await until(player, lambda: player.stats().chunks >= 1)
        for seed in (4, 5, 6):
            player.reset(seed=seed)
        played: list[Played] = []
        await until(player, lambda: len([p for p in played if p.source == "chunk"]) >= 20, played)
        check_ramp(played)
        (live,) = core.live.values()
        assert live.info.seed == 6
        with pytest.raises(InvalidInput, match="seed"):
            player.reset(seed=-1)


async def test_a_refused_observation_is_not_the_end(server: Server, core: RampCore) -> None:
    played: list[Played] = []
    async with playing(server.address) as player:
        await until(player, lambda: player.stats().chunks >= 2, played)
        core.refuse = 3
        await until(player, lambda: player.stats().refused == 3 and player.stats().chunks >= 6, played)
        assert isinstance(player.last_refusal, OmniLoopError)
        assert "'act' failed" in player.last_refusal.text
        assert player.error is None
    check_ramp(played)


async def test_a_lost_session_is_said_and_a_reset_begins_another(server: Server, core: RampCore) -> None:
    async with playing(server.address, watchdog=[7.0, 7.0]) as player:
        await until(player, lambda: player.stats().chunks >= 2)
        first = player.session
        core.live.clear()
        await until(player, lambda: player.error is not None)
        assert player.error is not None
        assert player.error.reason is Reason.UNKNOWN_SESSION
        await until(player, lambda: player.next_action().source == "watchdog")
        action = player.next_action().action
        assert action is not None
        assert action.tolist() == [7, 7]
        player.reset()
        played: list[Played] = []
        await until(player, lambda: len([p for p in played if p.source == "chunk"]) >= 20, played)
        check_ramp(played, epoch=1)
        assert player.error is None
        assert player.session != first


async def test_an_observation_that_cannot_be_is_said_where_observations_are_made(server: Server) -> None:
    async with playing(server.address) as player:
        with pytest.raises(TensorError, match="missing observation keys: 'agent_pos'"):
            player.observe({"image": SEEN["image"]})
        player.observe({**SEEN, "agent_pos": np.full((2, 2), np.nan, np.float32)})
        await asyncio.to_thread(until_said, player)
        with pytest.raises(TensorError, match="'agent_pos' is not finite"):
            player.observe(SEEN)
        await until(player, lambda: player.stats().chunks >= 1)


@pytest.mark.parametrize(
    ("kwargs", "error"),
    [
        ({"watchdog": "hom"}, InvalidInput),
        ({"execution_horizon": 99}, InvalidInput),
        ({"timeout_s": 0}, InvalidInput),
        ({"deadline_ms": -1}, InvalidInput),
        ({"pipeline": "tou"}, UnknownName),
        ({"address": "127.0.0.1:1"}, ServerUnavailable),
    ],
)
async def test_a_player_that_cannot_be_is_refused_when_it_is_made(
    server: Server, kwargs: dict[str, Any], error: type[Exception]
) -> None:
    given = {"address": server.address, "pipeline": "toy", **kwargs}
    with pytest.raises(error):
        await asyncio.to_thread(lambda: ChunkPlayer(**given))
    assert not [t for t in threading.enumerate() if t.name == "player"]


async def test_closing_twice_and_closing_without_a_server_end_the_thread(server: Server) -> None:
    async with FaultProxy() as proxy, playing(await proxy.start(server.address)) as player:
        await until(player, lambda: player.stats().chunks >= 1)
        proxy.refuse()
        proxy.cut()
        await asyncio.to_thread(player.close)
        assert player.next_action().source in ("chunk", "watchdog")
