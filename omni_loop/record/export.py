"""Recorded episodes as a LeRobotDataset v3, written with LeRobot's own code and read by it.

A row is one observed control step: its observation arrays under LeRobot's names, and ``action``, what was executed from
there on. Where every step was observed, rows are control steps and ``fps`` is the control rate. Where every k-th was,
a row of one action would say that it lasted k steps, which is not what happened: it is refused unless ``stride`` says
k; then ``fps`` is the control rate / k and ``action`` holds all k executed actions, one after the other. The actions
after the last observation are those that were sent, when the pipeline sent enough; else that observation is left out.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import ConfigError, InvalidInput, Unsupported, nearest
from ..registry import missing_extra
from ..types import SessionSpec
from .features import ACTION, check_names, feature_of, feature_shape, is_image, renamed
from .outcomes import Outcomes
from .quiet import quiet
from .reader import Episode, Recording
from .timeline import Seen, timeline

DONE, SUCCESS = "next.done", "next.success"
FAILED, UNKNOWN = "it did not succeed", "it is not known to have succeeded"


@dataclass(frozen=True, slots=True)
class Export:
    """How to export. ``names``: observation keys that get another name (``agent_pos`` -> ``state``). ``fps`` None: the
    control rate over ``stride``. ``task`` None: each episode's prompt, or the pipeline's name where there is none.
    ``videos``: images as video, which needs LeRobot's video decoders to read; else as PNG. ``successes``: only episodes
    that are known to have succeeded. ``pipeline``: which, where the recording has several."""

    names: Mapping[str, str] | None = None
    fps: int | None = None
    stride: int = 1
    task: str | None = None
    videos: bool = False
    successes: bool = False
    pipeline: str | None = None


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and which episodes were not, each with why."""

    folder: Path
    episodes: int
    rows: int
    fps: int
    skipped: Mapping[str, str]


def export(
    recording: Recording,
    folder: Path,
    wanted: Sequence[Episode] | None = None,
    how: Export = Export(),
    on_episode: Callable[[Episode], None] | None = None,
) -> Exported:
    """Write ``wanted`` (None: all) to ``folder``, which must not exist. Episodes that are not complete, without
    observations, or whose arrays were not kept are left out, and said.

    Raises:
        ConfigError: ``folder`` exists. InvalidInput: names, fps or a pipeline that do not fit; steps that were not all
        observed, naming the ways out. Unsupported: nothing can be exported. MissingExtra: lerobot is not installed.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name a folder that can be made")
    chosen = _of_one_pipeline(list(recording) if wanted is None else list(wanted), how.pipeline)
    spec = chosen[0].spec
    check_names(how.names or {}, chosen[0].keys, [o.name for o in spec.observations if is_image(o.dtype, o.shape)])
    outcomes = Outcomes.read(recording)
    # Made beside, in a folder of this export alone, and renamed when complete: one that is interrupted leaves no half
    # of a set behind, and two at once do not write into each other.
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent) as beside:
        partial = Path(beside) / "set"
        with quiet():
            made = _write(partial, folder, chosen, how, outcomes, on_episode)
        _note(partial, spec, how)
        try:
            partial.rename(folder)
        except OSError as error:
            if folder.exists():
                raise ConfigError(f"{folder} was made meanwhile; name another folder") from error
            raise
    return made


def _write(
    partial: Path,
    folder: Path,
    chosen: Sequence[Episode],
    how: Export,
    outcomes: Outcomes,
    on_episode: Callable[[Episode], None] | None,
) -> Exported:
    spec, keys = chosen[0].spec, chosen[0].keys
    fps, skipped, rows, count = _fps(spec, how), dict[str, str](), 0, 0
    judged = all(outcomes.success(episode) is not None for episode in chosen)
    made: Any = None
    for episode in chosen:
        why = _why_not(episode, keys, how, outcomes)
        seen = [] if why else _strided(episode, timeline(episode), how.stride)
        if not seen:
            skipped[episode.name] = why or "no step of it was observed"
            continue
        if made is None:
            made = _create(partial, folder.name, spec, _features(spec, seen[0], how, judged), fps, how.videos)
        for row in _rows(episode, seen, how, outcomes if judged else None):
            made.add_frame(row)
            rows += 1
        made.save_episode()
        count += 1
        if on_episode is not None:
            on_episode(episode)
    if made is None:
        raise Unsupported(f"nothing can be exported: {'; '.join(told(skipped))}")
    made.finalize()
    return Exported(folder, count, rows, fps, skipped)


def told(skipped: Mapping[str, str]) -> list[str]:
    """Which episodes were left out and why; those that were not wanted are only counted."""
    counts = {why: list(skipped.values()).count(why) for why in (FAILED, UNKNOWN)}
    named = [f"{name}: {why}" for name, why in skipped.items() if why not in counts]
    return named + [f"{n} episode{'s' * (n > 1)}: {why}" for why, n in counts.items() if n]


def _of_one_pipeline(episodes: list[Episode], wanted: str | None) -> list[Episode]:
    pipelines = sorted({episode.spec.pipeline for episode in episodes})
    if wanted is not None and wanted not in pipelines:
        raise InvalidInput(f"no recorded episode is of pipeline {wanted!r}.{nearest(wanted, pipelines)}")
    if wanted is None and len(pipelines) > 1:
        raise InvalidInput(f"the recording is of the pipelines {', '.join(pipelines)}; choose one with --pipeline")
    chosen = [e for e in episodes if wanted in (None, e.spec.pipeline)]
    if not chosen:
        raise Unsupported("nothing can be exported: the recording has no episode that is whole")
    return chosen


def _why_not(episode: Episode, keys: tuple[str, ...], how: Export, outcomes: Outcomes) -> str:
    """Why ``episode`` is left out; empty: it is not."""
    if missing := sorted(set(episode.keys) - set(episode.kept)):
        return f"the observation keys {', '.join(missing)} were not recorded"
    if episode.keys != keys:
        return f"it has the observation keys {', '.join(episode.keys)}, the first one {', '.join(keys)}"
    if episode.begin["event"] in ("fork", "restore"):
        return f"it begins in the middle: it is a {episode.begin['event']}"
    if episode.incomplete:
        return episode.incomplete
    if how.successes and not (success := outcomes.success(episode)):
        return FAILED if success is False else UNKNOWN
    return ""


def _strided(episode: Episode, seen: list[Seen], stride: int) -> list[Seen]:
    """``seen``, each followed by ``stride`` steps that were executed; the last one only when enough was sent."""
    for one, following in itertools.pairwise(seen):
        apart = following.step - one.step
        if apart != stride:
            ways = f"say --stride {apart} (then an action is {apart} steps long)" if apart > 1 else "say --stride 1"
            raise InvalidInput(
                f"episode {episode.name}: step {one.step} and step {following.step} were observed, {apart} apart, and "
                f"the export is of every {stride}.: record with every step observed (execution_horizon 1), {ways}, or "
                "leave the episode out"
            )
        if len(one.done) != stride:
            between = f"between steps {one.step} and {following.step}"
            raise InvalidInput(f"episode {episode.name}: {len(one.done)} actions are known {between}")
    return [one for one in seen if len(one.done) >= stride]


def _fps(spec: SessionSpec, how: Export) -> int:
    if how.stride < 1:
        raise InvalidInput(f"stride is {how.stride}; it is at least 1")
    rate = spec.control_hz / how.stride
    if how.fps is not None:
        if how.fps < 1:
            raise InvalidInput(f"fps is {how.fps}; it is at least 1")
        return how.fps
    if rate < 1 or abs(rate - round(rate)) > 1e-6:
        raise InvalidInput(f"{spec.control_hz:g} Hz / {how.stride} are no whole number of frames a second; say --fps")
    return round(rate)


def _features(spec: SessionSpec, first: Seen, how: Export, judged: bool) -> dict[str, Any]:
    names, features = how.names or {}, {}
    for key, array in first.arrays.items():
        array = np.asarray(array)
        features[feature_of(renamed(key, names))] = feature_shape(array.dtype.name, array.shape)
    (width,) = spec.action.shape
    features[ACTION] = feature_shape("float32", (width * how.stride,))
    features[DONE] = feature_shape("bool", (1,))
    if judged:
        features[SUCCESS] = feature_shape("bool", (1,))
    return features


def _rows(episode: Episode, seen: list[Seen], how: Export, outcomes: Outcomes | None) -> Iterator[dict[str, Any]]:
    names, task = how.names or {}, how.task
    if task is None:
        task = str(episode.begin["prompt"]) or episode.spec.pipeline
    for i, one in enumerate(seen):
        last = i == len(seen) - 1
        row: dict[str, Any] = {feature_of(renamed(k, names)): _value(v) for k, v in one.arrays.items()}
        row[ACTION] = np.ascontiguousarray(one.done[: how.stride], np.float32).reshape(-1)
        row[DONE] = np.array([last])
        if outcomes is not None:
            row[SUCCESS] = np.array([last and bool(outcomes.success(episode))])
        yield {**row, "task": task}


def _value(array: Any) -> Any:
    array = np.array(array)  # LeRobot's writer wants to own it
    return array if is_image(array.dtype.name, array.shape) else array.reshape(-1)


def _create(partial: Path, name: str, spec: SessionSpec, features: dict[str, Any], fps: int, videos: bool) -> Any:
    try:
        from lerobot.datasets.lerobot_dataset import LeRobotDataset
    except ModuleNotFoundError as error:
        raise missing_extra(error, "exporting to LeRobot ") from error
    if videos:
        features = {n: {**f, "dtype": "video"} if f["dtype"] == "image" else f for n, f in features.items()}
    return LeRobotDataset.create(
        f"omni_loop/{name}", fps=fps, features=features, root=partial, robot_type=spec.pipeline, use_videos=videos
    )


def _note(folder: Path, spec: SessionSpec, how: Export) -> None:
    """What LeRobot's own files do not say: what an action is, where names come from, shapes that became vectors."""
    names = how.names or {}
    about = {
        "pipeline": spec.pipeline,
        "control_hz": spec.control_hz,
        "stride": how.stride,
        "action": f"{how.stride} executed action(s) of {spec.action.shape[0]} numbers, one after the other",
        "unit": spec.action.unit,
        "names": dict(names),
        "shapes": {
            feature_of(renamed(o.name, names)): list(o.shape)
            for o in spec.observations
            if len(o.shape) > 1 and not is_image(o.dtype, o.shape)
        },
    }
    (folder / "meta" / "omni_loop.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
