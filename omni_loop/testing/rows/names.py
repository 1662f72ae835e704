"""Row S4: names that a client sends never leave their root: nothing outside is read or written."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from google.protobuf.message import Message

from ...client import AsyncClient, AsyncSession
from ...errors import Code, OmniLoopError, Reason
from ...record.snapshot import ZarrSnapshots
from ...wire import loop_pb2 as pb
from ..board import Broken, expect
from .served import served
from .toys import NAME

CASES = 200
DECOY = "decoy"  # a whole snapshot beside the root: reading it would work
_STEPS = (
    "..",
    "../..",
    "./..",
    "..\\..",
    "....//",
    "..;",
    "..%2f..",
    "%2e%2e",
    "\uff0e\uff0e",
    "..\0",
    "~",
    "//..",
    "a/../..",
)
_ENDS = (
    DECOY,
    f"{DECOY}/",
    f"{DECOY}\0",
    f"/{DECOY}",
    f"\\{DECOY}",
    f"root/../{DECOY}",
    "etc/passwd",
    ".ssh/id",
    "CON",
    "\n",
)


def measure(seed: int, full: bool) -> float:
    """Names refused, each by three methods."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(seed, Path(folder)))


async def _measure(seed: int, outer: Path) -> float:
    root = outer / "root"
    root.mkdir()
    async with served(store=ZarrSnapshots(outer, 1 << 30)) as made, made.client() as client:
        decoy = await client.open(NAME, seed=seed)
        await decoy.snapshot(DECOY)
    before = _tree(outer)
    refused = 0
    async with served(store=ZarrSnapshots(root, 1 << 30)) as made, made.client() as client:
        session = await client.open(NAME, seed=seed)
        for name in names(outer, seed):
            for what in ("Snapshot", "Restore", "OpenSession"):
                await _refused(client, session, what, name)
                refused += 1
        await session.snapshot("right")
        expect((root / "right").exists(), "a right name is not kept in its root: this row proves nothing")
        again = await client.restore("right")
        await again.close()
        await session.close()
    after = {path: data for path, data in _tree(outer).items() if not path.is_relative_to(root)}
    expect(after == {p: d for p, d in before.items() if not p.is_relative_to(root)}, "something outside was written")
    expect({path.name for path in root.iterdir()} <= {"right"}, "other names than the right one are in the root")
    return refused


def names(outer: Path, seed: int) -> list[str]:
    """Names that lead out of a folder for one reader of names or another."""
    fixed = [f"{step}/{end}" for step, end in itertools.product(_STEPS, _ENDS)]
    fixed += [str(outer / DECOY), f"file://{outer / DECOY}", "/dev/null", "/", ".", "..", "", "x" * 101, "x" * 5000]
    draw, made = random.Random(seed), dict.fromkeys(fixed)
    while len(made) < CASES:
        name = "/".join(draw.choice(_STEPS) for _ in range(draw.randrange(1, 6))) + "/" + draw.choice(_ENDS)
        made[draw.choice((name, urllib.parse.quote(name, safe=""), f"right/{name}", f"right{name}"))] = None
    return list(made)


async def _refused(client: AsyncClient, session: AsyncSession, what: str, name: str) -> None:
    """Past the client's own checks: as bytes that anyone could send."""
    ref = session._book.ref
    requests: dict[str, Message] = {
        "Snapshot": pb.SnapshotRequest(session=ref, name=name),
        "Restore": pb.RestoreRequest(name=name),
        "OpenSession": pb.OpenSessionRequest(pipeline=name),
    }
    reply = pb.SnapshotReply if what == "Snapshot" else pb.OpenSessionReply
    try:
        await client.call(what, requests[what], reply)
    except OmniLoopError as error:
        right = error.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND) and error.reason is not Reason.STAGE_FAILED
        expect(right, f"{what} of {name!r}: {error.code} ({error.reason}): {error.text}")
        return
    raise Broken(f"{what} takes the name {name!r}")


def _tree(folder: Path) -> dict[Path, bytes]:
    return dict(_files(folder))


def _files(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for path in sorted(folder.rglob("*")):
        yield path, path.read_bytes() if path.is_file() else b""
