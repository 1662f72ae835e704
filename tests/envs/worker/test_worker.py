"""PushT in a worker: the contract of every env, and the same to the bit as here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import numpy as np

from omni_loop import registry
from omni_loop.env import Env
from omni_loop.testing.env_contract import Act, EnvContract
from omni_loop.types import Array
from omni_loop_envs.pusht.env import PushT
from omni_loop_envs.pusht.expert import PushTExpert
from omni_loop_envs.worker.env import WorkerEnv
from omni_loop_envs.worker.environments import SIDE
from omni_loop_envs.worker.registered import worker


class TestWorker(EnvContract):
    expert_episodes = 4  # of the expert PushT's own tests say more

    def make_env(self) -> Env:
        return worker("pusht")

    def make_expert(self, env: Env, seed: int) -> Act:
        expert = PushTExpert()
        expert.reset(seed)

        def act() -> np.ndarray:  # type: ignore[type-arg]
            seen = env.observe(("agent_pos", "block_pose"))
            return expert.act(np.concatenate([seen["agent_pos"][1], seen["block_pose"]]))

        return act


def test_it_is_the_env_to_the_bit() -> None:
    here, there = (
        PushT(max_steps=9),
        registry.build(registry.ENVS, "worker", {"env": "pusht", "env_options": {"max_steps": 7}, "max_steps": 9}),
    )
    assert isinstance(there, WorkerEnv)
    for name in ("name", "observations", "action", "control_hz", "max_steps", "score"):
        assert getattr(here, name) == getattr(there, name), name
    rng = np.random.default_rng(3)
    first: Mapping[str, Array]
    second: Mapping[str, Array]
    for seed in (5, 6, 5):
        first, second = here.reset(seed), there.reset(seed)
        done = False
        while not done:
            assert first.keys() == second.keys()
            assert all(first[key].tobytes() == second[key].tobytes() for key in first)
            assert (here.hold() == there.hold()).all()
            action = rng.uniform(0, 512, 2).astype(np.float32)
            a, b = here.step(action), there.step(action, keys=None)
            outcomes = [(s.reward, s.terminated, s.truncated, s.success, dict(s.info)) for s in (a, b)]
            assert outcomes[0] == outcomes[1]
            first, second, done = a.arrays, b.arrays, a.done
        assert (here.render() == there.render()).all()
    here.close()
    there.close()


def test_the_side_of_the_worker_needs_numpy_alone() -> None:
    """It is started by its path, where nothing of this project is installed."""
    code = f"""
import runpy, sys
class Closed:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("omni_loop", "omni_loop_envs", "pydantic", "msgspec", "gymnasium"):
            raise ImportError(name)
sys.meta_path.insert(0, Closed())
sys.argv = ["side", "not a number"]
try:
    runpy.run_path({str(SIDE)!r}, run_name="__main__")
except ValueError:
    print(*sorted(name for name in sys.modules if name.startswith("omni_loop")))
"""
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60)
    parts = ("", ".adapter", ".server", ".wire")
    assert done.stdout.split() == [f"omni_loop_worker{part}" for part in parts], done.stderr
