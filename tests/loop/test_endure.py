"""Sessions outlive their server: with all they hold, for whoever holds their token, and never unnoticed in part."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_loop.config import SessionConfig
from omni_loop.errors import Code, InvalidInput, OmniLoopError, Reason, ServerUnavailable, StateError, UnknownSession
from omni_loop.loop.endure import Keep
from omni_loop.loop.graph import compile_pipeline
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.pool import Pool
from omni_loop.loop.request import SessionInfo, TickRequest
from omni_loop.record.snapshot import ZarrSnapshots
from omni_loop.runner.runner import RunnerSettings
from omni_loop.runner.state import Budget
from omni_loop.testing.rows.bed import row, same
from omni_loop.testing.rows.inline import InlineRunner
from omni_loop.testing.rows.toys import DIM, NAME, PIPELINE, STAGES, Faults
from omni_loop.types import Op, TickResult


def nothing() -> None:
    """Nobody is fenced."""


class Server:
    """A core that can end well, or without a word."""

    def __init__(self, folder: Path, keep: dict[str, Any]) -> None:
        self.store = ZarrSnapshots(folder, 1 << 26)
        faults = Faults()
        entries = [(f"{NAME}/{name}", (lambda name=name: STAGES[name](faults)), {}) for name in STAGES]
        self.runner = InlineRunner("r", entries, RunnerSettings(budget=Budget(8)))
        self.keep = Keep(self.store, **keep)

    async def start(self, config: SessionConfig | None = None) -> Orchestrator:
        await self.runner.start()
        pool = Pool([compile_pipeline(PIPELINE)], [self.runner])
        self.core = Orchestrator(pool, config or SessionConfig(), 8, store=self.store, keep=self.keep)
        return self.core


@asynccontextmanager
async def server(folder: Path, *, crash: bool = False, **keep: Any) -> AsyncIterator[Orchestrator]:
    made = Server(folder, keep)
    core = await made.start()
    try:
        yield core
    finally:
        while len(core._tasks):
            await core._tasks.wait()
        if crash:
            core._keep = Keep(made.store)  # nothing is written any more; the rest is freed
            core._forget_kept = _nothing_kept  # type: ignore[method-assign]
        await core.stop(0.0)


async def _nothing_kept(session: str, why: OmniLoopError) -> None:
    pass


class Robot:
    def __init__(self, info: SessionInfo, seed: int) -> None:
        self.info, self.draw, self.seq, self.step = info, np.random.default_rng(seed), 0, -1

    async def tick(self, core: Orchestrator, frames: int = 0) -> TickResult:
        self.seq += 1
        self.step += 1
        executed = np.full((min(self.step, 1), DIM), 0.25, np.float32)
        x = row(self.draw)
        self.last = TickRequest(
            self.info.id, self.info.token, self.seq, Op.INFER, self.step, {"x": x}, executed, frames=frames
        )
        return await core.tick(self.last)


async def uncut(folder: Path, ticks: int) -> list[TickResult]:
    async with server(folder) as core:
        robot = Robot(await core.open(NAME, 5), 7)
        return [await robot.tick(core, frames=n % 3) for n in range(ticks)]


def test_a_session_written_at_the_stop_goes_on_bit_for_bit(tmp_path: Path) -> None:
    async def main() -> None:
        want = await uncut(tmp_path / "uncut", 12)
        got = []
        async with server(tmp_path, on_stop=True) as core:
            robot = Robot(await core.open(NAME, 5), 7)
            got += [await robot.tick(core, frames=n % 3) for n in range(6)]
            ref = robot.info.id, robot.info.token
        for part in (range(6, 9), range(9, 12)):  # and once more
            async with server(tmp_path, on_stop=True) as core:
                await core.recall(*ref)
                info = core.session(*ref)
                assert (info.id, info.token, info.last_seq, info.step) == (*ref, robot.seq, robot.step)
                got += [await robot.tick(core, frames=n % 3) for n in part]
        assert all(map(same, got, want))
        assert len(got) == len(want)

    asyncio.run(main())


def test_kept_answers_come_again_from_the_next_server(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path, on_stop=True) as core:
            robot = Robot(await core.open(NAME, 5), 7)
            answers = [await robot.tick(core, frames=n % 3) for n in range(4)]
            ref = robot.info.id, robot.info.token
            number = core.attach(*ref, nothing, None).number
        async with server(tmp_path, on_stop=True) as core:
            await core.recall(*ref)
            attached = core.attach(*ref, nothing, 1)
            assert attached.number > number
            assert [reply.seq for reply in attached.replies] == [2, 3, 4]
            assert attached.forgotten == 0
            assert all(map(same, attached.replies, answers[1:]))
            assert same(await core.tick(robot.last), answers[-1])  # a repeat is no second tick
            assert core.session(*ref).last_seq == 4

    asyncio.run(main())


def test_what_a_killed_server_had_not_written_is_said_to_be_lost(tmp_path: Path) -> None:
    async def main() -> None:
        want = await uncut(tmp_path / "uncut", 4)
        async with server(tmp_path, crash=True, every_ticks=4) as core:
            robot = Robot(await core.open(NAME, 5), 7)
            for n in range(6):
                await robot.tick(core, frames=n % 3)
            ref = robot.info.id, robot.info.token
        async with server(tmp_path, every_ticks=4) as core:
            await core.recall(*ref)
            with pytest.raises(StateError, match="after seq 4, at step 3") as lost:
                core.attach(*ref, nothing, 6)
            assert lost.value.reason is Reason.SESSION_LOST
            with pytest.raises(StateError) as again:  # nor does it go on by itself
                await robot.tick(core)
            assert again.value.reason is Reason.SESSION_LOST
            attached = core.attach(*ref, nothing, 4)  # the client accepts it
            assert (attached.last_seq, attached.accepted, attached.replies) == (4, 4, ())
            fresh = Robot(robot.info, 7)
            for _ in range(4):
                row(fresh.draw)
            assert same(core._live[ref[0]].session.replies.get(4), want[3])
            fresh.seq, fresh.step = 4, 3
            expected = await _fifth(tmp_path / "fifth")
            assert same(await fresh.tick(core, frames=1), expected)

    asyncio.run(main())


def _content(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


async def _fifth(folder: Path) -> TickResult:
    return (await uncut(folder, 5))[-1]


def test_a_client_whose_next_seq_follows_what_was_kept_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        want = await uncut(tmp_path / "uncut", 6)
        async with server(tmp_path, crash=True, every_ticks=2) as core:
            robot = Robot(await core.open(NAME, 5), 7)
            for n in range(4):
                await robot.tick(core, frames=n % 3)
        async with server(tmp_path, every_ticks=2) as core:
            await core.recall(robot.info.id, robot.info.token)
            got = [await robot.tick(core, frames=n % 3) for n in (4, 5)]
        assert all(map(same, got, want[4:]))

    asyncio.run(main())


def test_only_who_opened_it_and_holds_its_token_finds_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path, on_stop=True) as core:
            info = await core.open(NAME, 5, owner="alice")
            await Robot(info, 7).tick(core)
        async with server(tmp_path, on_stop=True) as core:
            texts = set()
            for id, token, owner in (
                (info.id, "guess", "alice"),
                (info.id, info.token, "mallory"),
                (info.id, info.token, ""),
                ("0" * 16, info.token, "alice"),
                ("../../etc", info.token, "alice"),
            ):
                await core.recall(id, token, owner)
                with pytest.raises(UnknownSession) as refused:
                    core.session(id, token, owner)
                texts.add(refused.value.text)
            assert len(texts) == 1
            assert not core.list_sessions()
            await core.recall(info.id, info.token, "alice")
            assert core.session(info.id, info.token, "alice").last_seq == 1
            assert core.count("alice") == 1
        held = await asyncio.to_thread(_content, tmp_path)
        assert info.token.encode() not in held

    asyncio.run(main())


def test_names_of_kept_sessions_are_not_for_clients(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path, on_stop=True) as core:
            info = await core.open(NAME, 5)
            name = f"session-{info.id}"
            with pytest.raises(InvalidInput, match="take another"):
                await core.snapshot(info.id, info.token, name)
            with pytest.raises(InvalidInput, match="take another"):
                await core.restore(name)

    asyncio.run(main())


def test_a_closed_session_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path, on_stop=True, every_ticks=1) as core:
            info = await core.open(NAME, 5)
            await Robot(info, 7).tick(core)
            while len(core._tasks):
                await core._tasks.wait()
            assert await asyncio.to_thread(os.listdir, tmp_path) == [f"session-{info.id}"]
            await core.close(info.id, info.token)
        assert not await asyncio.to_thread(os.listdir, tmp_path)

    asyncio.run(main())


def test_ticks_go_on_while_a_slow_disk_writes_and_the_newest_wins(tmp_path: Path) -> None:
    async def main() -> None:
        made = Server(tmp_path, {"every_ticks": 1})
        core = await made.start()
        go, seqs, save = asyncio.Event(), [], made.store.save
        loop = asyncio.get_running_loop()

        def slow(name: str, data: Any) -> Any:
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result()
            seqs.append(data.seq)
            return save(name, data)

        made.store.save = slow  # type: ignore[method-assign]
        robot = Robot(await core.open(NAME, 5), 7)
        for _ in range(5):
            await robot.tick(core)  # answered though nothing can be written
        go.set()
        while len(core._tasks):
            await core._tasks.wait()
        assert seqs == [1, 5]
        await core.stop(0.0)

    asyncio.run(main())


def test_a_disk_that_fails_loses_no_tick_and_fails_the_stop(tmp_path: Path) -> None:
    async def main() -> None:
        made = Server(tmp_path, {"every_ticks": 1, "on_stop": True})
        core = await made.start()

        def full(name: str, data: Any) -> Any:
            from omni_loop.errors import SnapshotError

            raise SnapshotError("no space is left")

        made.store.save = full  # type: ignore[method-assign]
        robot = Robot(await core.open(NAME, 5), 7)
        answers = [await robot.tick(core) for _ in range(3)]
        assert [answer.seq for answer in answers] == [1, 2, 3]
        with pytest.raises(OmniLoopError, match="no space is left"):
            await core.stop(0.0)
        assert not core.list_sessions()

    asyncio.run(main())


def test_a_restored_session_that_is_evicted_is_made_anew_after_later_writes(tmp_path: Path) -> None:
    """What it began with is replaced by what is written later; its log begins there then."""

    async def main() -> None:
        want = await uncut(tmp_path / "uncut", 9)
        async with server(tmp_path, on_stop=True) as core:
            robot = Robot(await core.open(NAME, 5), 7)
            for n in range(3):
                await robot.tick(core, frames=n % 3)
        async with server(tmp_path, every_ticks=2) as core:
            await core.recall(robot.info.id, robot.info.token)
            live = core._live[robot.info.id]
            got = []
            for n in range(3, 9):
                got.append(await robot.tick(core, frames=n % 3))
                while len(core._tasks):
                    await core._tasks.wait()
                async with live.turn:
                    live.session.machine.evicted()
        assert all(map(same, got, want[3:]))

    asyncio.run(main())


def test_nobody_new_is_let_in_while_the_server_stops(tmp_path: Path) -> None:
    async def main() -> None:
        async with server(tmp_path, on_stop=True) as core:
            info = await core.open(NAME, 5)
        async with server(tmp_path, on_stop=True) as core:
            core._draining = True
            with pytest.raises(ServerUnavailable) as refused:
                await core.recall(info.id, info.token)
            assert refused.value.code is Code.UNAVAILABLE
            assert refused.value.retryable
            core._draining = False

    asyncio.run(main())
