"""Sessions that leave a server and go on in another, bit for bit; and what another server refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from omni_loop import registry
from omni_loop.config import Deployment, SessionConfig, SnapshotConfig
from omni_loop.errors import Exhausted, InvalidInput, Reason, SnapshotError, StateError, UnknownName, Unsupported
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.loop.request import SessionInfo
from omni_loop.record.snapshot import ZarrSnapshots

from . import toy as toys
from .toy import Script, Toy, actions, infer, predict, toy
from .walker import ONE, SPEC, TWO, WALKER, walk

PLACED = pytest.mark.parametrize("placement", [ONE, TWO], ids=["one-runner", "two-runners"])


@pytest.fixture
def store(tmp_path: Path) -> ZarrSnapshots:
    return ZarrSnapshots(tmp_path / "snapshots", 1 << 24)


async def saved(t: Toy, name: str = "a", steps: int = 7) -> SessionInfo:
    info = await t.core.open("walker", seed=5, observation_keys=("mark", "extra"))
    await walk(t, info, range(steps))
    await t.core.tick(predict(info, steps + 1, steps=2))
    assert await t.core.snapshot(info.id, info.token, name) > 0
    return info


@PLACED
async def test_a_restored_session_goes_on_bit_for_bit(store: ZarrSnapshots, placement: Sequence[Sequence[str]]) -> None:
    async with toy(WALKER, ONE, store=store) as t:
        info = await saved(t)
        expected = await walk(t, info, range(9, 15), first_seq=9)  # saving it has changed nothing
    async with toy(WALKER, placement, store=store) as t:
        back = await t.core.restore("a")
        assert (back.epoch, back.seed, back.step, back.last_seq) == (0, 5, 8, 8)
        assert back.observation_keys == ("mark", "extra")
        assert back.token != info.token
        assert await walk(t, back, range(9, 15), first_seq=9) == expected
        twin = await t.core.restore("a")
        assert await walk(t, twin, range(9, 15), first_seq=9) == expected


async def test_a_restored_session_forks_rewinds_and_is_saved_again(store: ZarrSnapshots) -> None:
    async with toy(WALKER, TWO, store=store, config=SessionConfig(rewind_ticks=2)) as t:
        await saved(t)
        back = await t.core.restore("a")
        told = await walk(t, back, range(9, 14), first_seq=9)
        child = await t.core.fork(back.id, back.token)
        assert await t.core.rewind(back.id, back.token, 9) == (1, 9)  # by a replay from the snapshot
        assert (await walk(t, back, range(10, 11), first_seq=20))[0][2][0] == told[1][2][0]
        assert await t.core.rewind(child.id, child.token, 8) == (1, 8)  # the snapshot itself
        with pytest.raises(StateError, match=r"steps that can be reached: 8$"):
            await t.core.rewind(child.id, child.token, 7)
        await t.core.snapshot(child.id, child.token, "b")
        again = await t.core.restore("b")
        assert (again.epoch, again.step) == (1, 8)
        assert await walk(t, again, range(9, 12), first_seq=30) == await walk(t, child, range(9, 12), first_seq=30)


async def test_a_snapshot_carries_the_chunk_and_what_was_fed(store: ZarrSnapshots) -> None:
    async with toy(store=store) as t:
        info = await t.core.open("toy", prompt="push")
        await t.core.tick(infer(info, 1, step=3))
        await t.core.tick(predict(info, 2, steps=2))
        await t.core.snapshot(info.id, info.token, "a")
        back = await t.core.restore("a")
        seen: list[str] = []
        t.script.before["frames"] = lambda item: seen.append(item.prompt)
        frames = (await t.core.tick(predict(back, 3, steps=1))).frames
        assert frames is not None
        assert frames.frames[0, 0, 0].tolist() == [2, 2, 0]
        assert seen == ["push"]
        assert actions(await t.core.tick(infer(back, 4, step=5)))[1][0] == 2


async def test_a_snapshot_after_a_recondition_to_the_past(store: ZarrSnapshots) -> None:
    """What is fed lies in the new epoch already while the runners are in the old one."""
    async with toy(WALKER, ONE, store=store) as t:
        info = await saved(t)
        await t.core.tick(toys.recondition(info, 9, first=3, n=2, rows=2))
        await t.core.snapshot(info.id, info.token, "a")
        back = await t.core.restore("a")
        assert (back.epoch, back.step) == (1, 4)
        one, other = [await t.core.tick(predict(i, 10, steps=3)) for i in (info, back)]
        assert one.frames is not None
        assert other.frames is not None
        assert (one.frames.frames == other.frames.frames).all()


async def test_a_fresh_session_can_be_saved(store: ZarrSnapshots) -> None:
    async with toy(WALKER, ONE, store=store) as t:
        info = await t.core.open("walker", seed=5)
        await t.core.snapshot(info.id, info.token, "a")
        back = await t.core.restore("a")
        assert await walk(t, back, range(3)) == await walk(t, info, range(3))


async def test_a_snapshot_of_another_spec_weights_or_options_is_refused(store: ZarrSnapshots) -> None:
    async with toy(WALKER, ONE, store=store) as t:
        await saved(t)
    spec = replace(SPEC, control_hz=20)
    async with toy(replace(WALKER, spec=lambda: spec), ONE, store=store) as t:
        with pytest.raises(SnapshotError, match="of another version of pipeline 'walker': its spec differs"):
            await t.core.restore("a")
    async with toy(replace(WALKER, options={"new": 1}), ONE, store=store) as t:
        with pytest.raises(SnapshotError, match="its options differ"):
            await t.core.restore("a")
    async with toy(store=store) as t:
        with pytest.raises(UnknownName, match="the snapshot is of pipeline 'walker'"):
            await t.core.restore("a")


async def test_a_snapshot_of_other_weights_is_refused_and_nothing_is_left(
    store: ZarrSnapshots, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with toy(WALKER, TWO, store=store) as t:
        await saved(t)
    monkeypatch.setattr(toys.ToyStage, "__init__", _with_revision("toy-2", toys.ToyStage.__init__))
    async with toy(WALKER, TWO, store=store, max_sessions=1) as t:
        with pytest.raises(SnapshotError, match="is of revision 'toy-1'; this server has 'toy-2'"):
            await t.core.restore("a")
        assert t.core.list_sessions() == []
        assert t.payloads() == 0
        await t.core.open("walker")  # the place is free


def _with_revision(revision: str, init: object) -> object:
    def __init__(self: toys.ToyStage, *args: object, **kwargs: object) -> None:
        init(self, *args, **{**kwargs, "revision": revision})  # type: ignore[operator]

    return __init__


async def test_a_corrupt_snapshot_opens_nothing(store: ZarrSnapshots, tmp_path: Path) -> None:
    async with toy(WALKER, TWO, store=store) as t:
        await saved(t)
        victim = max((tmp_path / "snapshots" / "a").rglob("c"), key=lambda p: len(p.parts))
        path = next(p for p in victim.rglob("*") if p.is_file()) if victim.is_dir() else victim
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match="does not match its checksum") as caught:
            await t.core.restore("a")
        assert caught.value.reason is Reason.BAD_SNAPSHOT
        assert len(t.core.list_sessions()) == 1


async def test_restore_needs_a_place(store: ZarrSnapshots) -> None:
    async with toy(WALKER, ONE, store=store, max_sessions=1) as t:
        await saved(t)
        with pytest.raises(Exhausted) as caught:
            await t.core.restore("a")
        assert caught.value.reason is Reason.TOO_MANY_SESSIONS


async def test_a_server_without_a_folder_keeps_no_snapshots() -> None:
    async with toy(WALKER, ONE) as t:
        info = await t.core.open("walker")
        for call in (t.core.snapshot(info.id, info.token, "a"), t.core.restore("a")):
            with pytest.raises(Unsupported, match="this server keeps no snapshots"):
                await call


async def test_a_name_that_cannot_be_and_one_that_is_not_there(store: ZarrSnapshots) -> None:
    async with toy(WALKER, ONE, store=store) as t:
        info = await saved(t)
        with pytest.raises(InvalidInput, match="cannot name a snapshot"):
            await t.core.snapshot(info.id, info.token, "../a")
        with pytest.raises(UnknownName, match="there is no snapshot 'ab'"):
            await t.core.restore("ab")
        assert (await walk(t, info, range(9, 10), first_seq=9))[0][2][0] == 9


async def test_sessions_are_saved_side_by_side(store: ZarrSnapshots) -> None:
    async with toy(WALKER, ONE, store=store) as t:
        infos = [await t.core.open("walker", seed=n) for n in range(4)]
        for info in infos:
            await walk(t, info, range(3))
        await asyncio.gather(*(t.core.snapshot(i.id, i.token, f"s{n}") for n, i in enumerate(infos)))
        backs = await asyncio.gather(*(t.core.restore(f"s{n}") for n in range(4)))
        for info, back in zip(infos, backs, strict=True):
            assert await walk(t, back, range(3, 5)) == await walk(t, info, range(3, 5))


async def test_a_deployment_with_a_folder_keeps_snapshots(tmp_path: Path) -> None:
    stages = [replace(s, factory=f"walker-{s.name}") for s in WALKER.stages]
    script = Script()
    with ExitStack() as stack:
        stack.enter_context(registry.registered(registry.PIPELINES, "walker", replace(WALKER, stages=tuple(stages))))
        for stage in stages:
            stack.enter_context(registry.registered(registry.STAGES, stage.factory, toys._factory(stage.name, script)))
        snapshots = SnapshotConfig(folder=str(tmp_path / "here"))
        deployment = Deployment(pipelines=("walker",), snapshots=snapshots)
        told = []
        for name in ("first", "second"):
            core = await Orchestrator.start(deployment)
            t = Toy(core, script, [])
            info = await core.open("walker", seed=3) if name == "first" else await core.restore("first")
            if name == "first":
                await walk(t, info, range(3))
                await core.snapshot(info.id, info.token, name)
            told.append(await walk(t, info, range(3, 6)))
            await core.stop()
        assert told[0] == told[1]
