"""Rows: what is kept of every episode, in ``episodes.json`` and ``episodes.parquet``, and the one reader of them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omni_loop.errors import ConfigError

from .results import EpisodeResult
from .stats import spread

Key = tuple[str, int]  # of an episode: its task ("" when the suite has one) and its seed


@dataclass(frozen=True, slots=True)
class Row:
    """One episode. ``tick_ms``: median and 99th percentile of its round trips, in ms, without those that carried
    predicted frames; ``deadline_misses``: control steps of live mode at which no action was there in time."""

    task: str
    episode: int
    seed: int
    outcome: str
    success: bool
    steps: int = 0
    score: float = 0.0
    ticks: int = 0
    tick_p50_ms: float = 0.0
    tick_p99_ms: float = 0.0
    tick_mean_ms: float = 0.0
    deadline_misses: int = 0
    wall_s: float = 0.0
    reason: str = ""

    @property
    def key(self) -> Key:
        return self.task, self.seed


def row_of(result: EpisodeResult) -> Row:
    times = spread(t.round_trip_ms for t in result.ticks if not t.frames)
    return Row(
        result.task, result.episode, result.seed, str(result.outcome), result.success, result.steps,
        result.score, len(result.ticks), times["p50"], times["p99"], times["mean"],
        result.deadline_misses, result.wall_s, result.reason,
    )  # fmt: skip


def write(folder: Path, rows: Sequence[Row]) -> None:
    """Write ``episodes.json`` (``tick_ms`` as an object) and ``episodes.parquet`` (one flat column per field)."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "episodes.json").write_text(json.dumps([_to_json(row) for row in rows], indent=1) + "\n")
    _write_parquet(folder / "episodes.parquet", rows)


def read(folder: Path, option: str = "") -> list[Row]:
    """Rows of the run in ``folder``, also of one written before there were tasks: those have the task "".

    Args:
        option: what named the folder; begins the text of an error.

    Raises:
        ConfigError: there is no run, it cannot be read, or an episode stands in it twice.
    """
    about = f"{option}: " if option else ""
    try:
        data = json.loads((folder / "episodes.json").read_text(encoding="utf-8"))
        rows = [_from_json(item) for item in data]
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{about}{folder} holds no episodes.json: name a folder written by --out") from None
    except OSError as e:
        raise ConfigError(f"{about}cannot read {folder}/episodes.json: {e.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as e:
        raise ConfigError(f"{about}{folder}/episodes.json is no table of episodes: {e}") from None
    if twice := len(rows) - len({row.key for row in rows}):
        raise ConfigError(f"{about}{folder}/episodes.json is no table of episodes: {twice} of them stand there twice")
    return rows


def successes(rows: Iterable[Row]) -> dict[Key, bool]:
    """Success by task and seed: what two runs are paired by."""
    return {row.key: row.success for row in rows}


def by_task(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows of every task, tasks in the order in which they first come."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.task, []).append(row)
    return found


def _to_json(row: Row) -> dict[str, Any]:
    flat = asdict(row)
    times = {name: flat.pop(f"tick_{name}_ms") for name in ("p50", "p99", "mean")}
    return flat | {"tick_ms": times}


def _from_json(item: Mapping[str, Any]) -> Row:
    times = item.get("tick_ms", {})
    success = item["success"]
    if not isinstance(success, bool):
        raise TypeError(f"success is {success!r}, wanted true or false")
    return Row(
        task=str(item.get("task", "")),
        episode=int(item.get("episode", 0)),
        seed=int(item["seed"]),
        outcome=str(item.get("outcome", "success" if success else "failure")),
        success=success,
        steps=int(item.get("steps", 0)),
        score=float(item.get("score", 0.0)),
        ticks=int(item.get("ticks", 0)),
        tick_p50_ms=float(times.get("p50", 0.0)),
        tick_p99_ms=float(times.get("p99", 0.0)),
        tick_mean_ms=float(times.get("mean", 0.0)),
        deadline_misses=int(item.get("deadline_misses", 0)),
        wall_s=float(item.get("wall_s", 0.0)),
        reason=str(item.get("reason", "")),
    )


def _write_parquet(path: Path, rows: Sequence[Row]) -> None:
    import pyarrow as pa
    from pyarrow import json as arrow_json
    from pyarrow import parquet

    kinds = {name: Row.__dataclass_fields__[name].type for name in Row.__dataclass_fields__}
    types = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    schema = pa.schema([(name, types[str(kind)]) for name, kind in kinds.items()])
    lines = "\n".join(json.dumps(asdict(row)) for row in rows).encode()
    # Whatever makes arrow arrays of Python's lists imports pandas first, for longer than many a run takes.
    options = arrow_json.ParseOptions(explicit_schema=schema)
    table = arrow_json.read_json(io.BytesIO(lines), parse_options=options) if rows else schema.empty_table()
    parquet.write_table(table, path)
