"""Beside LeRobot's own server: the same ACT checkpoints, the same observations, in turns in one run.

Theirs is PolicyServer with RobotClient, from the robot's observation to the chunk in the client's queue; ours a server
with our client. What both add is counted above the *bare model*, at the same percentile: the policy's forward pass
alone, in this process. One thread for torch everywhere. Weights are random: what they compute is meaningless, its
time is not.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from omni_loop.client import connect, connect_async
from omni_loop.config import Deployment, PipelineConfig
from omni_loop.errors import MissingExtra
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import Array

from .rows import Bar, Bench, Measured, Settings
from .sessions import one_thread

if TYPE_CHECKING:
    from .adapters_lerobot import Plain
    from .lerobot_peer import Peer

ROBOTS, DIM, CHUNK, ACTIONS = 8, 14, 10, 4
_WARM_UP = 5


@dataclass(frozen=True, slots=True)
class Kind:
    """What a policy sees: 14 joints, and ``cameras`` of ``size`` x ``size``."""

    cameras: int
    size: int

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"cam{i}" for i in range(self.cameras))

    @property
    def vectors(self) -> tuple[str, ...]:
        """What the joints are called in the policy: an ACT without a camera must have both."""
        return ("state",) if self.cameras else ("state", "environment_state")

    @property
    def keys(self) -> tuple[str, ...]:
        return (*self.vectors, *(f"images.{name}" for name in self.names))

    def named(self, vector: Array, cameras: Mapping[str, Array]) -> dict[str, Array]:
        return dict.fromkeys(self.vectors, vector) | {f"images.{name}": image for name, image in cameras.items()}


STATE, ONE, THREE = Kind(0, 0), Kind(1, 96), Kind(3, 224)


@dataclass(frozen=True, slots=True)
class Times:
    """Milliseconds ``[n]``: ours and theirs, from observation to chunk, and the forward pass alone."""

    ours: NDArray[np.float64]
    theirs: NDArray[np.float64]
    bare: NDArray[np.float64]

    def over(self, percent: float) -> Measured:
        """What ours and theirs add, at a percentile of each, to the forward pass at the same one."""
        ours, theirs, bare = (float(np.percentile(times, percent)) for times in (self.ours, self.theirs, self.bare))
        return Measured(ours - bare, theirs - bare)


class Beside:
    """A checkpoint of each kind, behind both servers when it is first asked for."""

    def __init__(self, settings: Settings, stack: ExitStack, folder: Path) -> None:
        self._settings, self._stack, self._folder = settings, stack, folder
        self._rng = np.random.default_rng(0)
        self._plain: dict[Kind, Plain] = {}

    @cached_property
    def one_camera(self) -> Times:
        return self._times(ONE, 6 if self._settings.quick else 300)

    @cached_property
    def three_cameras(self) -> Times:
        return self._times(THREE, 3 if self._settings.quick else 200)

    def together(self, kind: Kind) -> Measured:
        """Chunks a second of 8 robots at once: ours, and the better of theirs with 8 and theirs with one alone, which
        it serves without having to leave any out."""
        seconds = 0.5 if self._settings.quick else 10.0
        ours, theirs = [], []
        for _ in range(1 if self._settings.quick else 3):
            ours.append(asyncio.run(self._ours_together(kind, seconds)))
            theirs.append(max(self._theirs_together(kind, seconds, n) for n in (1, ROBOTS)))
        return Measured(float(np.median(ours)), float(np.median(theirs)))

    def _times(self, kind: Kind, count: int) -> Times:
        folder, plain = self._made(kind), self._plain[kind]
        ours, theirs, bare = [], [], []
        with (
            self._ours(folder) as address,
            self._theirs(kind, folder, 1) as (peer,),
            connect(address) as client,
            client.open("act", keys=kind.keys) as session,
        ):
            for step in range(_WARM_UP + count):
                vector, cameras = self._scene(kind)
                begin = time.perf_counter()
                result = session.infer(kind.named(vector, cameras), step)
                after_ours = time.perf_counter()
                other = peer.chunk(vector, cameras)
                after_theirs = time.perf_counter()
                forward = plain.forward_s(kind.named(vector, cameras))
                ours.append(after_ours - begin)
                theirs.append(after_theirs - after_ours)
                bare.append(forward)
                if result.chunk is None or other is None or not np.allclose(result.chunk.actions, other, atol=1e-4):
                    raise RuntimeError("the two servers do not command the same")
        return Times(*(1e3 * np.array(seconds[_WARM_UP:]) for seconds in (ours, theirs, bare)))

    async def _ours_together(self, kind: Kind, seconds: float) -> float:
        folder = self._made(kind)
        scenes = [self._scene(kind) for _ in range(ROBOTS)]
        expected = [self._plain[kind].chunk(kind.named(*scene)) for scene in scenes]
        with self._ours(folder) as address:
            async with connect_async(address) as client:

                async def robot(n: int, until: float) -> int:
                    done, step = 0, 0
                    async with await client.open("act", keys=kind.keys) as session:
                        while time.perf_counter() < until:
                            result = await session.infer(kind.named(*scenes[n]), step)
                            if result.chunk is None or not np.allclose(result.chunk.actions, expected[n], atol=1e-4):
                                raise RuntimeError(f"robot {n} was commanded something else")
                            step, done = step + 1, done + 1
                    return done

                await asyncio.gather(*(robot(n, time.perf_counter() + 1.0) for n in range(ROBOTS)))
                begin = time.perf_counter()
                until = begin + seconds
                chunks = sum(await asyncio.gather(*(robot(n, until) for n in range(ROBOTS))))
                return chunks / (time.perf_counter() - begin)

    def _theirs_together(self, kind: Kind, seconds: float, robots: int) -> float:
        folder = self._made(kind)
        scenes = [self._scene(kind) for _ in range(robots)]
        counts = [0] * robots

        def robot(n: int, peer: Peer, until: float) -> None:
            while time.perf_counter() < until:
                # An observation that a later one of another robot has replaced is never answered.
                counts[n] += peer.chunk(*scenes[n], wait_s=0.5) is not None

        def run(peers: list[Peer], lasting: float) -> float:
            counts[:] = [0] * robots
            begin = time.perf_counter()
            threads = [threading.Thread(target=robot, args=(n, p, begin + lasting)) for n, p in enumerate(peers)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            return sum(counts) / (time.perf_counter() - begin)

        with self._theirs(kind, folder, robots) as peers:
            run(peers, 1.0)
            return run(peers, seconds)

    def _made(self, kind: Kind) -> Path:
        """The checkpoint of ``kind``."""
        from .adapters_lerobot import Plain, save

        folder = self._folder / f"{kind.cameras}x{kind.size}"
        if kind not in self._plain:
            cameras = {f"observation.images.{name}": ("VISUAL", (3, kind.size, kind.size)) for name in kind.names}
            kinds = {"state": "STATE", "environment_state": "ENV"}
            vectors = {f"observation.{name}": (kinds[name], (DIM,)) for name in kind.vectors}
            save(folder, {**vectors, **cameras})
            self._plain[kind] = Plain(folder)
        return folder

    @contextmanager
    def _ours(self, folder: Path) -> Iterator[str]:
        act = PipelineConfig(name="act", template="lerobot", options={"checkpoint": str(folder)})
        with BackgroundServer(Deployment(pipelines=(act,))) as server:
            yield server.address

    @contextmanager
    def _theirs(self, kind: Kind, folder: Path, robots: int) -> Iterator[list[Peer]]:
        from .lerobot_peer import Peer, server
        from .shown import ShownConfig

        cameras = dict.fromkeys(kind.names, (kind.size, kind.size))
        theirs = folder if kind.cameras else _with_state_twice(folder)
        with server(workers=4 if robots == 1 else 4 * robots) as address, ExitStack() as stack:
            peers = []
            for _ in range(robots):
                config = ShownConfig(joints=DIM, actions=ACTIONS, views=cameras)
                peer = Peer(address, str(theirs), config, CHUNK)
                stack.callback(peer.stop)
                peers.append(peer)
            for peer in peers:
                peer.start()
            yield peers

    def _scene(self, kind: Kind) -> tuple[Array, dict[str, Array]]:
        shape = (kind.size, kind.size, 3)
        cameras = {name: self._rng.integers(0, 256, shape, np.uint8) for name in kind.names}
        return self._rng.normal(size=DIM).astype(np.float32), cameras


def _with_state_twice(folder: Path) -> Path:
    """The checkpoint for LeRobot's server; see :class:`~.shown.StateTwice`."""
    from lerobot.processor import PolicyProcessorPipeline

    from .shown import StateTwice

    copy = folder.with_name(f"{folder.name}-theirs")
    if not copy.exists():
        shutil.copytree(folder, copy)
        name = "policy_preprocessor.json"
        steps = PolicyProcessorPipeline.from_pretrained(folder, config_filename=name)
        steps.steps = [StateTwice(), *steps.steps]
        steps.save_pretrained(copy, config_filename=name)
    return copy


@contextmanager
def _subject(settings: Settings) -> Iterator[Beside]:
    if find_spec("lerobot") is None:
        raise MissingExtra("LeRobot is not installed; install the extra 'lerobot'")
    with one_thread(), tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Beside(settings, stack, Path(folder))


BENCH: Bench[Beside] = Bench("beside_lerobot", _subject)


@BENCH.row("ms", Bar("ratio", "<=", 0.5))
def one_camera_p50(beside: Beside) -> Measured:
    """What a chunk from 14 joints and one camera of 96 x 96 takes above the bare model, against LeRobot's server."""
    return beside.one_camera.over(50)


@BENCH.row("ms", Bar("ratio", "<=", 0.5))
def one_camera_p99(beside: Beside) -> Measured:
    """The same at the 99th percentile."""
    return beside.one_camera.over(99)


@BENCH.row("ms", Bar("ratio", "<=", 0.5))
def three_cameras_p50(beside: Beside) -> Measured:
    """As one_camera_p50, from three cameras of 224 x 224."""
    return beside.three_cameras.over(50)


@BENCH.row("ms", Bar("ratio", "<=", 0.5))
def three_cameras_p99(beside: Beside) -> Measured:
    """The same at the 99th percentile."""
    return beside.three_cameras.over(99)


@BENCH.row("chunks/s", Bar("ratio", ">=", 3.0))
def eight_on_state(beside: Beside) -> Measured:
    """8 robots at once from 14 joints, each commanded its own actions; theirs: the better of 8 robots and one alone."""
    return beside.together(STATE)


@BENCH.row("chunks/s", Bar("ratio", ">=", 1.0))
def eight_on_three_cameras(beside: Beside) -> Measured:
    """As eight_on_state, from three cameras of 224 x 224."""
    return beside.together(THREE)
