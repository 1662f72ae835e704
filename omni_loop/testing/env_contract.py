"""The contract every env must pass: derive from :class:`EnvContract` and say how to make env and expert.

class TestPushT(EnvContract):
    def make_env(self): return PushT()
    def make_expert(self, env): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from ..env import Env
from ..errors import OmniLoopError, Reason, StateError, TensorError, UnknownName
from ..types import Array

Act = Callable[[], Array]


class EnvContract:
    """``make_expert(env, seed)`` is called after ``env.reset(seed)`` and returns a function to its next action."""

    expert_episodes = 10
    expert_rate = 0.9
    first_seed = 3_000_000

    def make_env(self) -> Env:
        raise NotImplementedError

    def make_expert(self, env: Env, seed: int) -> Act:
        raise NotImplementedError

    @pytest.fixture
    def env(self) -> Iterator[Env]:
        env = self.make_env()
        yield env
        env.close()

    def random_actions(self, env: Env, n: int) -> Array:
        low, high = env.action.low, env.action.high
        rng = np.random.default_rng(5)
        values = rng.uniform(-1 if low is None else low, 1 if high is None else high, (n, *env.action.shape))
        return values.astype(np.float32)

    def rollout(self, env: Env, seed: int, n: int) -> list[tuple[dict[str, Array], float, bool, bool, bool]]:
        seen = [(dict(env.reset(seed)), 0.0, False, False, False)]
        for action in self.random_actions(env, n):
            step = env.step(action)
            seen.append((dict(step.arrays), step.reward, step.terminated, step.truncated, step.success))
            if step.done:
                break
        return seen

    def test_arrays_match_their_specs(self, env: Env) -> None:
        for arrays, *_ in self.rollout(env, self.first_seed, 5):
            assert set(arrays) == {spec.name for spec in env.observations}
            for spec in env.observations:
                array = arrays[spec.name]
                assert array.dtype == np.dtype(spec.dtype), spec.name
                assert array.shape == spec.shape, spec.name
                assert array.flags.c_contiguous, spec.name
                assert np.isfinite(array).all(), spec.name
                assert spec.low is None or array.min() >= spec.low, spec.name
                assert spec.high is None or array.max() <= spec.high, spec.name

    def test_action_spec_is_usable(self, env: Env) -> None:
        assert env.action.dtype == "float32"
        assert len(env.action.shape) == 1
        assert env.action.low is not None
        assert env.action.high is not None
        assert env.action.low < env.action.high
        assert env.control_hz > 0
        assert env.max_steps > 0

    def test_same_seed_is_bit_exact_in_the_same_and_in_a_fresh_env(self, env: Env) -> None:
        first = self.rollout(env, self.first_seed, 12)
        self.rollout(env, self.first_seed + 1, 7)  # another episode between must leave nothing behind
        fresh = self.make_env()
        for other in (self.rollout(env, self.first_seed, 12), self.rollout(fresh, self.first_seed, 12)):
            assert len(other) == len(first)
            for (a, *outcome_a), (b, *outcome_b) in zip(first, other, strict=True):
                assert outcome_a == outcome_b
                for name in a:
                    assert a[name].tobytes() == b[name].tobytes(), name
        fresh.close()

    def test_other_seed_is_another_episode(self, env: Env) -> None:
        a, b = env.reset(self.first_seed), env.reset(self.first_seed + 1)
        assert any(a[name].tobytes() != b[name].tobytes() for name in a)

    def test_arrays_are_the_callers_own(self, env: Env) -> None:
        arrays = env.reset(self.first_seed)
        copies = {name: array.copy() for name, array in arrays.items()}
        for action in self.random_actions(env, 5):
            env.step(action)
        for name, array in arrays.items():
            assert array.tobytes() == copies[name].tobytes(), f"{name} changed under the caller"

    def test_only_the_wanted_keys_are_made(self, env: Env) -> None:
        name = env.observations[-1].name
        assert set(env.reset(self.first_seed, keys=(name,))) == {name}
        assert env.step(self.random_actions(env, 1)[0], keys=()).arrays == {}
        assert set(env.observe((name,))) == {name}
        assert env.observe((name,))[name].tobytes() == env.observe()[name].tobytes()

    def test_looking_changes_nothing(self, env: Env) -> None:
        actions = self.random_actions(env, 6)
        env.reset(self.first_seed)
        watched = [(env.render().shape, env.step(a, keys=None).reward)[1] for a in actions]
        env.reset(self.first_seed, keys=())
        assert [env.step(a, keys=()).reward for a in actions] == watched

    def test_unknown_key_is_named(self, env: Env) -> None:
        with pytest.raises(UnknownName, match="no_such_key"):
            env.reset(self.first_seed, keys=("no_such_key",))

    def test_render_is_a_frame(self, env: Env) -> None:
        env.reset(self.first_seed)
        frame = env.render()
        assert frame.dtype == np.uint8
        assert frame.ndim == 3
        assert frame.shape[2] == 3
        assert frame.std() > 0

    @pytest.mark.parametrize("wrong", ["nan", "inf", "wide", "scalar", "high", "low", "text"])
    def test_wrong_actions_are_refused_and_change_nothing(self, env: Env, wrong: str) -> None:
        n = env.action.shape[0]
        good = self.random_actions(env, 1)[0]
        bad = {
            "nan": np.full(n, np.nan, np.float32),
            "inf": np.full(n, np.inf, np.float32),
            "wide": np.zeros(n + 1, np.float32),
            "scalar": np.float32(0),
            "high": np.full(n, np.float32(env.action.high or 0) + 1),
            "low": np.full(n, np.float32(env.action.low or 0) - 1),
            "text": "left",
        }[wrong]
        env.reset(self.first_seed)
        want = env.step(good)
        env.reset(self.first_seed)
        with pytest.raises(TensorError, match="action"):
            env.step(bad)  # type: ignore[arg-type]
        got = env.step(good)
        assert all(got.arrays[k].tobytes() == want.arrays[k].tobytes() for k in want.arrays)

    def test_step_before_reset_is_refused(self, env: Env) -> None:
        with pytest.raises(StateError, match="reset"):
            env.step(self.random_actions(env, 1)[0])

    def test_step_after_the_end_is_refused(self, env: Env) -> None:
        env.reset(self.first_seed)
        rng = np.random.default_rng(1)
        taken = 0
        while True:
            taken += 1
            step = env.step(self.random_actions(env, 8)[rng.integers(8)], keys=())
            if step.done:
                break
        assert step.done
        assert step.terminated != step.truncated
        assert step.terminated or taken == env.max_steps
        with pytest.raises(StateError, match="over"):
            env.step(self.random_actions(env, 1)[0])
        env.reset(self.first_seed)
        env.step(self.random_actions(env, 1)[0])

    def test_close_is_idempotent_and_final(self, env: Env) -> None:
        env.reset(self.first_seed)
        env.close()
        env.close()
        with pytest.raises(OmniLoopError) as caught:
            env.reset(self.first_seed)
        assert caught.value.reason == Reason.CLOSED

    def test_an_expert_succeeds(self, env: Env) -> None:
        """So that a success key nobody sets cannot pass as 0 %."""
        successes = 0
        for seed in range(self.first_seed, self.first_seed + self.expert_episodes):
            env.reset(seed, keys=())
            act = self.make_expert(env, seed)
            for _ in range(env.max_steps):
                step = env.step(act(), keys=())
                if step.success:
                    successes += 1
                if step.success or step.done:
                    break
        assert successes >= self.expert_rate * self.expert_episodes
