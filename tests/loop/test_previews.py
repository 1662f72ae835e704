"""Frames that are shown while they are made: in order, flagged, void when the tick fails, and without a trace."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_loop import registry
from omni_loop.config import Deployment, RunnerConfig
from omni_loop.errors import DeadlineExceeded, Reason, ServerUnavailable, StageFailed, StateError
from omni_loop.loop.orchestrator import Orchestrator
from omni_loop.messages import Command, Discard, Done, RunStage
from omni_loop.runner.handle import OnPart
from omni_loop.runner.process import ProcessRunner
from omni_loop.stage import StageItem
from omni_loop.types import FramePrediction, Op, TickResult

from .studio import STUDIO, Drawing, Studio, Watched, infer, predict, studio


def values(part: FramePrediction | None) -> list[int]:
    assert part is not None
    return part.frames[:, 0, 0, 0].tolist()


def check_parts(watched: Watched, whole: TickResult, n: int = 4, *, pressed: bool = False) -> None:
    """Parts rise, the preview is first and flagged, and what is no preview shows the pixels of the whole. ``pressed``:
    one runner has many sessions, and may have had no time for any part, the preview among them."""
    parts, result = watched.frames, whole.frames
    assert result is not None
    assert (result.part, result.preview) == (0, False)
    assert len(result.frames) == n
    numbers = [part.part for part in parts]
    assert numbers == sorted(set(numbers))
    assert pressed or numbers[0] == 1
    assert [part.preview for part in parts] == [number == 1 for number in numbers]
    for preview in parts[: numbers.count(1)]:
        assert preview.first_step == result.first_step
        assert values(preview) != values(result)[:1]
    for part in parts[numbers.count(1) :]:
        at = part.first_step - result.first_step
        np.testing.assert_array_equal(part.frames, result.frames[at : at + len(part.frames)])
    assert {(part.seq, part.epoch) for part in parts} == {(whole.seq, whole.epoch)}


async def plain(seeds: list[int], ticks: int = 3, n: int = 4) -> dict[int, list[list[int]]]:
    """What sessions answer that nobody watches."""
    async with studio() as s:
        answers = {}
        for seed in seeds:
            info = await s.open(seed)
            await s.core.tick(infer(info, 1, frames=0, previews=False))
            told = [await s.core.tick(predict(info, seq, n, previews=False)) for seq in range(2, ticks + 2)]
            answers[seed] = [values(t.frames) for t in told]
        return answers


@pytest.mark.parametrize("spread", [False, True], ids=["one runner", "two runners"])
async def test_parts_come_in_order_and_change_nothing(spread: bool) -> None:
    expected = await plain([3])
    async with studio(spread) as s:
        info, told, shown = await s.open(3), [], 0
        await s.core.tick(infer(info, 1, frames=0, previews=False))
        for seq in (2, 3, 4):
            watched = Watched()
            if spread:
                s.desk.pace({info.id: watched})
            else:  # so that there is time to look at parts; how many is up to the machine
                s.desk.before_pass = lambda job: time.sleep(0.01)
            whole = await s.core.tick(predict(info, seq), watched)
            if spread or watched.frames:
                check_parts(watched, whole)
            told.append(values(whole.frames))
            heard = len(watched.heard)
            shown += heard
            await s.core._tasks.wait()
            assert heard == 4 or not spread
            assert len(watched.heard) == heard, "a part came after the end of its tick"
        assert told == expected[3]
        assert shown > 0


async def test_nobody_who_did_not_ask_is_shown_anything() -> None:
    async with studio() as s:
        info, watched = await s.open(), Watched()
        await s.core.tick(infer(info, 1, frames=0, previews=False))
        await s.core.tick(predict(info, 2, previews=False), watched)
        assert watched.heard == []
        assert s.desk.developed == [(info.id, 4)]


async def test_parts_of_what_comes_besides_follow_the_answer() -> None:
    async with studio(spread=True) as s:
        info, watched = await s.open(), Watched()
        s.desk.pace({info.id: watched})
        whole = await s.core.tick(infer(info, 1), watched)
        assert isinstance(watched.heard[0], TickResult)
        assert watched.heard[0].chunk is not None
        assert watched.heard[0].frames is None
        check_parts(watched, whole)
        assert len(watched.heard) == 1 + len(watched.frames)


async def test_a_part_leaves_while_the_next_is_being_drawn() -> None:
    async with studio(spread=True) as s:
        info, watched = await s.open(), Watched()
        await s.core.tick(infer(info, 1, frames=0, previews=False))
        reached, go = s.desk.block(info.id, done=2)
        tick = asyncio.ensure_future(s.core.tick(predict(info, 2), watched))
        assert await asyncio.to_thread(reached.wait, 30)
        async with asyncio.timeout(30):
            await watched.first.wait()  # two passes of eight have ended
        assert watched.frames[0].preview
        go.set()
        check_parts(watched, await tick)


async def test_a_tick_that_fails_half_way_leaves_no_trace() -> None:
    expected = await plain([3], ticks=2)

    def fail(job: Drawing) -> None:
        wait(job)
        if job.passed == 5:
            raise ZeroDivisionError("half way")

    async with studio(spread=True) as s:
        info, watched = await s.open(3), Watched()
        await s.core.tick(infer(info, 1, frames=0, previews=False))
        s.desk.pace({info.id: watched})
        wait, s.desk.before_pass = s.desk.before_pass, fail
        with pytest.raises(StageFailed):
            await s.core.tick(predict(info, 2), watched)
        heard = len(watched.heard)
        s.desk.before_pass = lambda job: None
        assert heard == 3  # the preview and two frames, all void now
        told = [values((await s.core.tick(predict(info, seq))).frames) for seq in (2, 3)]
        assert told == expected[3]
        assert len(watched.heard) == heard


async def test_a_part_that_cannot_be_developed_costs_only_the_parts(caplog: pytest.LogCaptureFixture) -> None:
    expected = await plain([3], ticks=1)

    failed = threading.Event()

    def fail(item: StageItem) -> None:
        if item.inputs["latents"].meta.get("preview") is False:
            failed.set()
            raise ZeroDivisionError("a part")

    def one_part(job: Drawing) -> None:
        assert job.passed == 0 or watched.seen.wait(30)
        assert job.passed < 4 or failed.wait(30)

    async with studio(spread=True) as s:
        info, watched = await s.open(3), Watched()
        await s.core.tick(infer(info, 1, frames=0, previews=False))
        s.desk.before_develop, s.desk.before_pass = fail, one_part
        with caplog.at_level(logging.WARNING):
            whole = await s.core.tick(predict(info, 2), watched)
        assert values(whole.frames) == expected[3][0]
        assert len(watched.frames) == 1
        assert "parts of a tick end: stage 'studio/develop' failed" in caplog.text


@pytest.mark.parametrize("how", ["cancel", "deadline", "close"])
async def test_an_ended_tick_ends_its_job_between_two_passes(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with studio() as s:
        discarded, submit = asyncio.Event(), s.runners[0].submit

        def submitted(command: Command, on_part: OnPart | None = None) -> Coroutine[Any, Any, Done]:
            if isinstance(command, Discard):
                discarded.set()
            return submit(command, on_part)

        monkeypatch.setattr(s.runners[0], "submit", submitted)
        info, watched = await s.open(3), Watched()
        await s.core.tick(infer(info, 1, frames=0, previews=False))
        reached, go = s.desk.block(info.id, done=3)
        request = predict(info, 2, n=8, deadline_ms=50.0 if how == "deadline" else 0.0)
        tick = asyncio.ensure_future(s.core.tick(request, watched))
        assert await asyncio.to_thread(reached.wait, 30)
        closing = None
        if how == "cancel":
            tick.cancel()
        elif how == "close":
            closing = asyncio.ensure_future(s.core.close(info.id, info.token))
        async with asyncio.timeout(30):
            await discarded.wait()
        go.set()
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded, StateError)):
            await tick
        heard = len(watched.heard)
        if closing is not None:
            await closing
        await s.core._tasks.wait()
        assert s.desk.passes.count(info.id) == 4, "the job went on although its tick was over"
        assert len(watched.heard) == heard
        if closing is None:
            again = await s.core.tick(predict(info, 2, n=8))
            assert values(again.frames) == (await plain([3], ticks=1, n=8))[3][0]


async def test_a_repeat_joins_what_is_shown_and_is_computed_once() -> None:
    async with studio(spread=True) as s:
        info, first, second = await s.open(), Watched(), Watched()
        await s.core.tick(infer(info, 1, frames=0, previews=False))
        reached, go = s.desk.block(info.id, done=1)
        ticks = [asyncio.ensure_future(s.core.tick(predict(info, 2), first))]
        assert await asyncio.to_thread(reached.wait, 30)
        ticks.append(asyncio.ensure_future(s.core.tick(predict(info, 2), second)))
        await asyncio.sleep(0)
        s.desk.pace({info.id: first})
        go.set()
        one, two = await asyncio.gather(*ticks)
        assert one is two
        check_parts(first, one)
        assert len(first.frames) == 4
        assert second.frames == first.frames[-len(second.frames) :]
        assert s.desk.passes.count(info.id) == 8


@pytest.mark.parametrize("spread", [False, True], ids=["one runner", "two runners"])
async def test_sessions_that_are_watched_and_that_are_not_share_batches(spread: bool) -> None:
    seeds = list(range(8))
    expected = await plain(seeds)
    async with studio(spread) as s:
        watchers: dict[str, Watched] = {}
        if spread:
            s.desk.pace(watchers)

        async def one(seed: int) -> list[list[int]]:
            info, told = await s.open(seed), []
            await s.core.tick(infer(info, 1, frames=0, previews=False))
            for seq in (2, 3, 4):
                watched = Watched()
                if seed % 2 == 0:
                    watchers[info.id] = watched
                whole = await s.core.tick(predict(info, seq, previews=seed % 2 == 0), watched)
                if seed % 2:
                    assert watched.heard == []
                else:
                    check_parts(watched, whole, pressed=not spread)
                told.append(values(whole.frames))
            return told

        answers = await asyncio.gather(*(one(seed) for seed in seeds))
        assert dict(zip(seeds, answers, strict=True)) == expected
        assert max(s.desk.batches) > 1


@pytest.mark.parametrize("away", ["draw", "develop"])
async def test_parts_cross_into_and_out_of_a_process(away: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))  # a spawned process gets our path
    expected = await plain([3])
    runners = (RunnerConfig(name="main"), RunnerConfig(name="away", stages=(f"studio/{away}",), placement="process"))
    # Slow enough that a part crosses two processes before the whole is there, on any machine.
    stages = tuple(replace(s, options={"pause_s": 0.05}) if s.name == "draw" else s for s in STUDIO.stages)
    with registry.registered(registry.PIPELINES, "studio", replace(STUDIO, stages=stages)):
        core = await Orchestrator.start(Deployment(pipelines=("studio",), runners=runners))
        try:
            s = Studio(core, None, core._pool._handles)  # type: ignore[arg-type]
            info, told = await s.open(3), []
            await core.tick(infer(info, 1, frames=0, previews=False))
            shown = 0
            for seq in (2, 3, 4):
                watched = Watched()
                whole = await core.tick(predict(info, seq), watched)
                if watched.frames:  # how many come before the whole is up to the machine
                    check_parts(watched, whole)
                shown += len(watched.frames)
                told.append(values(whole.frames))
            assert told == expected[3]
            assert shown > 0
            await core._tasks.wait()
            await core.ping()
            assert s.payloads() == 0
        finally:
            await core.stop()


async def test_a_process_that_dies_while_it_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))  # a spawned process gets our path
    away = RunnerConfig(name="away", stages=("studio/draw",), placement="process")
    stages = tuple(replace(s, options={"pause_s": 0.5}) if s.name == "draw" else s for s in STUDIO.stages)
    with registry.registered(registry.PIPELINES, "studio", replace(STUDIO, stages=stages)):
        core = await Orchestrator.start(Deployment(pipelines=("studio",), runners=(RunnerConfig(name="main"), away)))
        try:
            info, watched = await core.open("studio", seed=3), Watched()
            await core.tick(infer(info, 1, frames=0, previews=False))
            tick = asyncio.ensure_future(core.tick(predict(info, 2), watched))
            async with asyncio.timeout(60):
                await watched.first.wait()
            (process,) = [h for h in core._pool._handles if isinstance(h, ProcessRunner)]
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(ServerUnavailable) as caught:
                await tick
            assert caught.value.reason is Reason.RUNNER_GONE
            heard = len(watched.heard)
            await core._tasks.wait()
            assert len(watched.heard) == heard
        finally:
            await core.stop()


async def test_a_stage_with_state_is_not_run_on_parts() -> None:
    async with studio() as s:
        info = await s.open()
        run = RunStage(info.id, 0, 0, "studio/draw", Op.PREDICT, 0, {}, part=1)
        with pytest.raises(Exception, match="has state, so that it cannot run on parts") as caught:
            await s.runners[0].submit(run)
        assert caught.value.reason is Reason.BAD_REQUEST
