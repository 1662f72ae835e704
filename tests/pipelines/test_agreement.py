"""However a session comes to a tick (alone, interleaved, batched, forked, rewound, restored in another process), its
models say the same: bit for bit where batches have the same shape, else within 1e-5 of a range of -1..1."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

pytestmark = [pytest.mark.timeout(600), pytest.mark.parametrize("pipeline", ["pusht-imagine", "pusht-world", "pusht"])]
_SCRIPT = Path(__file__).with_name("agree.py")
TOLERANCE = 1e-5
SEED = 11


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agree", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["agree"] = module
    spec.loader.exec_module(module)
    return module


agree = _load()


@pytest.fixture
def checkpoints(small_checkpoints: Path) -> str:
    return str(small_checkpoints)


async def alone(checkpoints: str, pipeline: str, seed: int = SEED) -> list[dict[str, np.ndarray]]:
    async with agree.core(checkpoints) as made:
        said: list[dict[str, np.ndarray]] = await agree.Walk(made, await made.open(pipeline, seed), seed).walk()
        return said


async def test_interleaved_sessions_agree_bit_for_bit(checkpoints: str, pipeline: str) -> None:
    draw = np.random.default_rng(SEED)
    async with agree.core(checkpoints) as made:
        walks = [agree.Walk(made, await made.open(pipeline, SEED + i), SEED + i) for i in range(3)]
        said: list[list[dict[str, np.ndarray]]] = [[], [], []]
        for i in draw.permutation([0, 1, 2] * agree.TICKS):
            said[i].append(await walks[i].tick())
    assert agree.apart(said[0], said[1]) > 1e-3  # other seeds, other answers
    for i in range(3):
        assert agree.apart(said[i], await alone(checkpoints, pipeline, SEED + i)) == 0


async def test_batched_sessions_agree(checkpoints: str, pipeline: str) -> None:
    async with agree.core(checkpoints, wait_ms=200.0) as made:
        walks = [agree.Walk(made, await made.open(pipeline, SEED + i), SEED + i) for i in range(3)]
        said = await asyncio.gather(*(walk.walk() for walk in walks))
    for i in range(3):
        want = await alone(checkpoints, pipeline, SEED + i)
        for name in ("act", "scene", "context"):
            kept = [[{k: v for k, v in tick.items() if k == name} for tick in walk] for walk in (said[i], want)]
            assert agree.apart(*kept) <= TOLERANCE, name
        pixels = [[{"frames": t["frames"]} for t in walk if "frames" in t] for walk in (said[i], want)]
        assert agree.apart(*pixels) <= 1  # a level of 255 at most, where rounding is on the edge


async def test_a_fork_goes_on_as_its_parent(checkpoints: str, pipeline: str) -> None:
    async with agree.core(checkpoints) as made:
        parent = agree.Walk(made, await made.open(pipeline, SEED), SEED)
        said = await parent.walk(4)
        child = await parent.fork()
        heirs = [await child.walk(), await parent.walk()]
    want = await alone(checkpoints, pipeline)
    assert agree.apart(said, want[:4]) == 0
    for heir in heirs:
        assert agree.apart(heir, want[4:]) == 0


async def test_whatever_came_after_a_rewind_undoes_it(checkpoints: str, pipeline: str) -> None:
    """Noise follows the epoch, which a rewind begins anew: so all that are compared were rewound."""
    said = []
    async with agree.core(checkpoints) as made:
        for further in (5, 7):
            walk = agree.Walk(made, await made.open(pipeline, SEED), SEED)
            await walk.walk(further)
            await walk.rewind(4)
            said.append(await walk.walk())
    assert agree.apart(*said) == 0


async def test_a_restored_session_goes_on_in_another_process(checkpoints: str, pipeline: str, tmp_path: Path) -> None:
    snapshots, out = tmp_path / "snapshots", tmp_path / "said.npz"
    async with agree.core(checkpoints, str(snapshots)) as made:
        walks = {name: agree.Walk(made, await made.open(name, SEED), SEED) for name in agree.PIPELINES}
        for name, walk in walks.items():
            await walk.walk(5)
            await made.snapshot(walk.info.id, walk.info.token, name)
        here = await walks[pipeline].walk()
    command = [sys.executable, str(_SCRIPT), checkpoints, str(snapshots), str(SEED), "5", str(out)]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    with np.load(out) as found:
        there = [
            {k.split("/")[2]: found[k] for k in found.files if k.startswith(f"{pipeline}/{n}/")}
            for n in range(len(here))
        ]
    assert agree.apart(here, there) == 0
