from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from omni_loop.errors import InvalidInput, Reason, StageFailed, StateError
from omni_loop_worlds.imagined import ImaginedEnv, ImaginedVectorEnv, Seen, ServedWorld, Verdict

from .conftest import begin, moves

Make = Callable[..., ImaginedVectorEnv]
ROUNDING = 1  # grey level: what the shape of a batch may change


def judge(seen: Seen) -> Verdict:
    return Verdict(float(seen.step), seen.step == 3 and bool(seen.action[0] > 256), {"half": seen.step / 2})


@pytest.fixture
def make_many(world: ServedWorld) -> Iterator[Make]:
    made: list[ImaginedVectorEnv] = []

    def many(n: int, **options: object) -> ImaginedVectorEnv:
        made.append(ImaginedVectorEnv(world, begin, n, **options))  # type: ignore[arg-type]
        return made[-1]

    yield many
    for envs in made:
        envs.close()


def near(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.abs(a.astype(int) - b).max() <= ROUNDING)


def test_an_episode_does_not_depend_on_how_many_there_are(make_many: Make, make: Callable[..., ImaginedEnv]) -> None:
    actions = moves(5, 4)
    envs = make_many(4)
    assert envs.action_space.shape == (4, 2)
    together = [envs.reset(seed=10)[0], *(envs.step(a)[0] for a in actions)]
    for i in (0, 3):
        alone = make()
        frames = [alone.reset(seed=10 + i)[0], *(alone.step(a[i])[0] for a in actions)]
        assert (frames[0] == together[0][i]).all()
        assert all(near(one, all_[i]) for one, all_ in zip(frames, together, strict=True))
    assert (together[-1][0] != together[-1][1]).any()


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_it_begins_anew_as_gymnasiums_own_vector_env_does(make_many: Make, world: ServedWorld, mode: str) -> None:
    ours = make_many(3, judge=judge, max_steps=4, autoreset_mode=mode)
    theirs = SyncVectorEnv([lambda: ImaginedEnv(world, begin, judge=judge, max_steps=4)] * 3, autoreset_mode=mode)
    assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"] is AutoresetMode(mode)
    try:
        seen = [_same(ours, theirs, "reset", seed=[5, 6, 7])]
        seen += [_same(ours, theirs, "step", actions) for actions in moves(10, 3, seed=2)]
    finally:
        theirs.close()
    ended, cut = (np.stack([step[part] for step in seen[1:]]) for part in (2, 3))
    assert ended.any()
    assert cut.any()


def _same(ours: VectorEnv, theirs: VectorEnv, name: str, *args: object, **kwargs: object) -> list[object]:
    """What both answered to the same call."""
    got, want = (list(getattr(envs, name)(*args, **kwargs)) for envs in (ours, theirs))
    assert near(got[0], want[0])
    for a, b in zip(got[1:-1], want[1:-1], strict=True):
        np.testing.assert_array_equal(a, b)
    _same_info(got[-1], want[-1])
    return got


def _same_info(got: dict[str, object], want: dict[str, object]) -> None:
    assert got.keys() == want.keys()
    for key, value in want.items():
        if isinstance(value, dict):
            _same_info(got[key], value)  # type: ignore[arg-type]
        elif key == "final_obs":
            for a, b in zip(got[key], value, strict=True):  # type: ignore[call-overload]
                assert (a is None) == (b is None)
                assert a is None or near(a, b)
        elif key == "scene":
            np.testing.assert_allclose(got[key], value, atol=0.1)  # type: ignore[arg-type]  # px of 512
        else:
            np.testing.assert_array_equal(got[key], value)  # type: ignore[arg-type]


def test_without_autoreset_the_finished_are_reset_by_a_mask(make_many: Make) -> None:
    envs = make_many(2, judge=judge, autoreset_mode=AutoresetMode.DISABLED)
    envs.reset(seed=1)
    actions = np.array([[500, 1], [1, 1]], np.float32)
    for _ in range(3):
        _, _, ended, _, _ = envs.step(actions)
    assert ended.tolist() == envs.over.tolist() == [True, False]
    with pytest.raises(StateError, match=r"envs \[0\] are over"):
        envs.step(actions)
    frames, infos = envs.reset(seed=[8, None], options={"reset_mask": ended})
    assert (frames[0] == begin(8).arrays["image"][-1]).all()
    assert infos["_seed"].tolist() == [True, False]
    assert [env.present.step for env in envs.envs] == [0, 3]
    envs.step(actions)
    for wrong in (np.array([1, 0]), np.zeros(2, bool), np.ones(3, bool)):
        with pytest.raises(InvalidInput, match="mask"):
            envs.reset(options={"reset_mask": wrong})


def test_all_fork_and_some_go_back(make_many: Make) -> None:
    envs, actions = make_many(2), moves(4, 2)
    frames = [envs.reset(seed=1)[0], *(envs.step(a)[0] for a in actions[:3])]
    twin = envs.fork()
    try:
        assert near(twin.step(actions[3])[0], envs.step(actions[3])[0])
        back, infos = envs.rewind(2, np.array([True, False]))
        assert (back[0] == frames[2][0]).all()
        assert infos["step"].tolist() == [2, 0]
        assert [env.present.step for env in envs.envs] == [2, 4]
        assert [env.present.step for env in twin.envs] == [4, 4]
        assert len(twin.render()) == 2
    finally:
        twin.close()


def test_an_error_of_one_is_raised_when_all_have_answered(make_many: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    envs = make_many(2)
    envs.reset(seed=1)
    monkeypatch.setattr(envs.envs[0]._session, "predict", lambda actions: (_ for _ in ()).throw(StageFailed("no")))
    with pytest.raises(StageFailed):
        envs.step(moves(2))
    assert [env.present.step for env in envs.envs] == [0, 1]
    with pytest.raises(InvalidInput, match=r"actions have shape \[3, 2\], wanted \[2, 2\]"):
        envs.step(moves(3))
    with pytest.raises(InvalidInput, match="3 seeds for 2 envs"):
        envs.reset(seed=[1, 2, 3])
    with pytest.raises(InvalidInput, match="num_envs is 0"):
        make_many(0)


def test_numpys_numbers_are_seeds_and_a_closed_one_says_so(make_many: Make) -> None:
    envs = make_many(2)
    frames, infos = envs.reset(seed=np.int64(3))  # type: ignore[arg-type]
    assert infos["seed"].tolist() == [3, 4]
    assert (envs.reset(seed=np.array([3, 4]))[0] == frames).all()  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"seed is 1\.5"):
        envs.reset(seed=1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no option 'x'; it takes reset_mask"):
        envs.reset(options={"x": 1})
    with pytest.raises(InvalidInput, match=r"calls is 1\.5"):
        envs.rewind(1.5)  # type: ignore[arg-type]
    envs.close()
    with pytest.raises(StateError, match="closed") as caught:
        envs.reset(seed=1)
    assert caught.value.reason == Reason.CLOSED
