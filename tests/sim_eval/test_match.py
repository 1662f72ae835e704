"""Specs of pipeline and env, held against each other before the first step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from omni_loop import registry
from omni_loop.errors import ConfigError
from omni_loop.types import ArraySpec, SessionSpec
from omni_loop_sim_eval.match import check_match
from omni_loop_sim_eval.runner import run_suite

from .toy import SPEC, ToyEnv, ToyServer, toy_suite


def action(**changes: Any) -> SessionSpec:
    return replace(SPEC, action=replace(SPEC.action, **changes))


def image(**changes: Any) -> SessionSpec:
    return replace(SPEC, observations=(replace(SPEC.observations[0], **changes), *SPEC.observations[1:]))


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (action(dtype="float64"), "gives actions of float64, env 'toy' takes float32"),
        (action(unit="m"), "gives actions in m, env 'toy' takes px"),
        (action(low=-1, high=1), r"gives actions within -1\.\.1, env 'toy' takes 0\.\.512"),
        (image(dtype="float32"), r"gives image as uint8\[32, 32, 3\].*takes float32\[32, 32, 3\]"),
        (image(shape=(32, 32)), r"takes uint8\[32, 32\]"),
        (image(unit="BGR"), "gives image in RGB, pipeline 'toy' takes BGR"),
        (
            replace(SPEC, observations=(*SPEC.observations, ArraySpec("wrist", "uint8", (32, 32, 3)))),
            r"needs the observation 'wrist', suite 'toy-suite' sends image, position; env 'toy' has none",
        ),
        (
            replace(SPEC, observations=tuple(replace(o, optional=False) for o in SPEC.observations)),
            r"needs the observation 'goal', suite 'toy-suite' sends image, position$",
        ),
        (replace(SPEC, observations=SPEC.observations[1:]), "takes no observation 'image'"),
    ],
)
def test_what_does_not_fit_is_named_with_both_sides(spec: SessionSpec, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_match(toy_suite(), Told(), spec)


class Told(ToyEnv):
    """The toy env with units."""

    action = replace(ToyEnv.action, unit="px")
    observations = (replace(ToyEnv.observations[0], unit="RGB"), *ToyEnv.observations[1:])


@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        action(unit="px"),
        action(low=None, high=None),
        image(shape=(-1, -1, 3)),
        replace(SPEC, observations=(*SPEC.observations, ArraySpec("wrist", "uint8", (9, 9, 3), optional=True))),
    ],
)
def test_what_one_side_leaves_open_fits(spec: SessionSpec) -> None:
    check_match(toy_suite(), Told(), spec)


@pytest.mark.parametrize("repeat", [1, 3, 7, 11, 13])
@pytest.mark.parametrize("hz", [10.0, 15.0, 25.0, 30.0, 50.0])
def test_a_rate_that_repeats_an_action_exactly_fits_whatever_its_rounding(hz: float, repeat: int) -> None:
    class Fast(ToyEnv):
        control_hz = hz

    check_match(toy_suite(action_repeat=repeat), Fast(), replace(SPEC, control_hz=hz / repeat))
    with pytest.raises(ConfigError, match="runs at"):
        check_match(toy_suite(action_repeat=repeat), Fast(), replace(SPEC, control_hz=1.001 * hz / repeat))


def test_the_action_that_holds_is_one_of_the_env() -> None:
    check_match(toy_suite(hold=[1, 2]), Told(), SPEC)
    with pytest.raises(ConfigError, match=r"hold has 3 numbers, env 'toy' takes actions \[2\]"):
        check_match(toy_suite(hold=[1, 2, 3]), Told(), SPEC)


def test_every_task_is_looked_at_before_the_first_episode() -> None:
    class Other(ToyEnv):
        def __init__(self, wide: bool = False, max_steps: int = 60) -> None:
            super().__init__(max_steps)
            if wide:
                self.action = ArraySpec("action", "float32", (3,))

    server = ToyServer()
    suite = toy_suite(env="wide", tasks=[{"name": "a"}, {"name": "b", "env_options": {"wide": True}}])
    with registry.registered(registry.ENVS, "wide", Other), pytest.raises(ConfigError, match=r"env 'toy' takes \[3\]"):
        run_suite(suite, server.connect)
    assert server.heard == []
