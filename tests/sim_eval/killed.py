"""``python -m sim_eval.killed FOLDER SEED POINTS``: kills a run at seeded points and resumes it, as often as asked.

Each part of a run is a process of its own (forked, so that nothing is imported again) which kills itself with SIGKILL
at the n-th of all events that matter: a call to the policy, a line of the journal begun, half-written, written and
synced, ``run.json`` written beside and put in place. Prints a line of JSON: the table of an uninterrupted run, and of
each of the killed ones after its last part, without wall-clock times.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_loop import registry
from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import StageFailed
from omni_loop_sim_eval import rows, store
from omni_loop_sim_eval.runner import load_run, run_suite

from .toy import ToyEnv, ToyServer, toy_suite

WALL = {"wall_s", "tick_p50_ms", "tick_p99_ms", "tick_mean_ms"}
SUITE = toy_suite(tasks=[{"name": "a"}, {"name": "b", "max_steps": 12}], episodes=4, max_steps=16, workers=2)


class Fate:
    """Counts events and kills the process at the ``at``-th; 0: never."""

    def __init__(self, at: int) -> None:
        self.at, self.seen = at, 0

    def event(self) -> None:
        self.seen += 1
        if self.seen == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def part(folder: Path, at: int) -> int:
    """Run, or go on, in a process of its own; how many events there were. -1: it was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            fate = Fate(at)
            _run(folder, fate)
            os.write(writing, str(fate.seen).encode())
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as said:
        count = said.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return -1
    if status:
        raise SystemExit(f"the run in {folder} failed")
    return int(count)


def _run(folder: Path, fate: Fate) -> None:
    def asked(seed: int, tick: int) -> None:
        fate.event()
        if seed == EVALUATION_SEED + 2 and tick == 1:
            raise StageFailed("always here")  # an episode that breaks is part of the table

    write_line, replace = store._write_line, store._replace

    def torn(fd: int, data: bytes) -> None:
        fate.event()
        half = len(data) // 2
        os.write(fd, data[:half])
        fate.event()
        write_line(fd, data[half:])
        fate.event()

    def around(path: Path, content: Any) -> None:
        fate.event()
        replace(path, content)
        fate.event()

    store._write_line, store._replace = torn, around
    server = ToyServer(lost=frozenset({EVALUATION_SEED + 1}), broken=asked)
    with registry.registered(registry.ENVS, "toy", ToyEnv):
        run_suite(SUITE, server.connect, store=store.Store(folder))


def table(folder: Path) -> list[dict[str, Any]]:
    """Rows of the run in ``folder``, without wall-clock times."""
    found = []
    for result in load_run(folder).results:
        row = rows.row_of(result)
        said = {name: getattr(row, name) for name in row.__dataclass_fields__ if name not in WALL}
        found.append(said | {"actions": result.actions.tobytes().hex(), "predicted": len(result.predictions)})
    return found


def main(folder: Path, seed: int, points: int) -> dict[str, Any]:
    whole = folder / "whole"
    events = part(whole, 0)
    draw = random.Random(seed)
    killed: list[dict[str, Any]] = []
    for i in range(points):
        out = folder / f"killed-{i}"
        kills = [at for at in (draw.randint(1, events), draw.randint(1, events // 2)) if part(out, at) == -1]
        before = len(store.read_journal(out))
        part(out, 0)
        killed.append({"kills": kills, "before": before, "table": table(out)})
    return {"events": events, "whole": table(whole), "killed": killed}


if __name__ == "__main__":
    run: Callable[..., dict[str, Any]] = main
    print(json.dumps(run(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))))
