"""Demonstrations as a LeRobotDataset v3: what LeRobot's own trainers read."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from .. import registry
from ..errors import ConfigError, Unsupported
from ..record.features import ACTION, feature_of, feature_shape, is_image
from ..record.quiet import quiet
from ..types import Array
from .demos import Demos, DemoSet


@runtime_checkable
class Observed(Protocol):
    """What a :class:`DemoSet` offers besides, so that it can be written for others: in which env and for which
    instruction it was made, and what that env gave at some rows, by observation key."""

    @property
    def env(self) -> str: ...

    @property
    def prompt(self) -> str: ...

    def observations(self, demos: Demos, rows: NDArray[np.int64]) -> Mapping[str, Array]: ...


def write(
    demo_set: DemoSet, demos: Demos, folder: Path, progress: Callable[[int, int], None] | None = None
) -> dict[str, int]:
    """Write the successful episodes of ``demos`` to ``folder``, which must not exist.

    A row is what the env gave at a step and the action the expert wanted there (``label``, which is what was executed
    but for noise); the row after the last action is left out. Returns the counts of episodes and rows.

    Raises:
        Unsupported: the set does not say what its env gave.
        ConfigError: ``folder`` exists, or no episode succeeded.
        MissingExtra: lerobot is not installed.
    """
    if not isinstance(demo_set, Observed):
        raise Unsupported("this set of demonstrations does not say what its env gave; it cannot be written for LeRobot")
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that can be made")
    episodes = demos.episodes(successful=True)
    if not len(episodes):
        raise ConfigError(f"no demonstration in {demos.folder} succeeded: there is nothing to learn")
    # Made beside and renamed when complete: an interrupted run leaves no half of a set behind.
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    rows = 0
    with quiet():
        made = _create(demo_set, demos, partial, f"omni_loop/{folder.name}")
        for i, episode in enumerate(episodes):
            wanted = demos.start[episode] + np.arange(demos.length[episode] - 1)
            columns = {feature_of(k): _vectors(v) for k, v in demo_set.observations(demos, wanted).items()}
            columns[ACTION] = demos.label[wanted]
            for row in range(len(wanted)):
                made.add_frame({**{name: column[row] for name, column in columns.items()}, "task": demo_set.prompt})
            made.save_episode()
            rows += len(wanted)
            if progress:
                progress(i + 1, len(episodes))
        made.finalize()
    partial.rename(folder)
    return {"episodes": len(episodes), "rows": rows}


def _vectors(column: Array) -> Array:
    """A column of features as :func:`feature_shape` says: images as they are, all else as vectors."""
    dims = column.shape[1:]
    return column if is_image(column.dtype.name, dims) else column.reshape(len(column), math.prod(dims))


def _create(demo_set: Observed, demos: Demos, folder: Path, repo_id: str) -> Any:
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ModuleNotFoundError as e:
        raise registry.missing_extra(e, "writing a LeRobotDataset ") from e
    env = registry.load(registry.ENVS, demo_set.env)
    first = demo_set.observations(demos, np.zeros(1, np.int64))
    features = {feature_of(key): feature_shape(str(v.dtype), v.shape[1:]) for key, v in first.items()}
    features[ACTION] = feature_shape("float32", demos.label.shape[1:])
    return LeRobotDataset.create(
        repo_id, fps=round(env.control_hz), features=features, root=folder, robot_type=demo_set.env, use_videos=False
    )
