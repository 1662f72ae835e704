"""The table of sessions: what it shows of itself, and what callers that go away while they open one leave in it."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from omni_loop.record.snapshot import ZarrSnapshots
from omni_loop.telemetry import metrics

from .toy import Gate, Toy, infer, toy


def shown(phase: str) -> float:
    """``omni_loop_sessions`` as it is scraped."""
    name = f'omni_loop_sessions{{phase="{phase}"}} '
    [line] = [line for line in metrics.exposition().decode().splitlines() if line.startswith(name)]
    return float(line.removeprefix(name))


async def test_sessions_are_shown_by_phase() -> None:
    pytest.importorskip("prometheus_client")
    async with toy() as t:
        info, other = await t.core.open("toy"), await t.core.open("toy")
        assert (shown("idle"), shown("running")) == (2, 0)
        gate = Gate()
        t.script.before["context"] = gate
        tick = asyncio.create_task(t.core.tick(infer(info, 1)))
        await gate.reached()
        assert (shown("idle"), shown("running")) == (1, 1)
        gate.open()
        await tick
        await t.core.close(other.id, other.token)
        assert shown("idle") == 1
    assert shown("idle") == 0
    del t
    gc.collect()
    assert shown("idle") == 0  # of a server that is no more


@pytest.mark.parametrize("how", ["open", "fork", "restore"])
async def test_who_goes_away_while_a_session_is_opened_leaves_none(how: str, tmp_path: Path) -> None:
    """Cancelled after every number of turns of the event loop, until the call is too fast to be cancelled."""
    async with toy(store=ZarrSnapshots(tmp_path, 1 << 30)) as t:
        parent = await t.core.open("toy")
        await t.core.tick(infer(parent, 1))
        await t.core.snapshot(parent.id, parent.token, "kept")
        for turns in range(0, 120, 1 if how == "open" else 3):
            opening = asyncio.create_task(_open(t, how, parent.id, parent.token))
            for _ in range(turns):
                await asyncio.sleep(0)
            opening.cancel()
            try:
                info = await opening
            except asyncio.CancelledError:
                await t.core._tasks.wait()
                assert [s.id for s in t.core.list_sessions()] == [parent.id]
                continue
            await t.core.close(info.id, info.token)
            break
        assert turns > 0


async def _open(t: Toy, how: str, parent: str, token: str):  # type: ignore[no-untyped-def]
    if how == "open":
        return await t.core.open("toy")
    return await (t.core.fork(parent, token) if how == "fork" else t.core.restore("kept"))
