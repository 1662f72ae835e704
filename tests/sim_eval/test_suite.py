from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omni_loop import config, registry
from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, UnknownName
from omni_loop.types import ArraySpec
from omni_loop_sim_eval.match import check_match
from omni_loop_sim_eval.suite import load_suite

from .toy import SPEC, ToyEnv, toy_suite


@pytest.mark.parametrize("name", ["pusht-image", "pusht-state", "pusht-plan", "demo"])
def test_shipped_suites_are_unseen_and_fit_what_is_shipped(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    assert suite.unseen
    env = suite.make_env()
    assert env.max_steps == suite.max_steps
    env.close()
    assert suite.pipeline in config.load_deployment(suite.deployment).names
    pipeline = registry.load(registry.PIPELINES, suite.pipeline)
    assert {s.name for s in pipeline.spec().observations if not s.optional} <= set(suite.keys)
    check_match(suite, env, pipeline.spec())


def test_state_and_image_differ_in_the_state_keys_alone() -> None:
    image, state = load_suite("pusht-image"), load_suite("pusht-state")
    assert set(state.keys) - set(image.keys) == {"block_pose"}
    assert image.with_state(True).keys == state.keys
    assert state.with_state(False).keys == image.keys
    assert (state.gives_state, image.gives_state) == (True, False)
    with pytest.raises(ConfigError, match="no state_keys"):
        toy_suite(state_keys=[]).with_state(True)


def test_unknown_key_and_seen_seeds_are_refused(tmp_path: Path) -> None:
    good = (Path(config.__file__).parents[1] / "configs/eval/demo.yaml").read_text()
    path = tmp_path / "x.yaml"
    path.write_text(good.replace("episodes: 20", "episode: 20"))
    with pytest.raises(ConfigError, match=r"'episode'. Did you mean 'episodes'"):
        load_suite(path)
    path.write_text(good.replace("2000000", "1000"))
    with pytest.raises(ConfigError, match=f"first_seed 1000 .* begin at {EVALUATION_SEED}"):
        load_suite(path)
    with pytest.raises(UnknownName, match=r"'pusht-imag'. Did you mean 'pusht-image'"):
        load_suite("pusht-imag")


def test_changed_validates_and_leaves_the_rest() -> None:
    suite = toy_suite()
    assert suite.changed(episodes=None) == suite
    assert suite.changed(episodes=7).episodes == 7
    assert not suite.changed(first_seed=3).unseen
    with pytest.raises(ConfigError, match="episodes"):
        suite.changed(episodes=0)
    with pytest.raises(ConfigError, match="episodes: Input should be less than or equal to 1000000"):
        suite.changed(episodes=10**9)
    with pytest.raises(ConfigError, match="workers: Input should be less than or equal to 256"):
        suite.changed(workers=10_000)
    with pytest.raises(ConfigError, match="first_seed: Input should be less than or equal to"):
        suite.changed(first_seed=(1 << 63) - 1)  # the next one is no int64 of a Parquet file
    with pytest.raises(ConfigError, match=r"hold\[0\]: Input should be a finite number"):
        suite.changed(hold=[float("nan"), 0.0])
    for name in ("../elsewhere", "", ".."):
        with pytest.raises(ConfigError, match="is no name of a folder"):
            suite.changed(name=name)
        with pytest.raises(ConfigError, match=r"tasks\[0\].*name"):
            suite.changed(tasks=[{"name": name}])
    with pytest.raises(ConfigError, match="'pick/place' is no name of a file, and a task's videos are called by it"):
        suite.changed(tasks=[{"name": "pick/place"}])
    with pytest.raises(ConfigError, match="interval"):
        suite.changed(interval="wald")
    with pytest.raises(ConfigError, match="stands twice"):
        suite.changed(keys=["image", "image"])


def test_a_task_of_a_suite_without_tasks() -> None:
    with pytest.raises(UnknownName, match=r"suite 'toy-suite' has no task 'near'. It has none by name"):
        toy_suite().only("near")


def test_env_key_typo_is_named() -> None:
    with pytest.raises(UnknownName, match=r"'positon'. Did you mean 'position'"):
        toy_suite(keys=["image", "positon"]).make_env()
    with pytest.raises(UnknownName, match="no env is called 'toi'"):
        toy_suite(env="toi").make_env()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (replace(SPEC, action=ArraySpec("action", "float32", (3,))), r"gives actions \[3\].*takes \[2\]"),
        (replace(SPEC, control_hz=20), "acts at 20 Hz.*runs at 10 Hz"),
        (replace(SPEC, execution_horizon=9), "execution_horizon 9 is not within the chunk of 8"),
        (
            replace(SPEC, observations=(ArraySpec("image", "uint8", (96, 96, 3)),)),
            r"gives image as uint8\[32, 32, 3\].*takes uint8\[96, 96, 3\]",
        ),
    ],
)
def test_a_pipeline_that_does_not_fit_is_refused(spec: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_match(toy_suite(), ToyEnv(), spec)  # type: ignore[arg-type]
