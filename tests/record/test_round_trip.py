"""Whatever a tick may hold, under whatever spec, is read back as it was told."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pydantic import TypeAdapter

from omni_loop.config import Deployment, RecordConfig
from omni_loop.errors import StageFailed
from omni_loop.loop.request import PlanRequest, TickRequest
from omni_loop.loop.tap import Opened, Ticked
from omni_loop.record import layout
from omni_loop.record.reader import Recording
from omni_loop.record.recorder import Recorder
from omni_loop.types import (
    ActionChunk,
    ArraySpec,
    FramePrediction,
    Op,
    PlanSummary,
    Progress,
    SessionSpec,
    TickResult,
    Timings,
)

from .same import check

H, W, DIM = 2, 3, 2
DTYPES = ("uint8", "int32", "int64", "float32", "float64", "bool")
KEYS = ("image", "state", "a/b", "images.top", "weird ~ key", "tokens")
big = st.integers(0, 2**53)
ms = st.floats(0, 1e6)
share = st.floats(0, 1)


@st.composite
def specs(draw: st.DrawFn) -> SessionSpec:
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4, unique=True))
    dims = st.lists(st.integers(-1, 3), max_size=3).map(tuple)
    observations = tuple(ArraySpec(key, draw(st.sampled_from(DTYPES)), draw(dims)) for key in keys)
    return SessionSpec(
        pipeline="any",
        observations=observations,
        action=ArraySpec("action", "float32", (DIM,)),
        horizon=3,
        execution_horizon=1,
        control_hz=10,
        ops=tuple(Op),
        frame=ArraySpec("frame", "uint8", (H, W, 3)),
        max_predict=4,
        description=draw(st.text(max_size=8)),
    )


def _rows(draw: st.DrawFn, n: int) -> Any:
    return draw(hnp.arrays(np.float32, (n, DIM), elements=st.floats(-1, 1, width=32)))


@st.composite
def ticks(draw: st.DrawFn, spec: SessionSpec, seq: int) -> Ticked:
    op = draw(st.sampled_from(tuple(Op)))
    lead = (draw(st.integers(1, 3)),) if op is Op.RECONDITION else ()
    arrays = {}
    for one in spec.observations if op in (Op.INFER, Op.RECONDITION) else ():
        shape = (*lead, *(draw(st.integers(0, 3)) if d < 0 else d for d in one.shape))
        arrays[one.name] = draw(hnp.arrays(one.dtype, shape))
    executed = _rows(draw, draw(st.integers(0, 3))) if arrays else None
    actions = _rows(draw, draw(st.integers(1, 3))) if op is Op.PREDICT and draw(st.booleans()) else None
    plan = None
    if op is Op.PLAN:
        goal = draw(st.none() | hnp.arrays(np.uint8, (H, W, 3)))
        plan = PlanRequest(2, 8, 2, "mppi", draw(ms), goal, _rows(draw, 2) if draw(st.booleans()) else None)
    request = TickRequest(
        "s", "secret", seq, op, draw(big), arrays, executed, actions, draw(st.integers(0, 4)), draw(st.integers(0, 4)),
        plan=plan,
    )  # fmt: skip
    result = draw(results(seq, op))
    return Ticked(
        request, executed, draw(big), draw(big), draw(big), draw(big), draw(st.integers(0, 2**64 - 1)), result
    )


@st.composite
def results(draw: st.DrawFn, seq: int, op: Op) -> TickResult:
    epoch = draw(big)
    timings = Timings(draw(ms), draw(ms), draw(ms), draw(st.dictionaries(st.sampled_from(("act", "context")), ms)))
    chunk = frames = progress = summary = error = None
    if draw(st.booleans()):
        revision = draw(st.sampled_from(("", "r1", "ünï")))
        chunk = ActionChunk(seq, draw(big), _rows(draw, 3), epoch, revision, timings)
    if draw(st.booleans()):
        n = draw(st.integers(0, 3))
        scene = draw(st.none() | hnp.arrays(np.float32, (n, 2, 2), elements=st.floats(-9, 9, width=32)))
        frames = FramePrediction(seq, draw(big), draw(hnp.arrays(np.uint8, (n, H, W, 3))), epoch, scene)
    if draw(st.booleans()):
        progress = Progress(seq, draw(big), draw(share), draw(share), epoch)
    if op is Op.PLAN:
        summary = PlanSummary(seq, draw(ms), draw(ms), 8, 2, 2, draw(st.booleans()))
    if frames is None and draw(st.booleans()):
        error = StageFailed(draw(st.text(max_size=8)))
    return TickResult(seq, epoch, chunk, frames, progress, timings, error, summary)


# Each writes to disk: what fails is shown as it was found, not shrunk for minutes.
@settings(
    max_examples=15,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_ticks_are_read_back_as_they_were_told(data: st.DataObject) -> None:
    spec = data.draw(specs())
    told = [data.draw(ticks(spec, seq)) for seq in range(1, data.draw(st.integers(1, 6)) + 1)]
    keys = tuple(one.name for one in spec.observations)
    with tempfile.TemporaryDirectory() as folder:
        record = RecordConfig(folder=folder, part_ticks=data.draw(st.integers(2, 8)))
        recorder = Recorder(Deployment(pipelines=("any",), record=record))
        recorder.opened(Opened("s", spec, 2**64 - 1, "do", keys, {"scale": 1.5}, "open", "", 0, 0, 0, 0))
        for one in told:
            recorder.ticked(one)
        recorder.ended("s", "closed")
        recorder.stop()
        (episode,) = Recording(Path(folder))
        assert (episode.spec, episode.keys, episode.options) == (spec, keys, {"scale": 1.5})
        assert episode.begin["seed"] == 2**64 - 1
        for one, read in zip(told, episode.ticks, strict=True):
            check(one, read)


@given(specs())
def test_a_spec_is_read_back(spec: SessionSpec) -> None:
    assert TypeAdapter(SessionSpec).validate_json(json.dumps(layout.encode_spec(spec)), strict=True) == spec


@given(st.lists(st.integers(1, 512), max_size=4), st.sampled_from((1, 4, 8)))
def test_chunks_are_bounded(shape: list[int], itemsize: int) -> None:
    rows = layout.chunk_rows(shape, itemsize)
    assert 1 <= rows <= 1024
    assert rows == 1 or rows * int(np.prod(shape, dtype=np.int64)) * itemsize <= 1 << 20
