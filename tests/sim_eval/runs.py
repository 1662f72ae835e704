"""Folders of runs that never were: rows and numbers as a run would have written them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_loop.env import EVALUATION_SEED
from omni_loop_sim_eval import rows
from omni_loop_sim_eval.rows import Row


def write_run(
    folder: Path,
    tasks: Mapping[str, Sequence[bool]],
    suite: str = "toy-suite",
    first_seed: int = EVALUATION_SEED,
    env: str = "toy",
    said: Mapping[str, Any] | None = None,
    **summary: Any,
) -> Path:
    """A run with these successes by task; ``said``: of ``run.json``'s fingerprint."""
    made = [
        Row(
            task,
            i,
            first_seed + i,
            "success" if success else "failure",
            success,
            steps=20 + i % 7 + 30 * (not success),
            ticks=5,
            tick_p50_ms=4 + i % 3,
            tick_p99_ms=9 + i % 3,
            wall_s=0.1,
        )
        for task, outcomes in tasks.items()
        for i, success in enumerate(outcomes)
    ]
    rows.write(folder, made)
    numbers = {"suite": suite, "env": env, "pipeline": "toy", "tick_ms": {"p50": 4.5, "p99": 11.0, "mean": 5.0}}
    (folder / "summary.json").write_text(json.dumps(numbers | summary))
    if said is not None:
        (folder / "run.json").write_text(json.dumps({"format": 1, "fingerprint": said}))
    return folder
