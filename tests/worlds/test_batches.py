"""Sessions in one batch, one after the other and alone: the same results, each its own failures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.connect.base import as_numpy
from omni_loop.errors import InvalidInput, OmniLoopError, StateError, TensorError
from omni_loop.messages import PayloadKind, Scalar
from omni_loop.stage import Outputs, Payload, Stage
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop.types import Op
from omni_loop_worlds.stages import context, decode, frames

Array = NDArray[Any]
TOLERANCE = 1e-5
TICKS = 6  # more than the windows of 3 ticks and 4 frames


def arrays(result: Outputs | Exception) -> dict[str, Array]:
    assert not isinstance(result, Exception), result
    return {f"{o}.{a}": as_numpy(value) for o, payload in result.items() for a, value in payload.arrays.items()}


def close(got: Outputs | Exception, want: Outputs | Exception) -> bool:
    """Within the tolerance of an array's largest value: random weights let latents grow."""
    one, two = arrays(got), arrays(want)
    size = {"frames.frames": 1e5, "frames.scene": 256}  # whole numbers; pixels of the table
    assert one.keys() == two.keys()
    for name, a in one.items():
        b = two[name].astype(np.float64)
        if np.abs(a - b).max(initial=0) > TOLERANCE * max(np.abs(b).max(initial=0), size.get(name, 1)):
            return False
    return True


def same(got: Outputs | Exception, want: Outputs | Exception) -> bool:
    one, two = arrays(got), arrays(want)
    return one.keys() == two.keys() and all((one[n] == two[n]).all() for n in one)


def images(seed: int, n: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (n, 6, 6, 3), np.uint8).repeat(16, 1).repeat(16, 2)


def table(seed: int, n: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(0, 512, (n, 2)).astype(np.float32)


def look(case: int, **changed: Any) -> Ask:
    given = {"image": images(case, 1)[0], "agent_pos": table(case, 2), "executed": table(case + 1, case % 9)}
    if case % 3 == 1:
        given["block_pose"] = np.array([200 + case, 300, case / 9], np.float32)
    return Ask({"observation": Payload(PayloadKind.OBSERVATION, {**given, **changed})}, step=8 * case)


def dream(case: int, n: int = 3, **changed: Any) -> Ask:
    latents = np.random.default_rng(case).normal(size=(n, 16, 72)).astype(np.float32)
    given = {"latents": latents, "actions": np.zeros((n, 2), np.float32), **changed}
    return Ask({"imagined": Payload(PayloadKind.LATENTS, given)})


def see(first: int, n: int, **changed: Any) -> Ask:
    executed = table(7, 64)[max(0, first - 1) : first + n - 1]
    given = {"image": images(3, first + n)[first:], "executed": executed, **changed}
    params: dict[str, Scalar] = {"first_step": first}
    return Ask({"observation": Payload(PayloadKind.OBSERVATION, given)}, Op.RECONDITION, first, params)


def ahead(step: int, n: int, seed: int = 0) -> Ask:
    actions = Payload(PayloadKind.ACTIONS, {"actions": table(seed, n)})
    return Ask({"actions": actions}, Op.PREDICT, step, {"frames": n})


def infer(case: int, n: int) -> Ask:
    """As behind the context stage and the act head."""
    latents = np.random.default_rng(case).normal(size=(1, 16, 72)).astype(np.float32)
    inputs = {"latents": Payload(PayloadKind.LATENTS, {"latents": latents}), **ahead(0, n, case).inputs}
    return Ask(inputs, Op.INFER, 8 * case, {"frames": n})


def show(case: int, n: int) -> Ask:
    latents = np.random.default_rng(case).normal(size=(n, 16, 72)).astype(np.float32)
    return Ask({"latents": Payload(PayloadKind.LATENTS, {"latents": latents}, {"first_step": case})})


Script = list[Ask]


def context_scripts() -> dict[str, Script]:
    """Some sessions begin later, some dream, one wakes up."""
    scripts = {f"s{i}": [look(10 * i + t) for t in range(TICKS)] for i in range(4)}
    scripts["dreamer"] = [look(3), *[dream(t) for t in range(1, TICKS)]]
    scripts["waker"] = [look(5), dream(6), dream(7), look(8), look(9), dream(4, 1)]
    scripts["late"] = [look(1), look(2)]
    return scripts


def frames_scripts() -> dict[str, Script]:
    return {
        "short": [see(0, 1), ahead(0, 1), ahead(1, 1), ahead(2, 2), ahead(4, 1), ahead(5, 1)],
        "long": [see(0, 9), ahead(8, 5), see(9, 2), ahead(10, 8), see(11, 1), ahead(11, 3)],
        "back": [see(0, 6), ahead(5, 4), see(7, 1, executed=table(1, 1)), ahead(7, 2), see(3, 4), ahead(6, 2)],
        "lone": [infer(1, 2), infer(2, 3), infer(3, 8), infer(4, 1), infer(5, 2), infer(6, 2)],
        "anew": [see(0, 3), ahead(2, 8), see(0, 2), ahead(1, 7), see(0, 1), ahead(0, 2)],
        "late": [see(0, 4), ahead(3, 6)],
    }


def decode_scripts() -> dict[str, Script]:
    return {f"s{i}": [show(i + t, (i * t) % 5) for t in range(TICKS)] for i in range(4)}


CASES = {"context": (context, context_scripts), "frames": (frames, frames_scripts), "decode": (decode, decode_scripts)}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, small_checkpoints: Path) -> tuple[Stage, dict[str, Script]]:
    factory, scripts = CASES[request.param]
    return factory(checkpoints=str(small_checkpoints)), scripts()


def opened(stage: Stage, sessions: Mapping[str, Any]) -> Driver:
    driver = Driver(stage, max_sessions=24)
    for seed, name in enumerate(sessions):
        driver.open(name, seed=seed, prompt="push the T" if seed % 2 else "")
    return driver


def test_batched_interleaved_and_solo_runs_agree(case: tuple[Stage, dict[str, Script]]) -> None:
    stage, scripts = case
    made: dict[str, dict[tuple[str, int], Outputs | Exception]] = {"solo": {}, "interleaved": {}, "batched": {}}
    drivers = {mode: opened(stage, scripts) for mode in made}
    for name, script in scripts.items():
        for t, ask in enumerate(script):
            made["solo"][name, t] = drivers["solo"].tick(name, t, ask)
    for t in range(TICKS):
        asks = {name: script[t] for name, script in scripts.items() if t < len(script)}
        for name, ask in asks.items():
            made["interleaved"][name, t] = drivers["interleaved"].tick(name, t, ask)
        for name, outputs in drivers["batched"].together(t, asks).items():
            made["batched"][name, t] = outputs
            drivers["batched"].commit(name, t)
    for key, want in made["solo"].items():
        assert same(made["interleaved"][key], want), key
        assert close(made["batched"][key], want), key
    for driver in drivers.values():
        driver.close()


@pytest.mark.parametrize("size", [2, 5, 16])
@pytest.mark.parametrize("kind", CASES)
def test_other_neighbours_in_a_batch_of_the_same_shape_change_no_bit(
    small_checkpoints: Path, kind: str, size: int
) -> None:
    stage = CASES[kind][0](checkpoints=str(small_checkpoints))

    def ask(case: int) -> Ask:
        return {"context": look(3 * case), "frames": infer(case, 3), "decode": show(case, 2)}[kind]

    names = [f"s{i}" for i in range(size)]
    driver, mine = opened(stage, names), size // 2
    one, two = (
        driver.batch(0, {n: ask(99 if i == mine else i + other) for i, n in enumerate(names)}) for other in (0, 50)
    )
    assert same(one[mine], two[mine])
    assert not same(one[0], two[0])
    driver.close()


def join(driver: Driver, names: list[str], asks: Mapping[str, Ask], gap: int, tick: int) -> dict[str, Outputs]:
    """Each of ``names`` joins ``gap`` passes after the one before it, as a runner lets them."""
    stage: Any = driver.stage
    items = driver.items(tick, asks)
    jobs: dict[str, Any] = {}
    outputs: dict[str, Outputs] = {}
    for passes in range(1000):
        if passes % gap == 0 and passes // gap < len(names):
            name = names[passes // gap]
            jobs[name] = stage.begin(items[name])
        assert stage.advance(list(jobs.values())) == [None] * len(jobs)
        for name in [n for n, job in jobs.items() if job.finished]:
            outputs[name] = stage.finish(jobs.pop(name))
        if len(outputs) == len(names):
            return outputs
    raise AssertionError("jobs never finish")


@pytest.mark.parametrize("gap", [1, 3])
@pytest.mark.parametrize("backwards", [False, True])
def test_jobs_that_join_between_passes_make_the_same_frames(small_checkpoints: Path, gap: int, backwards: bool) -> None:
    """And go on from them: what was committed is the same too."""
    scripts = frames_scripts()
    names = sorted(scripts, reverse=backwards)
    alone, together = (opened(frames(checkpoints=str(small_checkpoints)), scripts) for _ in range(2))
    for t in range(TICKS):
        here = [name for name in names if t < len(scripts[name])]
        outputs = join(together, here, {name: scripts[name][t] for name in here}, gap, t)
        for name in here:
            together.commit(name, t)
            assert close(outputs[name], alone.tick(name, t, scripts[name][t])), (name, t)
    for driver in (alone, together):
        driver.close()


@pytest.mark.parametrize("steps", [1, 2, 4])
def test_a_clean_pass_takes_the_next_frame_along(small_checkpoints: Path, steps: int) -> None:
    """n imagined frames take n s + 1 passes; real ones, which are clean from the start, go by twos. Nobody waits for
    another, and each pass is one launch where equally many frames are held."""
    stage: Any = frames(checkpoints=str(small_checkpoints), denoise_steps=steps)
    driver, launches = opened(stage, "abc"), 0
    serve = stage.model._serve

    def counted(*inputs: Any) -> Any:
        nonlocal launches
        launches += 1
        return serve(*inputs)

    stage.model._serve = counted
    for tick, (asks, want) in enumerate(
        (
            ({"a": see(0, 5), "b": see(0, 5), "c": see(0, 5)}, 3),
            ({"a": ahead(4, 1), "b": ahead(4, 4), "c": ahead(4, 3)}, 4 * steps + 1),
            ({"b": see(9, 1)}, 1),
            ({"a": infer(1, 3)}, 3 * steps + 1),
        )
    ):
        launches = 0
        for name, outputs in driver.together(tick, asks).items():
            assert not isinstance(outputs, Exception), outputs
            driver.commit(name, tick)
        assert launches == want, tick
    driver.close()


def test_a_job_that_leaves_takes_nothing_along(small_checkpoints: Path) -> None:
    """A cancelled job's neighbours go on, and its session is as before."""
    stage: Any = frames(checkpoints=str(small_checkpoints))
    driver = opened(stage, "abc")
    asks = {name: ahead(2, 4, i) for i, name in enumerate("abc")}
    for name in "abc":
        driver.tick(name, 0, see(0, 3))
    want = {}
    for name, ask in asks.items():
        want[name] = driver.run(name, 1, ask)
        driver.discard(name, 1)
    jobs = {name: stage.begin(item) for name, item in driver.items(1, asks).items()}
    for _ in range(4):
        stage.advance(list(jobs.values()))
    del jobs["a"]
    driver.discard("a", 1)
    while not all(job.finished for job in jobs.values()):
        stage.advance([job for job in jobs.values() if not job.finished])
    for name, job in jobs.items():
        assert close(stage.finish(job), want[name])
        driver.discard(name, 1)
    assert same(driver.tick("a", 1, asks["a"]), want["a"])
    driver.close()


def test_a_job_writes_nothing_before_it_finishes(small_checkpoints: Path) -> None:
    stage: Any = frames(checkpoints=str(small_checkpoints))
    driver = opened(stage, "s")
    driver.tick("s", 0, see(0, 3))
    blocks = driver.blocks
    job = stage.begin(driver.items(1, {"s": ahead(2, 3)})["s"])
    while not job.finished:
        stage.advance([job])
        assert driver.blocks == blocks
    stage.finish(job)
    assert driver.blocks == blocks + 3
    driver.discard("s", 1)
    driver.close()


F32 = np.float32
BROKEN: dict[str, dict[str, tuple[Ask, type[OmniLoopError]]]] = {
    "context": {
        "nothing": (Ask({}), StateError),
        "an image of another size": (look(0, image=images(0, 1)[0, :90]), TensorError),
        "an image of floats": (look(0, image=images(0, 1)[0].astype(F32)), TensorError),
        "three positions": (look(0, agent_pos=table(0, 3)), TensorError),
        "positions in space": (look(0, agent_pos=np.zeros((2, 3), F32)), TensorError),
        "an action of three": (look(0, executed=np.zeros((2, 3), F32)), TensorError),
        "a pose of two": (look(0, block_pose=np.zeros(2, F32)), TensorError),
        "no imagined frame": (dream(0, 0), InvalidInput),
        "latents of fewer tokens": (dream(0, latents=np.zeros((2, 15, 72), F32)), TensorError),
        "latents of one axis": (dream(0, latents=np.zeros(72, F32)), TensorError),
        "imagined actions of three": (dream(0, actions=np.zeros((2, 3), F32)), TensorError),
        "an image that is NaN latents": (dream(0, latents=np.full((2, 16, 72), np.nan, F32)), OmniLoopError),
    },
    "frames": {
        "nothing": (Ask({}), InvalidInput),
        "no past": (ahead(0, 1), StateError),
        "images of another size": (see(0, 2, image=images(0, 2)[:, :90]), TensorError),
        "an action too many": (see(0, 2, executed=table(0, 2)), InvalidInput),
        "latents of two frames": (
            Ask({**infer(0, 1).inputs, "latents": show(0, 2).inputs["latents"]}, Op.INFER),
            TensorError,
        ),
        "latents that are NaN": (
            Ask(
                {
                    **infer(0, 1).inputs,
                    "latents": Payload(PayloadKind.LATENTS, {"latents": np.full((1, 16, 72), np.nan, F32)}),
                },
                Op.INFER,
            ),
            OmniLoopError,
        ),
    },
    "decode": {
        "nothing": (Ask({}), OmniLoopError),
        "latents of fewer tokens": (
            Ask({"latents": Payload(PayloadKind.LATENTS, {"latents": np.zeros((2, 15, 72), F32)})}),
            TensorError,
        ),
        "latents that are NaN": (
            Ask({"latents": Payload(PayloadKind.LATENTS, {"latents": np.full((2, 16, 72), np.nan, F32)})}),
            OmniLoopError,
        ),
    },
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, cases in BROKEN.items() for name in cases])
def test_a_broken_item_fails_alone(small_checkpoints: Path, kind: str, name: str) -> None:
    """Its neighbours are answered, its own session is as before."""
    broken, error = BROKEN[kind][name]
    driver = opened(CASES[kind][0](checkpoints=str(small_checkpoints)), ["bad", "a", "b", "c"])
    asks = {n: {"context": look(i), "frames": infer(i, 2), "decode": show(i, 2)}[kind] for i, n in enumerate("abc")}
    want = driver.together(0, asks)
    for n in asks:
        driver.discard(n, 0)
    blocks = driver.blocks
    results = driver.together(0, {"a": asks["a"], "bad": broken, "b": asks["b"], "c": asks["c"]})
    assert isinstance(results["bad"], error), results["bad"]
    for n in asks:
        assert close(results[n], want[n])
        driver.discard(n, 0)
    assert driver.blocks == blocks
    assert isinstance(driver.together(0, {"bad": broken})["bad"], error)
    good = {"context": look(0), "frames": infer(0, 2), "decode": show(0, 2)}[kind]
    assert not isinstance(driver.together(0, {"bad": good})["bad"], Exception)
    driver.discard("bad", 0)
    driver.close()
