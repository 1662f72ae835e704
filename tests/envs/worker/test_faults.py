"""What a worker may do wrong: each is a typed error in bounded time, and no process is left."""

from __future__ import annotations

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_loop.errors import ConfigError, EnvFailed, InvalidInput, Reason, StateError, UnknownName, Unsupported
from omni_loop_envs.worker.env import HERE, WorkerEnv
from omni_loop_envs.worker.process import Limits, WorkerProcess
from omni_loop_envs.worker.registered import worker
from omni_loop_envs.worker.side.wire import HEAD, MAGIC, PROTOCOL

GO = np.zeros(1, np.float32)
Script = Callable[[str], tuple[str, ...]]


def bad(what: str) -> WorkerEnv:
    return worker("bad", {"at": 2, "what": what})


def gone(pid: int) -> bool:
    """Neither running nor a zombie of ours."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def two_steps(env: WorkerEnv) -> None:
    env.reset(7)
    env.step(GO)
    env.step(GO)


@pytest.mark.usefixtures("bad_env")
class TestSimulators:
    @pytest.mark.parametrize(
        ("what", "said"),
        [
            ("exit", "ended (exit code 3) when it was asked to 'step'"),
            ("signal", "ended (signal SIGKILL) when it was asked to 'step'"),
            ("raise_", "the simulator raised ValueError: the simulation is unstable"),
        ],
    )
    def test_a_crash_is_said_and_ends_the_env(self, what: str, said: str) -> None:
        env = bad(what)
        two_steps(env)
        with pytest.raises(EnvFailed) as caught:
            env.step(GO)
        assert said in caught.value.text
        assert caught.value.reason is Reason.ENV_FAILED
        assert caught.value.retryable
        assert gone(env.pid)
        with pytest.raises(EnvFailed) as again:  # it does not come back by itself
            env.reset(7)
        assert said in again.value.text
        env.close()

    def test_a_fresh_env_lives_through_the_episode_again(self) -> None:
        env = bad("exit")
        two_steps(env)
        with pytest.raises(EnvFailed):
            env.step(GO)
        env.close()
        fresh = worker("bad", {"at": -1, "what": "exit"})
        two_steps(fresh)
        assert fresh.step(GO).arrays["place"] == 7
        fresh.close()
        assert gone(fresh.pid)

    def test_what_it_printed_last_is_logged(self, caplog: pytest.LogCaptureFixture) -> None:
        env = bad("exit")
        two_steps(env)
        with caplog.at_level(logging.WARNING), pytest.raises(EnvFailed) as caught:
            env.step(GO)
        assert "out of memory, say" in caplog.text
        assert "out of memory" not in caught.value.text  # which may be shown to anyone
        env.close()

    def test_a_hanging_one_is_killed(self) -> None:
        env = bad("hang")
        two_steps(env)
        env._limits = Limits(answer=0.3)  # not before: a busy machine may take longer for what does not hang
        with pytest.raises(EnvFailed, match=r"did not answer 'step' within 0.3 s and was killed"):
            env.step(GO)
        assert gone(env.pid)
        env.close()

    def test_printing_much_stops_nothing(self) -> None:
        env = bad("print")
        two_steps(env)
        assert env.step(GO).arrays["place"] == 7
        env.close()

    def test_one_that_is_killed_from_outside_is_said_at_the_next_request(self) -> None:
        env = bad("exit")
        env.reset(7)
        os.kill(env.pid, signal.SIGKILL)
        with pytest.raises(EnvFailed, match="SIGKILL"):
            env.step(GO)
        env.close()

    def test_nobody_closes_it_and_it_ends_all_the_same(self) -> None:
        env = bad("exit")
        pid = env.pid
        assert not gone(pid)
        del env
        gc.collect()
        assert gone(pid)

    def test_it_ends_with_who_started_it(self) -> None:
        code = (
            "import os, signal\nfrom omni_loop_envs.worker.registered import worker\n"
            "env = worker('bad', {'at': -1, 'what': 'exit'})\nprint(env.pid, flush=True)\nos.kill(os.getpid(), 9)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL
        assert _ends(int(done.stdout))

    @pytest.mark.parametrize("end", ["crash", "close"])
    def test_what_it_started_ends_with_it(self, end: str) -> None:
        env = bad("child")
        child = self.child(env)
        assert _runs(child)
        if end == "crash":
            os.kill(env.pid, signal.SIGKILL)
            with pytest.raises(EnvFailed, match="SIGKILL"):
                env.step(GO)
        env.close()
        assert gone(env.pid)
        assert _ends(child)

    @pytest.mark.parametrize("thread", ["MainThread", "lifeline"])
    def test_what_it_started_ends_with_who_started_it(self, thread: str) -> None:
        """Whichever thread of the worker is the first to see it."""
        code = (
            "import os, signal\nimport numpy as np\nfrom omni_loop_envs.worker.registered import worker\n"
            f"env = worker('bad', {{'at': 0, 'what': 'child', 'ends': {thread!r}}})\nenv.reset(7)\n"
            "child = env.step(np.zeros(1, np.float32)).arrays['place'].item()\n"
            "print(env.pid, int(child), flush=True)\nos.kill(os.getpid(), 9)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60)
        assert done.returncode == -signal.SIGKILL
        assert all(_ends(int(pid)) for pid in done.stdout.split())

    def child(self, env: WorkerEnv) -> int:
        """The process that the env ``child`` started."""
        two_steps(env)
        return int(env.step(GO).arrays["place"].item())

    @pytest.mark.parametrize(("anew", "told"), [(False, "stand still"), (True, "")])
    def test_an_instruction_travels_unless_it_is_of_an_episode(self, anew: bool, told: str) -> None:
        env = worker("bad", {"at": -1, "what": "exit", "anew": anew})
        assert env.instruction == told
        env.close()

    def test_it_leads_a_group_of_its_own(self) -> None:
        env = bad("exit")
        assert os.getpgid(env.pid) == env.pid != os.getpgrp()
        env.close()

    def test_refusals_of_the_env_are_as_if_it_were_here(self) -> None:
        env = worker("bad", {"at": -1, "what": "exit"})
        with pytest.raises(StateError, match="reset it first"):
            env.step(GO)
        with pytest.raises(UnknownName, match="no_such_key"):
            env.reset(7, ("no_such_key",))
        env.reset(7)
        env.close()
        with pytest.raises(StateError) as caught:
            env.reset(7)
        assert caught.value.reason is Reason.CLOSED

    @pytest.mark.parametrize(
        ("env", "options", "error", "said"),
        [
            ("bat", {}, UnknownName, "Did you mean 'bad'"),
            ("bad", {"at": 1}, ConfigError, "needs the option 'what'"),
            ("bad", {"at": 1, "what": "exit", "wat": 1}, ConfigError, "no option 'wat'.*'what'"),
            ("bad", {"at": object(), "what": "exit"}, InvalidInput, "JSON"),
            ("bad", "abc", ConfigError, r"'env_options' of 'worker' is 'abc' \(str\); it must be a mapping"),
        ],
    )
    def test_what_the_worker_refuses_at_the_start_is_the_same_error_here(
        self, env: str, options: Any, error: type[Exception], said: str
    ) -> None:
        with pytest.raises(error, match=said):
            worker(env, options)


def _runs(pid: int) -> bool:
    """Whether it runs; a zombie that nobody reaps (it is not ours any more) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _ends(pid: int) -> bool:
    """Whether it is over before long."""
    deadline = time.monotonic() + 20
    while _runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _runs(pid)


HELLO = 'import json\nspec = {"name": "x", "observations": [], "action": {"name": "action", "dtype": "float32", '
HELLO += '"shape": [1], "low": -1, "high": 1}, "control_hz": 1, "max_steps": 5, "score": None, "instruction": "", '
HELLO += '"versions": {}}\ndef take(n):\n    return bytearray(link.recv(n, socket.MSG_WAITALL))\n'
HELLO += "def say(**fields):\n    link.sendall(wire.pack(wire.Message(fields)))\n"


class TestProtocol:
    def made(self, command: tuple[str, ...], **limits: float) -> WorkerEnv:
        return WorkerEnv("x", "any", {}, command=command, limits=Limits(**{"start": 30.0, "answer": 30.0, **limits}))

    @pytest.mark.parametrize(
        ("code", "said"),
        [
            ("link.sendall(b'HTTP/1.1 400 Bad Request' * 9); time.sleep(60)", "what is no message: it begins with"),
            (f"link.sendall({HEAD.pack(MAGIC, PROTOCOL, 1 << 30, 0)!r}); time.sleep(60)", "no message: it announces"),
            (f"link.sendall({MAGIC!r}); link.close(); time.sleep(60)", "its connection was lost"),
            ("say(id=99, spec=spec); time.sleep(60)", "answered another request"),
            ("say(id=1, spec={}); time.sleep(60)", "describes its env wrongly"),
            ("spec['action'] = 3; say(id=1, spec=spec); time.sleep(60)", "describes its env wrongly"),
            (
                "spec['max_steps'] = float('inf'); say(id=1, spec=spec); time.sleep(60)",
                "describes its env wrongly (Overf",
            ),
            ("say(id=1, error='no'); time.sleep(60)", "an error that is none"),
            ("sys.exit(5)", "exit code 5"),
        ],
    )
    def test_nonsense_is_said_and_ends_the_worker(self, script: Script, code: str, said: str) -> None:
        with pytest.raises(EnvFailed) as caught:
            self.made(script(HELLO + code))
        assert said in caught.value.text

    def test_another_version_is_said(self, script: Script) -> None:
        head = HEAD.pack(MAGIC, PROTOCOL + 1, 2, 0) + b"{}"
        with pytest.raises(Unsupported, match=f"of another version: .*version {PROTOCOL + 1}.*version {PROTOCOL}"):
            self.made(script(f"link.sendall({head!r}); time.sleep(60)"))

    def test_a_worker_refuses_another_version(self) -> None:
        process = WorkerProcess("x", HERE)
        process._link.sendall(HEAD.pack(MAGIC, PROTOCOL + 1, 2, 0) + b"{}")
        with pytest.raises(InvalidInput, match=f"no message.*version {PROTOCOL + 1}"):
            process.ask("hello", 30.0)
        process.close()
        assert gone(process.pid)

    def test_one_that_says_nothing_is_killed(self, script: Script) -> None:
        with pytest.raises(EnvFailed, match=r"did not answer 'hello' within 0.5 s"):
            self.made(script("time.sleep(60)"), start=0.5)

    @pytest.mark.parametrize(
        ("answer", "said"), [("say(id=2, outcome={})", "without its outcome"), ("say(id=2)", "without its outcome")]
    )
    def test_a_step_without_outcome_is_said(self, script: Script, answer: str, said: str) -> None:
        more = "wire.read(take); say(id=1, spec=spec); wire.read(take); say(id=2); wire.read(take); "
        env = self.made(script(HELLO + more + answer.replace("id=2", "id=3") + "; time.sleep(60)"))
        env.reset(1)
        with pytest.raises(EnvFailed, match=said):
            env.step(GO)
        assert gone(env.pid)

    def test_an_array_that_is_not_as_its_spec_says_is_refused(self, script: Script) -> None:
        code = "spec['observations'] = [{'name': 'place', 'dtype': 'float32', 'shape': [3]}]\n"
        code += "wire.read(take); say(id=1, spec=spec); wire.read(take); import numpy\n"
        code += "link.sendall(wire.pack(wire.Message({'id': 2}, {'place': numpy.zeros(2)}))); time.sleep(60)"
        env = self.made(script(HELLO + code))
        with pytest.raises(EnvFailed, match=r"gave float64\[2\] for 'place', which is float32\[3\]"):
            env.reset(1)

    def test_a_program_that_is_not_there_is_said(self) -> None:
        with pytest.raises(EnvFailed, match="cannot be started: No such file"):
            self.made(("/no/such/python",))

    def test_one_that_does_not_close_is_killed(self, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("omni_loop_envs.worker.process._CLOSE_S", 0.3)
        env = self.made(script(HELLO + "wire.read(take); say(id=1, spec=spec); time.sleep(60)"))
        env.close()
        env.close()
        assert gone(env.pid)
