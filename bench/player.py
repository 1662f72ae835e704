"""``omni-loop bench player``: PushT played while the next chunk is being made, with real-time chunking and without.

The latency is artificial and exact: an answer is there so many control periods after its observation left (the env runs
in lockstep, so that a row is a pure function of its seeds). The policy is served as ever, and played by the very
:class:`~omni_loop.client.playback.Playback` that ``ChunkPlayer`` uses. A *jump* is the length of the step from the last
action of one chunk to the first of the next; *ours* is with real-time chunking, the baseline takes every chunk as it is
made. Episodes are paired by seed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from omni_loop.client import Client, Session, connect
from omni_loop.client.delays import Seams
from omni_loop.client.playback import Playback, Sending
from omni_loop.config import Deployment, load_deployment
from omni_loop.env import Env
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import ActionChunk
from omni_loop_sim_eval.stats import interval
from omni_loop_sim_eval.suite import EvalSuite, load_suite

from .rows import Bar, Bench, Measured, Settings

_EPISODES = 50
_PARTS = ("context", "act", "frames", "decode")
LATENCY = 4  # control periods: 400 ms at 10 Hz, half an execution horizon


@dataclass(slots=True)
class Played:
    """What the episodes of one way to play gave."""

    successes: int = 0
    episodes: int = 0
    seams: Seams = field(default_factory=Seams)


class Player:
    """Plays the suite against one server; every way to play once, however many rows ask for it."""

    def __init__(self, settings: Settings, client: Client, suite: EvalSuite) -> None:
        self._settings, self._client, self._suite = settings, client, suite
        self.play = cache(self._play)

    def _play(self, latency: int, join: bool) -> Played:
        played, suite = Played(), self._suite
        how = f"latency {latency}, {'joined' if join else 'afresh'}"
        with closing(suite.make_env()) as env:
            for episode in range(suite.episodes):
                seed = suite.first_seed + episode
                with self._client.open(suite.pipeline, prompt=suite.prompt, seed=seed, keys=suite.keys) as session:
                    playback = Playback(session.spec, "hold", join=join)
                    played.successes += self._episode(env, session, playback, seed, latency)
                played.episodes += 1
                _add(played.seams, playback.counts.seams)
                self._settings.say(f"{how}: {played.successes}/{played.episodes}, jump {played.seams.jump:.1f} px")
        return played

    def _episode(self, env: Env, session: Session, playback: Playback, seed: int, latency: int) -> bool:
        env.reset(seed, self._suite.keys)
        under_way: deque[tuple[int, Sending, ActionChunk]] = deque()
        while True:
            playback.see({})  # the env is looked at only for what is sent
            if (sending := playback.due()) is not None:
                result = session.infer(
                    env.observe(self._suite.keys),
                    sending.seen.step,
                    executed=sending.executed,
                    executed_through=sending.executed_through,
                )
                assert result.chunk is not None
                under_way.append((playback.period + latency, sending, result.chunk))
            while under_way and under_way[0][0] <= playback.period:
                _, asked, chunk = under_way.popleft()
                playback.answered(asked, chunk)
            action = playback.next().action
            if action is None:  # before the first chunk: the robot is not commanded, and nothing moves
                continue
            done = env.step(np.clip(action, env.action.low, env.action.high), keys=())
            if done.success or done.done:
                return done.success


def _add(total: Seams, more: Seams) -> None:
    total.count += more.count
    total.jump_sum += more.jump_sum
    total.jump_max = max(total.jump_max, more.jump_max)
    total.strides += more.strides
    total.stride_sum += more.stride_sum


@contextmanager
def _subject(settings: Settings) -> Iterator[Player]:
    suite = load_suite("pusht-image").changed(episodes=2 if settings.quick else _EPISODES, videos="none")
    deployment = load_deployment(suite.deployment)
    if settings.checkpoints:
        options = {part: {"checkpoints": settings.checkpoints} for part in _PARTS}
        deployment = Deployment.model_validate({**deployment.model_dump(), "stage_options": options})
    with BackgroundServer(deployment) as server, connect(server.address, timeout_s=suite.time_limit_s) as client:
        yield Player(settings, client, suite)


BENCH: Bench[Player] = Bench("player", _subject)


@BENCH.row("px", Bar("ratio", "<=", 0.6))
def jump(player: Player) -> Measured:
    """Mean jump at a seam, 4 control periods of latency; baseline: without real-time chunking."""
    return Measured(player.play(LATENCY, True).seams.jump, player.play(LATENCY, False).seams.jump)


@BENCH.row("px", Bar("ratio", "<=", 1.5))
def jump_and_stride(player: Player) -> Measured:
    """Mean jump at a seam with real-time chunking; baseline: the mean step inside a chunk."""
    seams = player.play(LATENCY, True).seams
    return Measured(seams.jump, seams.stride)


@BENCH.row("success", Bar("ours - baseline", ">=", -0.1))
def success(player: Player) -> Measured:
    """Success with 4 control periods of latency; baseline: without real-time chunking."""
    return Measured(*(_rate(player, LATENCY, join) for join in (True, False)))


@BENCH.row("success")
def success_of_latency(player: Player) -> Measured:
    """Success with 4 control periods of latency and real-time chunking; baseline: answers that are there at once."""
    return Measured(_rate(player, LATENCY, True), _rate(player, 0, False))


def _rate(player: Player, latency: int, join: bool) -> float:
    played = player.play(latency, join)
    rate = played.successes / played.episodes
    player._settings.say(f"{played.successes}/{played.episodes} {interval(played.successes, played.episodes)}")
    return rate
