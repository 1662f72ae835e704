"""What must hold of a LeRobotDataset on disk before anything is trained on it.

LeRobot itself finds damage late, trains on NaN, and looks for files that are missing on its hub.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omni_loop.config import location
from omni_loop.errors import ConfigError

from .families import STATISTICS

_PICTURES = ("image", "video")
_EPISODES = ("episode_index", "data/chunk_index", "data/file_index", "dataset_from_index", "dataset_to_index", "tasks")


class _Feature(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    dtype: str
    shape: list[Annotated[int, Field(ge=1)]]


class _Info(BaseModel):
    """The part of ``meta/info.json`` that training depends on."""

    model_config = ConfigDict(extra="allow", strict=True)

    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    total_episodes: Annotated[int, Field(ge=1)]
    total_frames: Annotated[int, Field(ge=1)]
    data_path: str
    video_path: str | None = None
    features: dict[str, _Feature]


def dataset_info(data: Path) -> dict[str, Any]:
    """``meta/info.json`` of a LeRobotDataset v3. Raises ConfigError for anything else, naming what is wrong."""
    file = data / "meta" / "info.json"
    try:
        info = json.loads(file.read_bytes())
    except (OSError, ValueError):
        raise ConfigError(f"{data} is no LeRobotDataset: it has no meta/info.json that can be read") from None
    version = str(info.get("codebase_version", "")) if isinstance(info, dict) else ""
    if not version.startswith("v3"):
        raise ConfigError(f"{data} is a LeRobotDataset {version or 'of no version'}; wanted v3")
    try:
        _Info.model_validate(info)
    except ValidationError as e:
        wrong = "; ".join(f"{location(error['loc'])}: {error['msg']}" for error in e.errors())
        raise ConfigError(f"{file}: {wrong}") from None
    return dict(info)


def check_rows(data: Path, info: Mapping[str, Any], used: Mapping[str, Any]) -> None:
    """Every file that ``info`` promises is there, with every feature's column, in its shape; values of ``used``
    features (by name) are finite. Images and videos are not decoded.

    Raises:
        ConfigError: the first thing that does not hold.
    """
    for name in ("meta/stats.json", "meta/tasks.parquet"):
        if not (data / name).is_file():
            raise ConfigError(f"{data} is not complete: it has no {name}")
    _table(data / "meta/tasks.parquet")
    episodes = _episodes(data, info)
    files = sorted({(e["data/chunk_index"], e["data/file_index"]) for e in episodes})
    rows = 0
    for chunk, number in files:
        file = _place(data, info, "data_path", chunk_index=chunk, file_index=number)
        rows += _check_columns(file, info["features"], used, rows)
    ends = max(e["dataset_to_index"] for e in episodes)
    if not rows == ends == info["total_frames"]:
        said = f"meta/info.json says {info['total_frames']} rows, meta/episodes {ends}"
        raise ConfigError(f"{data} is not complete: its data has {rows} rows, {said}")


def _episodes(data: Path, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Which files an episode's rows lie in; its videos are seen to be there."""
    videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    wanted = [*_EPISODES, *(f"videos/{name}/{part}_index" for name in videos for part in ("chunk", "file"))]
    found: list[dict[str, Any]] = []
    for file in sorted((data / "meta/episodes").glob("*/*.parquet")):
        table = _table(file)
        if missing := sorted(set(wanted) - set(table.column_names)):
            raise ConfigError(f"{file}: it has no column {', '.join(missing)}")
        if empty := [name for name in wanted if table.column(name).null_count]:
            raise ConfigError(f"{file}: empty values in {', '.join(empty)}")
        found += table.select(wanted).to_pylist()
    if len(found) != info["total_episodes"]:
        said = f"meta/info.json says {info['total_episodes']}"
        raise ConfigError(f"{data} is not complete: meta/episodes has {len(found)} episodes, {said}")
    for name in videos:
        for place in {(e[f"videos/{name}/chunk_index"], e[f"videos/{name}/file_index"]) for e in found}:
            file = _place(data, info, "video_path", video_key=name, chunk_index=place[0], file_index=place[1])
            if not file.is_file():
                raise ConfigError(f"{data} is not complete: it has no {file.relative_to(data)}")
    return found


def _place(data: Path, info: Mapping[str, Any], path: str, **named: Any) -> Path:
    """Where a file lies by ``info[path]``, which is a format of LeRobot's names."""
    try:
        return data / str(info.get(path)).format(**named)
    except (KeyError, IndexError, ValueError, AttributeError) as e:
        raise ConfigError(f"{data}/meta/info.json: {path}: {type(e).__name__}: {e}") from None


def _check_columns(file: Path, features: Mapping[str, Any], used: Mapping[str, Any], before: int) -> int:
    """Returns the rows of ``file``; ``before``: of the files before it."""
    table = _table(file)
    for name, feature in features.items():
        if feature["dtype"] == "video":
            continue
        if name not in table.column_names:
            raise ConfigError(f"{file}: it has no column for the feature {name!r} of meta/info.json")
        if feature["dtype"] in _PICTURES or len(feature["shape"]) > 1:
            continue
        width = math.prod(feature["shape"])
        values = _numbers(file, name, table.column(name), width)
        if name in used and values.dtype.kind == "f" and not np.isfinite(values).all():
            row = before + int(np.argwhere(~np.isfinite(values))[0, 0])
            raise ConfigError(f"{file}: {name!r} is not finite in row {row}; leave its episode out of the dataset")
    return int(table.num_rows)


def _numbers(file: Path, name: str, column: Any, width: int) -> Any:
    """``column`` as ``[rows, width]``; strings and the like as rows without numbers."""
    import pyarrow as pa
    import pyarrow.compute as pc

    nested = pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type)
    if nested:
        lengths = pc.unique(pc.list_value_length(column)).to_pylist()
        if lengths and lengths != [width]:
            raise ConfigError(f"{file}: {name!r} has rows of {lengths} numbers, meta/info.json says {width}")
        column = pc.list_flatten(column)
    elif width != 1:
        raise ConfigError(f"{file}: {name!r} has rows of one value, meta/info.json says {width}")
    if column.null_count:
        raise ConfigError(f"{file}: {name!r} has {column.null_count} empty values")
    if not (pa.types.is_floating(column.type) or pa.types.is_integer(column.type)):
        return np.zeros((len(column), 0))
    return column.to_numpy().reshape(-1, width)


def _table(file: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(file)
    except FileNotFoundError:
        raise ConfigError(f"the dataset is not complete: there is no {file}") from None
    except (OSError, pa.ArrowException) as e:
        raise ConfigError(f"{file} cannot be read: {str(e).splitlines()[0]}") from None


def check_statistics(data: Path, policy: Any) -> None:
    """``meta/stats.json`` has what the policy's configuration normalises its features by: finite, in their shape.

    Raises:
        ConfigError: all that is missing or wrong.
    """
    file = data / "meta/stats.json"
    try:
        stats = json.loads(file.read_bytes())
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}") from None
    wrong: list[str] = []
    for name, feature in {**policy.input_features, **policy.output_features}.items():
        mode = policy.normalization_mapping.get(feature.type.value, "IDENTITY")
        known = stats.get(name) if isinstance(stats, dict) else None
        for statistic in STATISTICS.get(getattr(mode, "value", mode), ()):
            value = known.get(statistic) if isinstance(known, dict) else None
            if problem := _problem(value, tuple(feature.shape)):
                wrong.append(f"{name}.{statistic} {problem}")
    if wrong:
        raise ConfigError(f"{file}: {', '.join(wrong)}")


def _problem(value: Any, shape: tuple[int, ...]) -> str:
    if value is None:
        return "is missing"
    try:
        numbers = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return "holds no numbers"
    if not np.isfinite(numbers).all():
        return "is not finite"
    try:
        fits = np.broadcast_shapes(numbers.shape, shape) == shape
    except ValueError:
        fits = False
    return "" if fits else f"has shape {list(numbers.shape)}, the feature {list(shape)}"


@contextlib.contextmanager
def local_only(data: Path) -> Iterator[None]:
    """LeRobot reads ``data`` here, and asks no hub for what it misses. What it cannot read is a ConfigError."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    except Exception as e:  # of any library that reads; what is damaged has no other name
        raise ConfigError(f"LeRobot cannot read {data}: {type(e).__name__}: {e}") from e
    finally:
        constants.HF_HUB_OFFLINE = before
