"""F11: every part of a snapshot flipped, cut, lengthened or gone. It is found out, and nothing of it is loaded."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from zarr.core.sync import cleanup_resources

from ...errors import OmniLoopError, SnapshotError
from ...record.snapshot import ZarrSnapshots
from ...types import TickResult
from ..board import Broken, expect
from .bed import Bed, Robot, bed, nothing_leaks, row, same, some_actions

IN_CI = 64  # corruptions per seed
NAME = "saved"
Damage = Callable[[], None]


def measure(seed: int, full: bool) -> float:
    """Corruptions found: of every file all kinds, in CI some."""
    with tempfile.TemporaryDirectory() as folder, nothing_leaks():
        try:
            return asyncio.run(_all(seed, full, Path(folder)))
        finally:
            cleanup_resources()  # zarr's own loop and threads, which it would keep for ever


async def _all(seed: int, full: bool, folder: Path) -> float:
    draw = np.random.default_rng(seed)
    store = ZarrSnapshots(folder, 1 << 26)
    async with bed(store=store, threads=seed % 2 == 1) as made:
        robot = await made.open(seed)
        await _live(robot, draw)
        await made.core.snapshot(robot.info.id, robot.info.token, NAME)
        damages = list(_damages(folder / NAME, draw))
        order = draw.permutation(len(damages))[: None if full else IN_CI]
        whole = {path: path.read_bytes() for path in _files(folder / NAME)}
        for i in order:
            what, damage = damages[i]
            damage()
            await _refused(made, what)
            _mend(folder / NAME, whole)
        await _goes_on(made, robot, draw)
    return float(len(order))


async def _live(robot: Robot, draw: np.random.Generator) -> None:
    """Something in every kind of state, in a later epoch, with something fed to the next tick."""
    for _ in range(int(draw.integers(4, 9))):
        await _answered(robot.infer(row(draw), frames=2))
    await _answered(robot.predict(some_actions(draw, 3)))
    await _answered(robot.recondition(row(draw, 2)))
    await _answered(robot.infer(row(draw), frames=1))


async def _goes_on(made: Bed, robot: Robot, draw: np.random.Generator) -> None:
    """The mended snapshot is the session, bit for bit."""
    twin = Robot(made, await made.core.restore(NAME), robot.seq, robot.step)
    states = [await made.state_of(r.info.id) for r in (robot, twin)]
    expect(states[0] == states[1], "a restored session's state is not the one that was saved")
    for frames in (0, 2, 1):
        x = row(draw)
        one, other = [await _answered(r.infer(x, frames=frames)) for r in (robot, twin)]
        expect(same(one, other), f"seq {one.seq} of a restored session was answered otherwise")


async def _refused(made: Bed, what: str) -> None:
    before = _books(made)
    try:
        info = await made.core.restore(NAME)
    except SnapshotError as error:
        expect("Traceback" not in error.text and "/tmp" not in error.text, f"{what}: says too much: {error.text}")
    except OmniLoopError as error:
        raise Broken(f"{what}: refused, but not as a bad snapshot: {error.reason}: {error.text}") from error
    else:
        raise Broken(f"{what}: was loaded as session {info.id}")
    await made.settled()
    made.check()
    expect(_books(made) == before, f"{what}: something of it was loaded")


def _books(made: Bed) -> tuple[Any, ...]:
    stats = [runner.state.stats() for runner in made.runners]
    return (
        len(made.core.list_sessions()),
        [(s.sessions, s.reserved_bytes, s.used_bytes, sum(p.references for p in s.pools.values())) for s in stats],
        [runner.connector.health().payloads for runner in made.runners],
    )


async def _answered(call: Any) -> TickResult:
    outcome = await call
    if isinstance(outcome, OmniLoopError):
        raise Broken(f"a sound session was refused: {outcome.text}")
    result: TickResult = outcome
    return result


# Damage -------------------------------------------------------------------------------------------------------


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _mend(folder: Path, whole: dict[Path, bytes]) -> None:
    for path in _files(folder):
        if path not in whole:
            path.unlink()
    for path, content in whole.items():
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def _damages(folder: Path, draw: np.random.Generator) -> Iterator[tuple[str, Damage]]:
    """Every kind for every file: the manifest, the metadata of groups and arrays, and the arrays' bytes."""
    files = _files(folder)
    expect(len(files) > 10, f"a snapshot of {len(files)} files does not hold every state")
    for path in files:
        content, name = path.read_bytes(), path.relative_to(folder).as_posix()
        n = len(content)
        spots = sorted({0, n // 2, n - 1, int(draw.integers(n)), int(draw.integers(n))})
        for at in spots:
            bit = 1 << int(draw.integers(8))
            flipped = bytes([*content[:at], content[at] ^ bit, *content[at + 1 :]])
            yield f"bit {bit} of byte {at} of {name} flipped", _writes(path, flipped)
        for length in sorted({0, n // 2, n - 1}):
            yield f"{name} cut to {length} of {n} bytes", _writes(path, content[:length])
        yield f"{name} longer by a byte", _writes(path, content + b"\0")
        yield f"{name} gone", path.unlink
        yield f"a file beside {name}", _writes(path.with_name("extra"), b"{}")
    sizes: dict[int, Path] = {}
    for path in files:
        twin = sizes.setdefault(path.stat().st_size, path)
        if twin is not path and twin.read_bytes() != path.read_bytes():
            yield (
                f"{path.relative_to(folder)} has what {twin.relative_to(folder)} had",
                _writes(path, twin.read_bytes()),
            )


def _writes(path: Path, content: bytes) -> Damage:
    def damage() -> None:
        path.write_bytes(content)

    return damage
