"""Runners behind their handles: the thread and the spawned process are told and answer the same."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omni_loop.connect.base import as_numpy
from omni_loop.errors import InvalidInput, OmniLoopError, Reason, ServerUnavailable, StageFailed, StateError
from omni_loop.messages import (
    CloseSession,
    Commit,
    Discard,
    OpenSession,
    PayloadKey,
    PayloadKind,
    ReleasePayloads,
    Report,
    ResetSession,
    RunStage,
    Scalar,
)
from omni_loop.runner.batcher import Batcher
from omni_loop.runner.handle import RunnerHandle
from omni_loop.runner.local import LocalRunner
from omni_loop.runner.process import ProcessRunner
from omni_loop.runner.runner import RunnerSettings
from omni_loop.stage import Payload, StageItem
from omni_loop.types import Op

from .batch_toys import Logged

STAGE = "p/toy"
Handle = LocalRunner | ProcessRunner
pytestmark = pytest.mark.timeout(300)  # importing torch in a process takes long on a busy machine


def run(handle: RunnerHandle, tick: int, session: str = "s", **params: Scalar) -> RunStage:
    key = PayloadKey("client>toy", session, 0, tick)
    payload = Payload(PayloadKind.OBSERVATION, {"x": np.full(4, tick / 10, np.float32)})
    receipt = handle.connector.put(key, payload)
    return RunStage(session, 0, tick, STAGE, Op.INFER, tick, {"observation": receipt}, params)


async def gone(handle: RunnerHandle, command: RunStage | ReleasePayloads) -> None:
    with pytest.raises(ServerUnavailable) as caught:
        await handle.submit(command)
    assert caught.value.reason is Reason.RUNNER_GONE


async def session(handle: Handle) -> list[list[float]]:
    """A session with failures in between; the numbers it was answered."""
    assert not handle.alive
    assert handle.revisions == {}
    await gone(handle, ReleasePayloads(()))
    await handle.start()
    assert handle.revisions == {STAGE: "toy-1"}
    with pytest.raises(StateError):
        await handle.start()
    assert handle.alive
    assert handle.stages == {STAGE}
    await handle.ping()
    await handle.submit(OpenSession("s", 3, "push"))
    answers = []
    for tick in range(8):
        if tick % 3 == 2:
            with pytest.raises(StageFailed, match="RuntimeError") as caught:
                await handle.submit(run(handle, tick, mode="raise", blocks=3))
            assert "secret" not in caught.value.text
            continue
        done = await handle.submit(run(handle, tick, imagined=tick > 4))
        await handle.submit(Commit("s", 0, tick, (STAGE,)))
        assert done.model_ms > 0
        assert done.queue_ms > 0
        payload = handle.connector.get(done.outputs["y"])
        assert payload.meta["prompt"] == "push"
        answers.append(as_numpy(payload.arrays["y"]).tolist())
        await handle.submit(ReleasePayloads(tuple(r.key for r in done.outputs.values())))
    await asyncio.gather(*(handle.ping() for _ in range(300)))
    await cancelled_submits_release_their_payloads(handle)
    await handle.submit(CloseSession("s"))
    with pytest.raises(OmniLoopError) as error:
        await handle.submit(CloseSession("s"))
    assert error.value.reason is Reason.UNKNOWN_SESSION
    last = asyncio.ensure_future(handle.submit(ReleasePayloads(())))
    await asyncio.sleep(0)
    await handle.stop()
    await last  # what was submitted before the stop is answered
    assert not handle.alive
    await gone(handle, ReleasePayloads(()))
    await handle.stop()
    return answers


async def cancelled_submits_release_their_payloads(handle: Handle) -> None:
    command = run(handle, 20)
    before = held(handle)
    waiting = asyncio.ensure_future(handle.submit(command))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await handle.submit(Discard("s", 0, 20, (STAGE,)))  # behind it: what it put is put, and its report is here
    await handle.ping()
    assert held(handle) == before


def held(handle: Handle) -> int:
    """Payloads the runner holds."""
    if isinstance(handle, LocalRunner):
        return handle.connector.health().payloads
    segments = [p for p in Path("/dev/shm").iterdir() if f"/{p.name}".startswith(handle._prefix)]
    return sum(p.read_bytes()[:4] != b"FREE" for p in segments)


async def test_a_process_answers_what_a_thread_answers(toys: str) -> None:
    thread = await session(LocalRunner("thread", [(STAGE, f"{toys}:toy", {"gain": 0.5})]))
    process = await session(ProcessRunner("process", [(STAGE, f"{toys}:toy", {"gain": 0.5})], stop_s=60))
    assert len(thread) == 6
    assert process == thread


async def many(handle: Handle, sessions: int = 12) -> list[list[float]]:
    """Three ticks of every session, all at once and each tick submitted whole; their numbers."""
    await handle.start()

    async def one(name: str) -> list[float]:
        numbers: list[float] = []
        await handle.submit(OpenSession(name, 5, "push"))
        for tick in range(3):
            command = run(handle, tick, name, blocks=1 + tick % 2)
            fails = name.endswith("1") and tick == 1
            if fails:
                command = replace(command, params={"mode": "raise"})
            ran = asyncio.ensure_future(handle.submit(command))
            decided = asyncio.ensure_future(handle.submit(Commit(name, 0, tick, (STAGE,))))
            await asyncio.wait([ran, decided])
            assert (ran.exception() is not None, decided.exception() is not None) == (fails, fails)
            if not fails:
                outputs = ran.result().outputs
                numbers += as_numpy(handle.connector.get(outputs["y"]).arrays["y"]).tolist()
                await handle.submit(ReleasePayloads(tuple(r.key for r in outputs.values())))
            handle.connector.cleanup(command.inputs["observation"].key)
        await handle.submit(CloseSession(name))
        return numbers

    answers = await asyncio.gather(*(one(f"s{i}") for i in range(sessions)))
    assert held(handle) == 0
    last = [asyncio.ensure_future(handle.submit(OpenSession(f"t{i}", 0, ""))) for i in range(5)]
    last += [asyncio.ensure_future(handle.submit(run(handle, 0, f"t{i}"))) for i in range(5)]
    await asyncio.sleep(0)
    await handle.stop()
    assert all(future.result() for future in last)  # whatever was submitted before the stop is answered
    return answers


async def test_many_sessions_of_a_process_or_a_thread_are_answered_alike(toys: str) -> None:
    settings = RunnerSettings(max_batch=5, max_wait_ms=2)
    thread = await many(LocalRunner("thread", [(STAGE, f"{toys}:toy", {})], settings))
    process = await many(ProcessRunner("process", [(STAGE, f"{toys}:toy", {})], settings, stop_s=60))
    assert len({tuple(numbers) for numbers in thread}) > 1
    for mine, theirs in zip(process, thread, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


async def test_what_comes_while_a_batch_runs_is_the_next_batch() -> None:
    begun, gate = threading.Event(), threading.Event()

    class Gated(Logged):
        def passed(self, items: Sequence[StageItem]) -> None:
            super().passed(items)
            begun.set()
            gate.wait()

    stage = Gated()
    runner = LocalRunner("gated", [(STAGE, lambda: stage, {})], RunnerSettings(max_batch=4))
    await runner.start()
    for i in range(6):
        await runner.submit(OpenSession(f"s{i}", 0, ""))
    runs = [asyncio.ensure_future(runner.submit(run(runner, 1, "s0")))]
    await asyncio.to_thread(begun.wait)
    runs += [asyncio.ensure_future(runner.submit(run(runner, 1, f"s{i}"))) for i in range(1, 6)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*runs)
    assert stage.log == [("s0",), ("s1", "s2", "s3", "s4"), ("s5",)]
    await runner.stop()


async def test_a_fault_of_the_work_loop_fails_everything_pending(toys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Batcher) -> list[Report]:
        raise RuntimeError("a fault of ours")

    runner = LocalRunner("broken", [(STAGE, f"{toys}:toy", {})])
    await runner.start()
    monkeypatch.setattr(Batcher, "step", broken)
    await gone(runner, ReleasePayloads(()))
    assert not runner.alive
    await gone(runner, ReleasePayloads(()))
    with pytest.raises(RuntimeError, match="a fault of ours"):
        await runner.stop()


async def test_kill_9_fails_everything_pending_and_later(toys: str) -> None:
    runner = ProcessRunner("mortal", [(STAGE, f"{toys}:toy", {})])
    await runner.start()
    await runner.submit(OpenSession("s", 1, ""))
    await runner.submit(run(runner, 1))  # leaves payloads in shared memory
    await runner.submit(Commit("s", 0, 1, (STAGE,)))
    with pytest.raises(InvalidInput) as caught:
        await runner.submit(ResetSession("s", 0, None, "x" * 200_000))
    assert caught.value.reason is Reason.TOO_LARGE
    pending = [asyncio.ensure_future(runner.submit(run(runner, 2, mode="sleep")))]
    # More than any pipe takes: were sending to block, this test would never get further.
    pending += [asyncio.ensure_future(runner.submit(ResetSession("s", 0, None, "x" * 4000))) for _ in range(200)]
    await asyncio.sleep(0.05)
    assert not any(f.done() for f in pending)
    assert runner.pid is not None
    os.kill(runner.pid, signal.SIGKILL)
    for error in await asyncio.gather(*pending, return_exceptions=True):
        assert isinstance(error, ServerUnavailable)
        assert (error.reason, error.retryable) == (Reason.RUNNER_GONE, True)
    assert not runner.alive
    await gone(runner, ReleasePayloads(()))
    await runner.stop()


async def test_a_child_that_hangs_or_cannot_be_built_is_ended(toys: str) -> None:
    hung = ProcessRunner("hung", [(STAGE, f"{toys}:toy", {})], stop_s=0.2)
    no_stage = ProcessRunner("none", [(STAGE, f"{toys}:no_stage", {})])
    crash = ProcessRunner("crash", [(STAGE, f"{toys}:toy", {"crash": True})])
    none, wrong, crashed = await asyncio.gather(hung.start(), no_stage.start(), crash.start(), return_exceptions=True)
    assert none is None
    assert isinstance(wrong, InvalidInput)
    assert "no Stage" in wrong.text
    assert isinstance(crashed, ServerUnavailable)
    await hung.submit(OpenSession("s", 1, ""))
    waiting = asyncio.ensure_future(hung.submit(run(hung, 1, mode="sleep")))
    await asyncio.sleep(0)
    with pytest.raises(ServerUnavailable, match="was killed"):
        await hung.stop()
    with pytest.raises(ServerUnavailable):
        await waiting


async def test_a_thread_that_hangs_is_said_to(toys: str, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(time, "sleep", lambda seconds: release.wait())
    runner = LocalRunner("hung", [(STAGE, f"{toys}:toy", {})], stop_s=0.05)
    await runner.start()
    await runner.submit(OpenSession("s", 1, ""))
    waiting = asyncio.ensure_future(runner.submit(run(runner, 1, mode="sleep")))
    await asyncio.sleep(0)
    with pytest.raises(ServerUnavailable, match="did not end"):
        await runner.stop()
    with pytest.raises(ServerUnavailable):
        await waiting
    release.set()
    assert runner._thread is not None
    await asyncio.to_thread(runner._thread.join)


async def test_a_thread_that_cannot_be_built_says_why(toys: str) -> None:
    runner = LocalRunner("none", [(STAGE, f"{toys}:no_stage", {})])
    with pytest.raises(InvalidInput, match="no Stage"):
        await runner.start()
    await gone(runner, ReleasePayloads(()))
    await runner.stop()


def test_factories_no_other_process_can_import_are_refused() -> None:
    for factory in (lambda: None, threading.Lock()):
        with pytest.raises(InvalidInput, match="cannot be imported"):
            ProcessRunner("p", [(STAGE, factory, {})])  # type: ignore[list-item]


PARENT = """
import asyncio, os, sys
import numpy as np
from omni_loop.messages import OpenSession, PayloadKey, PayloadKind, RunStage
from omni_loop.runner.process import ProcessRunner
from omni_loop.stage import Payload
from omni_loop.types import Op

async def main():
    runner = ProcessRunner("child", [("p/toy", "runner_toys:toy", {})])
    await runner.start()
    await runner.submit(OpenSession("s", 1, ""))
    payload = Payload(PayloadKind.OBSERVATION, {"x": np.ones(4, "f4")})
    receipt = runner.connector.put(PayloadKey("e", "s", 0, 1), payload)
    await runner.submit(RunStage("s", 0, 1, "p/toy", Op.INFER, 0, {"observation": receipt}))
    print(runner.pid, runner.connector.prefix, runner._prefix, flush=True)
    await asyncio.sleep(600)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="shared memory has no directory here")
def test_a_child_does_not_outlive_its_killed_parent(toys: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parent)}
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=env)
    assert parent.stdout is not None
    child, *prefixes = parent.stdout.readline().decode().split()
    left = [p for p in Path("/dev/shm").iterdir() if f"/{p.name}".startswith(tuple(prefixes))]
    assert len(left) == 3
    parent.kill()
    parent.wait()
    # The child holds the writing end too, so this returns when it has ended.
    assert parent.stdout.read() == b""
    parent.stdout.close()
    while Path(f"/proc/{child}").exists() or any(p.exists() for p in left):  # the rest is the resource tracker's
        time.sleep(0.01)
