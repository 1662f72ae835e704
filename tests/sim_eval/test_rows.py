from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import parquet

from omni_loop.errors import ConfigError
from omni_loop_sim_eval import rows
from omni_loop_sim_eval.rows import Row

ROWS = [
    Row("reach", 0, 7, "success", True, 20, 0.5, 5, 4.0, 9.0, 5.0, 0, 0.25, ""),
    Row("reach", 1, 8, "error", False, 3, 0.0, 1, 4.0, 9.0, 5.0, 2, 0.5, "stage_failed: <é>"),
    Row("push", 0, 7, "failure", False, 60, 0.25, 9, 4.0, 9.0, 5.0, 1, 1.0, ""),
]


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    rows.write(tmp_path, ROWS)
    assert rows.read(tmp_path) == ROWS
    assert rows.successes(ROWS) == {("reach", 7): True, ("reach", 8): False, ("push", 7): False}
    assert {task: len(own) for task, own in rows.by_task(ROWS).items()} == {"reach": 2, "push": 1}


def test_parquet_holds_the_same_with_a_column_per_field(tmp_path: Path) -> None:
    rows.write(tmp_path, ROWS)
    table = parquet.read_table(tmp_path / "episodes.parquet")
    assert [Row(**row) for row in table.to_pylist()] == ROWS
    assert str(table.schema.field("seed").type) == "int64"
    assert str(table.schema.field("success").type) == "bool"
    rows.write(tmp_path, [])
    assert parquet.read_table(tmp_path / "episodes.parquet").num_rows == 0


def test_writing_does_not_wait_for_pandas(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from omni_loop_sim_eval import rows\n"
        f"rows.write(Path({str(tmp_path)!r}), [rows.Row('', 0, 7, 'success', True)])\n"
        "assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_rows_from_before_there_were_tasks_are_read(tmp_path: Path) -> None:
    old = {"episode": 3, "seed": 9, "outcome": "success", "success": True, "steps": 12, "score": 0.9, "ticks": 3}
    old |= {"tick_ms": {"p50": 1.0, "p99": 2.0, "mean": 1.5}, "wall_s": 0.1, "reason": ""}
    (tmp_path / "episodes.json").write_text(json.dumps([old]))
    (row,) = rows.read(tmp_path)
    assert (row.key, row.success, row.tick_p99_ms, row.deadline_misses) == (("", 9), True, 2.0, 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[", "is no table of episodes"),
        ('{"seed": 1}', "is no table of episodes"),
        ('[{"seed": 1}]', "no table of episodes: 'success'"),
        ('[{"seed": Infinity, "success": true}]', "no table of episodes: cannot convert float infinity"),
        ('[{"seed": 1, "success": 1}]', "success is 1, wanted true or false"),
        ('[{"seed": 1, "success": true}, {"seed": 1, "success": false}]', "1 of them stand there twice"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "episodes.json").write_text(text)
    with pytest.raises(ConfigError, match=rf"^A: .*{says}"):
        rows.read(tmp_path, "A")


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no episodes\.json: name a folder written by --out"):
        rows.read(tmp_path / "nowhere")
