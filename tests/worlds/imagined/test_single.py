from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.utils.passive_env_checker import env_render_passive_checker
from numpy.typing import NDArray

from omni_loop.client import connect
from omni_loop.errors import (
    ConfigError,
    InvalidInput,
    OmniLoopError,
    Reason,
    ServerUnavailable,
    StageFailed,
    StateError,
    TensorError,
    UnknownName,
    UnknownSession,
)
from omni_loop.errors import Unsupported as Cannot
from omni_loop_worlds.imagined import EnvStart, ImaginedEnv, Seen, ServedWorld, Start, Verdict

from .conftest import begin, moves

Make = Callable[..., ImaginedEnv]


def rollout(env: ImaginedEnv, seed: int | None, actions: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.stack([env.reset(seed=seed)[0], *(env.step(action)[0] for action in actions)])


def after(steps: int) -> Callable[[Seen], Verdict]:
    """Success at that step; every step is worth its number."""
    return lambda seen: Verdict(float(seen.step), seen.step == steps, {"half": seen.step / 2})


# Actions are in the units of the pipeline: pixels.
@pytest.mark.filterwarnings("ignore:.*we recommend using a symmetric and normalized space:UserWarning")
def test_gymnasiums_own_checker_is_content(world: ServedWorld) -> None:
    def factory(render_mode: str | None = None) -> ImaginedEnv:
        return ImaginedEnv(world, begin, max_steps=8, render_mode=render_mode)

    gymnasium.register("Imagined-v0", entry_point=factory)
    try:
        env = gymnasium.make("Imagined-v0", disable_env_checker=True, render_mode="rgb_array")
        check_env(env.unwrapped)
        env_render_passive_checker(env.unwrapped)
        env.close()
    finally:
        del gymnasium.registry["Imagined-v0"]


def test_an_episode_begins_at_its_last_real_frame_and_is_a_function_of_seed_and_actions(make: Make) -> None:
    env = make()
    first = rollout(env, 3, moves(4))
    assert (first[0] == begin(3).arrays["image"][-1]).all()
    assert all((a != b).any() for a, b in itertools.pairwise(first))
    assert (rollout(make(), 3, moves(4)) == first).all()
    assert (rollout(env, 3, moves(4, seed=1))[1] != first[1]).any()
    assert (rollout(env, 4, moves(4))[1] != first[1]).any()
    assert (rollout(env, 3, moves(4)) == first).all()


def test_episodes_without_a_seed_are_drawn_from_the_generator(make: Make) -> None:
    seeds = []
    for env in (make(), make()):
        env.reset(seed=3)
        seeds.append([env.reset()[1]["seed"] for _ in range(3)])
    assert seeds[0] == seeds[1]
    assert len({3, *seeds[0]}) == 4


def test_it_says_where_it_stands(make: Make) -> None:
    env = make(judge=after(3), max_steps=5)
    _, info = env.reset(seed=1)
    assert info == {"seed": 1, "step": 0, "success": False}
    for step in (1, 2, 3):
        frame, reward, terminated, truncated, info = env.step(moves(1)[0])
        assert frame.shape == (96, 96, 3)
        assert (reward, terminated, truncated) == (step, step == 3, False)
        assert (info["step"], info["half"], info["success"]) == (step, step / 2, step == 3)
        assert info["scene"].shape == (9, 2)
    with pytest.raises(StateError, match="over"):
        env.step(moves(1)[0])
    env.reset(seed=1)
    env.step(moves(1)[0])


def test_an_episode_without_success_is_truncated(make: Make) -> None:
    env = make(max_steps=2)
    env.reset(seed=1)
    assert env.step(moves(1)[0])[1:4] == (0.0, False, False)
    assert env.step(moves(1)[0])[1:4] == (0.0, False, True)


def test_a_chunk_is_predicted_by_one_call(make: Make) -> None:
    env = make(chunk=4, max_steps=6)
    assert env.action_space.shape == (4, 2)
    env.reset(seed=1)
    frame, *_, info = env.step(moves(1, 4)[0])
    assert info["frames"].shape == (4, 96, 96, 3)
    assert (info["frames"][-1] == frame).all()
    assert info["step"] == 4
    *_, truncated, info = env.step(moves(1, 4)[0])  # two steps are left
    assert (truncated, info["step"], len(info["frames"])) == (True, 6, 2)


def test_what_follows_success_in_a_chunk_is_not_looked_at(make: Make) -> None:
    env = make(chunk=4, judge=after(3))
    env.reset(seed=1)
    frame, reward, terminated, _, info = env.step(moves(1, 4)[0])
    assert (reward, terminated, info["step"]) == (1 + 2 + 3, True, 3)
    assert (frame == info["frames"][2]).all()
    env.rewind()
    assert env.step(moves(1, 4)[0])[4]["step"] == 3


def test_a_fork_stands_where_its_parent_stands_and_goes_its_own_way(make: Make) -> None:
    env, actions = make(), moves(5)
    rollout(env, 1, actions[:3])
    child, other = env.fork(), env.fork(seed=9)
    try:
        same = [e.step(actions[3])[0] for e in (env, child)]
        assert (same[0] == same[1]).all()
        assert (other.step(actions[3])[0] != same[0]).any()
        ahead = child.step(actions[4])[0]
        env.close()
        assert child.present.step == 5
        assert (child.present.frame == ahead).all()
        child.rewind(4)  # also what its parent imagined
        assert child.present.step == 1
    finally:
        child.close()
        other.close()


def test_a_rewind_goes_back_and_another_future_follows(make: Make) -> None:
    env = make(history=3, judge=after(5))
    actions = moves(6)
    frames = rollout(env, 1, actions[:5])
    assert env.present.over
    frame, info = env.rewind(3)
    assert (frame == frames[2]).all()
    assert (info["step"], info["success"]) == (2, False)
    assert (env.step(actions[5])[0] != frames[3]).any()
    with pytest.raises(StateError, match="2 steps cannot be taken back: between 0 and 1 can"):
        env.rewind(2)
    assert (env.rewind(0)[0] == env.present.frame).all()


@pytest.mark.parametrize(("chunk", "shape"), [(1, (3,)), (1, (1, 2)), (4, (2,)), (4, (3, 2))])
def test_wrong_actions_are_refused_and_change_nothing(make: Make, chunk: int, shape: tuple[int, ...]) -> None:
    env = make(chunk=chunk)
    env.reset(seed=1)
    with pytest.raises(TensorError, match="action"):
        env.step(np.zeros(shape, np.float32))
    with pytest.raises(TensorError, match="outside"):
        env.step(np.full(env.action_space.shape, 513, np.float32))
    assert env.present.step == 0


def test_what_cannot_be_imagined_is_refused_by_name(world_address: str, make: Make, world: ServedWorld) -> None:
    with pytest.raises(UnknownName, match=r"'pusht-word'. Did you mean 'pusht-world'"):
        ImaginedEnv(ServedWorld(world_address, "pusht-word"), begin)
    with pytest.raises(Cannot, match="'pusht' cannot recondition"):
        ImaginedEnv(ServedWorld(world_address, "pusht"), begin)
    with pytest.raises(UnknownName, match="no observation 'picture'"):
        make(frame="picture")
    with pytest.raises(InvalidInput, match=r"chunk is 17; .* predicts 1..16"):
        make(chunk=17)
    for option in ("chunk", "max_steps", "history"):
        with pytest.raises(InvalidInput, match=f"{option} is 0"):
            make(**{option: 0})
    with pytest.raises(InvalidInput, match="render_mode"):
        make(render_mode="human")
    env = ImaginedEnv(world, lambda seed: Start({"picture": begin(seed).arrays["image"]}))
    with pytest.raises(InvalidInput, match="lacks image; it has picture"):
        env.reset(seed=1)
    env.close()


def test_what_is_no_whole_number_and_unknown_options_are_refused(make: Make) -> None:
    env = make(max_steps=np.int32(4))
    frame, info = env.reset(seed=np.int64(3))  # type: ignore[arg-type]
    assert (info["seed"], type(info["seed"])) == (3, int)
    assert (env.reset(seed=3, options={})[0] == frame).all()
    for seed in (1.5, "3", -1):
        with pytest.raises(InvalidInput, match="seed is"):
            env.reset(seed=seed)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="no option 'x'; it takes none"):
        env.reset(options={"x": 1})
    env.step(moves(1)[0])
    with pytest.raises(InvalidInput, match=r"calls is 1\.5"):
        env.rewind(1.5)  # type: ignore[arg-type]
    assert env.rewind(np.int64(1))[1]["step"] == 0  # type: ignore[arg-type]


@pytest.mark.parametrize("gone", [ServerUnavailable("gone"), UnknownSession("expired")])
def test_closing_succeeds_when_the_server_has_nothing_left(
    make: Make, monkeypatch: pytest.MonkeyPatch, gone: OmniLoopError
) -> None:
    env, asked = make(), []
    env.reset(seed=1)
    session = env._session
    assert session is not None
    with monkeypatch.context() as patch:
        patch.setattr(session, "close", lambda: asked.append(1) or (_ for _ in ()).throw(gone))  # type: ignore[func-returns-value]
        env.close()
    session.close()
    assert asked == [1]
    assert env.closed


def test_nothing_works_before_a_reset_or_after_close(make: Make) -> None:
    env = make()
    for call in (lambda: env.step(moves(1)[0]), env.fork, env.rewind):
        with pytest.raises(StateError, match="reset"):
            call()
    env.reset(seed=1)
    env.close()
    env.close()
    with pytest.raises(StateError, match="closed") as caught:
        env.reset(seed=1)
    assert caught.value.reason == Reason.CLOSED


def test_a_failed_prediction_leaves_the_episode_as_it_was(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    env = make()
    frames = rollout(env, 1, moves(2))
    with monkeypatch.context() as patch:
        patch.setattr(env._session, "predict", lambda actions: (_ for _ in ()).throw(StageFailed("no")))
        with pytest.raises(StageFailed):
            env.step(moves(3)[2])
    assert env.present.step == 2
    env.step(moves(3)[2])
    assert (rollout(env, 1, moves(2)) == frames).all()


def test_a_registered_env_gives_the_first_frame(world: ServedWorld) -> None:
    source = EnvStart("pusht")
    env = ImaginedEnv(world, source)
    frame, _ = env.reset(seed=7)
    assert (frame == source.open().reset(7)["image"]).all()
    env.close()
    source.close()
    with pytest.raises(UnknownName, match=r"'pusht' has no observation 'imag'. Did you mean 'image'"):
        EnvStart("pusht", keys={"image": "imag"})(7)


def test_an_env_closes_after_its_server_has_died(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_loop.config import Deployment
    from omni_loop_worlds.imagined import served

    class Small(served.BackgroundServer):
        module = "omni_loop.testing.toy_server"

    monkeypatch.setattr(served, "BackgroundServer", Small)
    world = ServedWorld(Deployment(pipelines=("toy",)), "toy", timeout_s=10).hold()
    spec = world.spec
    assert spec.frame is not None
    image = next(a.name for a in spec.observations if a.shape == spec.frame.shape)
    given = {a.name: np.zeros((1, *(max(n, 1) for n in a.shape)), a.dtype) for a in spec.observations}
    env = ImaginedEnv(world, lambda seed: Start(given), frame=image)
    env.reset(seed=1)
    (entry,) = served._shared.values()
    os.kill(entry.server.pid, signal.SIGKILL)
    env.close()
    assert env.closed
    world.release()
    assert not served._shared


def test_a_server_of_a_deployment_is_shared_and_ends_with_its_last_env(monkeypatch: pytest.MonkeyPatch) -> None:
    from omni_loop.config import Deployment
    from omni_loop_worlds.imagined import served

    class Small(served.BackgroundServer):
        module = "omni_loop.testing.toy_server"

    monkeypatch.setattr(served, "BackgroundServer", Small)
    worlds = [ServedWorld(Deployment(pipelines=("toy",)), "toy").hold() for _ in range(2)]
    addresses = {w._connected().address for w in worlds}
    assert len(addresses) == 1
    with pytest.raises(ConfigError, match="observations"):
        served.frame_key(worlds[0].spec.__class__(**{**_fields(worlds[0].spec), "observations": ()}))
    worlds[0].release()
    with connect(*addresses) as client:
        assert client.info().ready
    worlds[1].release()
    assert not served._shared


def _fields(spec: object) -> dict[str, object]:
    from dataclasses import fields

    return {f.name: getattr(spec, f.name) for f in fields(spec)}  # type: ignore[arg-type]
