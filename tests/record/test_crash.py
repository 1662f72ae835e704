"""A server that is killed loses at most the part of each episode that was open; what is sealed is read."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

from omni_loop.record.reader import Recording

CHILD = """
import os, signal, sys, time
import numpy as np
from pathlib import Path
from omni_loop.config import Deployment, RecordConfig
from omni_loop.loop.request import TickRequest
from omni_loop.loop.tap import Opened, Ticked
from omni_loop.record.recorder import Recorder
from omni_loop.types import ArraySpec, Op, SessionSpec, TickResult

X, ACTION = ArraySpec("x", "float32", (4,)), ArraySpec("action", "float32", (2,))
SPEC = SessionSpec("toy", (X,), ACTION, 4, 2, 5, (Op.INFER,))

recorder = Recorder(Deployment(pipelines=("toy",), record=RecordConfig(folder=sys.argv[1], part_ticks=1000)))

def tell(session, n):
    for seq in range(1, n + 1):
        request = TickRequest(session, "", seq, Op.INFER, seq, {"x": np.full(4, seq, np.float32)})
        recorder.ticked(Ticked(request, None, 0, seq, seq, seq, 1, TickResult(seq, 0)))

for session in ("whole", "open", "long"):
    recorder.opened(Opened(session, SPEC, 1, "", ("x",), {}, "open", "", 0, 0, 0, 0))
tell("whole", 5)
recorder.ended("whole", "closed")
tell("long", 1500)
tell("open", 500)
while recorder.counts.written < 1005:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_9_loses_at_most_what_was_open(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    recording = Recording(tmp_path)
    assert {episode.session: episode.length for episode in recording} == {"whole": 5, "long": 1000}
    assert recording.broken == {}
    for episode in recording:
        for tick in episode.ticks:
            np.testing.assert_array_equal(tick.arrays["x"], np.full(4, tick.seq, np.float32))
    assert {episode.session: episode.complete for episode in recording} == {"whole": True, "long": False}
    assert [episode.incomplete[:18] for episode in recording if episode.session == "long"] == ["its end is missing"]
    for name in recording.unfinished:
        assert "whole" not in name
