"""Whether a pipeline can act in a suite's envs, asked before the first step."""

from __future__ import annotations

import math

from omni_loop.env import Env
from omni_loop.errors import ConfigError, nearest
from omni_loop.types import ArraySpec, SessionSpec

from .suite import EvalSuite


def check_match(suite: EvalSuite, env: Env, spec: SessionSpec) -> None:
    """Refuse a pipeline that cannot act in this env: another action, control rate or observation than it takes.

    Raises:
        ConfigError: which of them, as the env has it and as the pipeline takes it.
    """
    _check_action(env, spec)
    # A third of 25 Hz, three times, is 25 Hz whatever rounding says.
    if not math.isclose(spec.control_hz * suite.action_repeat, env.control_hz):
        repeat = f", {suite.action_repeat} steps an action" if suite.action_repeat > 1 else ""
        raise ConfigError(
            f"pipeline {spec.pipeline!r} acts at {spec.control_hz:g} Hz, "
            f"env {env.name!r} runs at {env.control_hz:g} Hz{repeat}"
        )
    horizon = suite.execution_horizon or spec.execution_horizon
    if not 1 <= horizon <= spec.horizon:
        raise ConfigError(f"execution_horizon {horizon} is not within the chunk of {spec.horizon} steps")
    if suite.hold is not None and (len(suite.hold),) != env.action.shape:
        raise ConfigError(
            f"hold has {len(suite.hold)} numbers, env {env.name!r} takes actions {list(env.action.shape)}"
        )
    given = {s.name: s for s in env.observations}
    for wanted in spec.observations:
        if wanted.name in suite.keys and wanted.name in given:
            _check_observation(env, spec, given[wanted.name], wanted)
        elif not wanted.optional:
            without = "" if wanted.name in given else f"; env {env.name!r} has none.{nearest(wanted.name, given)}"
            raise ConfigError(
                f"pipeline {spec.pipeline!r} needs the observation {wanted.name!r}, "
                f"suite {suite.name!r} sends {', '.join(suite.keys)}{without}"
            )
    known = [s.name for s in spec.observations]
    for key in suite.keys:
        if key not in known:
            raise ConfigError(f"pipeline {spec.pipeline!r} takes no observation {key!r}.{nearest(key, known)}")


def _check_action(env: Env, spec: SessionSpec) -> None:
    theirs, ours = spec.action, env.action
    if theirs.shape != ours.shape:
        raise ConfigError(
            f"pipeline {spec.pipeline!r} gives actions {list(theirs.shape)}, env {env.name!r} takes {list(ours.shape)}"
        )
    if theirs.dtype != ours.dtype:
        raise ConfigError(
            f"pipeline {spec.pipeline!r} gives actions of {theirs.dtype}, env {env.name!r} takes {ours.dtype}"
        )
    # What is not said on one side cannot disagree; a range that differs is another unit or another scaling.
    if theirs.unit and ours.unit and theirs.unit != ours.unit:
        raise ConfigError(
            f"pipeline {spec.pipeline!r} gives actions in {theirs.unit}, env {env.name!r} takes {ours.unit}"
        )
    ranges = [(s.low, s.high) for s in (theirs, ours)]
    if None not in (*ranges[0], *ranges[1]) and ranges[0] != ranges[1]:
        (a, b), (c, d) = ranges
        raise ConfigError(
            f"pipeline {spec.pipeline!r} gives actions within {a:g}..{b:g}, env {env.name!r} takes {c:g}..{d:g}"
        )


def _check_observation(env: Env, spec: SessionSpec, have: ArraySpec, wanted: ArraySpec) -> None:
    fits = len(have.shape) == len(wanted.shape) and all(
        w in (-1, h) for h, w in zip(have.shape, wanted.shape, strict=True)
    )
    if have.dtype != wanted.dtype or not fits:
        raise ConfigError(
            f"env {env.name!r} gives {wanted.name} as {have.dtype}{list(have.shape)}, "
            f"pipeline {spec.pipeline!r} takes {wanted.dtype}{list(wanted.shape)}"
        )
    if have.unit and wanted.unit and have.unit != wanted.unit:
        raise ConfigError(
            f"env {env.name!r} gives {wanted.name} in {have.unit}, pipeline {spec.pipeline!r} takes {wanted.unit}"
        )
