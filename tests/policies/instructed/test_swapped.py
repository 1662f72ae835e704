"""The shipped policies in Meta-World itself: what they are told is what decides."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.connect.base import as_numpy
from omni_loop.env import Env
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_policies.instructed.phrases import TASKS
from omni_loop_policies.instructed.stages import SHIPPED, instruct, instructed_act

pytest.importorskip("metaworld")
SEEDS = (1_700_000, 1_700_001)  # neither of demonstrations nor of evaluations
STEPS, EXECUTE = 150, 8

pytestmark = pytest.mark.skipif(not (SHIPPED / "metaworld").exists(), reason="no checkpoint is shipped yet")


class Player:
    """Plays episodes under an instruction."""

    def __init__(self) -> None:
        self._reader, self._actor, self._episodes = Driver(instruct()), Driver(instructed_act()), 0

    def succeeds(self, env: Env, seed: int, text: str) -> bool:
        self._episodes += 1
        session = f"episode{self._episodes}"
        for driver in (self._reader, self._actor):
            driver.open(session, seed, text)
        state = env.reset(seed, ("state",))["state"]
        for tick, step in enumerate(range(0, STEPS, EXECUTE)):
            for action in self._chunk(session, tick, step, state)[:EXECUTE]:
                made = env.step(action, ("state",))
                if made.success or made.done:
                    return made.success
                state = made.arrays["state"]
        return False

    def close(self) -> None:
        self._reader.close()
        self._actor.close()

    def _chunk(self, session: str, tick: int, step: int, state: NDArray[np.float32]) -> NDArray[np.float32]:
        kv = np.array(as_numpy(self._reader.tick(session, tick, Ask({}, step=step))["kv"].arrays["kv"]))
        inputs = {
            "observation": Payload(PayloadKind.OBSERVATION, {"state": state}),
            "kv": Payload(PayloadKind.KV, {"kv": kv}),
        }
        outputs = self._actor.tick(session, tick, Ask(inputs, step=step))
        return np.array(as_numpy(outputs["chunk"].arrays["actions"]))


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ("reach-v3", "drawer-open-v3"),
        ("pick-place-v3", "reach-v3"),
        ("pick-place-v3", "push-v3"),
        ("push-v3", "pick-place-v3"),
        ("drawer-open-v3", "door-open-v3"),
        ("button-press-v3", "drawer-open-v3"),
        ("door-open-v3", "button-press-v3"),
    ],
)
def test_the_right_instruction_succeeds_and_another_one_fails(task: str, told: str) -> None:
    """In words that no policy was trained on."""
    env: Env = registry.build(registry.ENVS, "metaworld", {"task": task, "max_steps": STEPS})
    player = Player()
    right, wrong = TASKS[task].held_out[0], TASKS[told].held_out[0]
    try:
        assert all(player.succeeds(env, seed, right) for seed in SEEDS)
        assert not any(player.succeeds(env, seed, wrong) for seed in SEEDS)
    finally:
        env.close()
        player.close()
