"""The same policies in the simulator and in a world model: what is played, and where it is kept.

Every policy plays whole episodes in the simulator, and a few steps from each of many branch points (:mod:`.branches`)
twice: in the simulator and in the world model. Whole episodes in the world model besides, to say what they are worth.
Whatever has been played is kept (:mod:`.plays`) and not played again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import numpy as np

from omni_loop import registry
from omni_loop.config import load_deployment
from omni_loop.env import Env
from omni_loop.errors import ConfigError, UnknownName, Unsupported, nearest
from omni_loop.types import SessionSpec, TickResult

from . import bounds, horizon
from .api import LoopClient, LoopSession, attach
from .branches import Branch, RealRun, recorded
from .play import InSimulator, InWorld, Place, Played, SceneScore, WorldSession, play
from .plays import Play, Plays
from .suite import EvalSuite, load_suite
from .twin_config import TwinConfig, TwinPolicy

WHOLE, BRANCH, IMAGINED, IMAGINED_WHOLE = PLACES = "whole", "branch", "imagined", "imagined-whole"
_AHEAD = 8  # actions of a bound that are imagined at once

Job = tuple[int, Branch | None]  # seed, and where it begins; None: at the first step


class WorldClient(Protocol):
    """A client whose sessions imagine."""

    def open(self, pipeline: str, *, seed: int | None = None) -> WorldSession: ...


#: A client of the policy's deployment, or of the world model's for None, as long as the context lives.
Serve = Callable[[TwinPolicy | None], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Player:
    """One policy and how to reach it. ``bound``: it has no model and looks at nothing that it is sent."""

    name: str
    client: LoopClient
    suite: EvalSuite
    execution_horizon: int | None
    bound: bool

    def session(self, env: Env, seed: int, imagining: bool) -> LoopSession:
        """For an episode of ``seed``; a bound acts in ``env`` as it stands."""
        attach(self.client, env)
        s = self.suite
        made = self.client.open(s.pipeline, prompt=s.prompt, seed=seed, keys=s.keys, options=s.options)
        return _Blind(made, _AHEAD) if self.bound and imagining else made


class _Blind:
    """A bound's session whose chunks hold ``ahead`` actions: one that does not look may say them at once."""

    def __init__(self, session: LoopSession, ahead: int) -> None:
        self._session, self._ahead = session, ahead
        self.id = session.id
        self.spec: SessionSpec = replace(session.spec, horizon=ahead, execution_horizon=ahead)

    def infer(
        self, arrays: Any, *, step: int, executed: Any = None, frames: int = 0, executed_through: int | None = None
    ) -> TickResult:
        made = [self._session.infer({}, step=step + i) for i in range(self._ahead)]
        chunks = [cast(Any, result.chunk) for result in made]
        return replace(made[0], chunk=replace(chunks[0], actions=np.concatenate([c.actions for c in chunks])))

    def predict(self, actions: Any = None, *, steps: int = 0) -> TickResult:
        raise Unsupported(f"the bound {self.id!r} imagines nothing")

    def close(self) -> None:
        self._session.close()


class Twin:
    """One experiment, kept in ``plays``. ``at_once``: imagined branches at a time, which the server batches.

    Raises:
        UnknownName: an observation the env has not; no expert or score of scenes for it.
        ConfigError: the suite sends what a world model does not imagine.
    """

    def __init__(
        self, config: TwinConfig, plays: Plays, serve: Serve, say: Callable[[str], None], at_once: int = 4
    ) -> None:
        self.config, self.plays, self._serve, self._say, self._at_once = config, plays, serve, say, at_once
        self.suite = load_suite(config.suite)
        self.env = self.suite.make_env()
        self.judge: SceneScore = registry.load(registry.SCENE_SCORES, self.suite.env)
        self.limits = (cast(float, self.env.action.low), cast(float, self.env.action.high))
        self.keys = (config.image, config.agent)
        known = [spec.name for spec in self.env.observations]
        for key in self.keys:
            if key not in known:
                raise UnknownName(f"env {self.suite.env!r} has no observation {key!r}.{nearest(key, known)}")
        if extra := sorted({*self.suite.keys} - {*self.keys}):
            raise ConfigError(f"suite {self.suite.name!r} sends {extra[0]!r}, which a world model does not imagine")

    def close(self) -> None:
        self.env.close()

    def run(self) -> list[horizon.Step]:
        """Play what is not kept yet. The curve over steps ahead is made anew, which takes seconds."""
        c = self.config
        self._say(f"recording {c.runs} runs of the expert")
        seeds = range(c.first_seed, c.first_seed + c.runs)
        points = list(recorded(self.env, seeds, self.keys, c.per_run, c.seen))
        with self._serve(None) as world:
            for policy in c.policies:
                self._all_of(policy, world, points)
            self._say("frames step by step")
            made = horizon.imagine_runs(lambda seed: world.open(c.world, seed=seed), points, c.steps, c.image, c.agent)
        return horizon.curve(made, horizon.lpips_distance()[0])

    def _all_of(self, policy: TwinPolicy, world: WorldClient, points: Sequence[Branch]) -> None:
        c, first = self.config, self.config.first_seed
        jobs: dict[str, list[Job]] = {
            WHOLE: [(seed, None) for seed in range(first, first + c.episodes)],
            BRANCH: [(b.run.seed, b) for b in points],
            IMAGINED: [(b.run.seed, b) for b in points],
            IMAGINED_WHOLE: [(seed, None) for seed in range(first, first + c.imagined_episodes)],
        }
        for place, some in jobs.items():
            jobs[place] = [(s, b) for s, b in some if not self.plays.has(policy.name, place, s, b.step if b else 0)]
        if not any(jobs.values()):
            return
        self._say(f"{policy.name}: starting")
        with self._player(policy) as player:
            for place, todo in jobs.items():
                for i, made in enumerate(self._in(place, player, todo, world), 1):
                    self.plays.append(made)
                    self._say(f"{policy.name}: {place} {i}/{len(todo)}")

    @contextmanager
    def _player(self, policy: TwinPolicy) -> Iterator[Player]:
        with ExitStack() as stack:
            if policy.bound:
                suite = bounds.bounded(self.suite, policy.bound)
                client = bounds.connect(policy.bound, self.suite)()
                stack.callback(client.close)
            else:
                suite, client = self.suite, stack.enter_context(self._serve(policy))
            yield Player(policy.name, client, suite, policy.execution_horizon, bool(policy.bound))

    def _in(self, place: str, player: Player, jobs: Iterable[Job], world: WorldClient) -> Iterator[Play]:
        simulated = place in (WHOLE, BRANCH)

        def one(job: Job) -> Play:
            seed, branch = job
            made = self._simulated(player, seed, branch) if simulated else self._imagined(player, seed, branch, world)
            return Play(player.name, place, seed, branch.step if branch else 0, made)

        if simulated or player.bound:  # there is one env
            yield from map(one, jobs)
        else:
            with ThreadPoolExecutor(self._at_once) as pool:
                yield from pool.map(one, jobs)

    def _simulated(self, player: Player, seed: int, branch: Branch | None) -> Played:
        here = InSimulator(self.env, player.suite.keys, seed, branch)
        return self._act(player, here, seed, self.suite.max_steps if branch is None else self.config.steps)

    def _imagined(self, player: Player, seed: int, branch: Branch | None, world: WorldClient) -> Played:
        c, begin = self.config, self._first(seed) if branch is None else branch
        keys = player.suite.keys
        if player.bound:  # it looks at the env, which is led to where the branch begins
            InSimulator(self.env, (), seed, begin)
            keys = ()
        session = world.open(c.world, seed=seed)
        try:
            there = InWorld(session, begin, keys, self.judge, c.image, c.agent, self.limits, c.success)
            steps = c.imagined_steps if branch is None else c.steps
            return self._act(player, there, seed, steps, imagining=True)
        finally:
            session.close()

    def _act(self, player: Player, place: Place, seed: int, steps: int, imagining: bool = False) -> Played:
        session = player.session(self.env, seed, imagining)
        try:
            return play(session, place, steps, player.execution_horizon, self.limits)
        finally:
            session.close()

    def _first(self, seed: int) -> Branch:
        """The first observation of ``seed``: nothing was seen before, and of the score nothing is known."""
        env = self.suite.make_env()
        try:
            arrays = {key: value[None] for key, value in env.reset(seed, self.keys).items()}
        finally:
            env.close()
        none = np.zeros((0, *self.env.action.shape), np.float32)
        return Branch(RealRun(seed, arrays, none, np.zeros(1), False), 0, 1)


@contextmanager
def serving(config: TwinConfig, policy: TwinPolicy | None) -> Iterator[Any]:
    """A client of a server that lives as long as this context: of a policy, or of the world model."""
    from omni_loop.client import connect
    from omni_loop.serve.background import BackgroundServer

    chosen = load_deployment(config.world_deployment) if policy is None else policy.served()
    with BackgroundServer(chosen) as server, connect(server.address, timeout_s=120.0) as client:
        yield client
