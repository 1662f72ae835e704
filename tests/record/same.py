"""What was recorded against what was told, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np

from omni_loop.loop.tap import Ticked
from omni_loop.record.table import Tick
from omni_loop.types import TickResult


def check(told: Ticked, read: Tick) -> None:
    """Everything of a tick that a recording keeps."""
    request = told.request
    assert (read.op, read.seq, read.epoch, read.tick) == (request.op, request.seq, told.epoch, told.tick)
    assert (read.step, read.stands, read.seed) == (told.step, told.stands, told.seed)
    assert (read.frames, read.steps, read.kept) == (request.frames, request.steps, True)
    assert read.arrays.keys() == request.arrays.keys()
    for key, array in request.arrays.items():
        _equal(array, read.arrays[key])
    _equal(told.executed, read.executed)
    _equal(request.actions, read.actions)
    if request.plan is None:
        assert read.plan is None
    else:
        assert read.plan is not None
        for name in ("horizon", "candidates", "iterations", "method", "budget_ms"):
            assert read.plan[name] == getattr(request.plan, name)
        _equal(request.plan.goal, read.plan["goal"])
        _equal(request.plan.init, read.plan["init"])
    _check_result(told.result, read.result)


def _check_result(told: TickResult, read: TickResult) -> None:
    assert (read.seq, read.epoch, read.progress, read.plan) == (told.seq, told.epoch, told.progress, told.plan)
    assert read.timings == told.timings
    assert (read.chunk is None, read.frames is None) == (told.chunk is None, told.frames is None)
    if told.chunk is not None and read.chunk is not None:
        for name in ("seq", "first_step", "epoch", "policy_revision"):
            assert getattr(read.chunk, name) == getattr(told.chunk, name)
        _equal(told.chunk.actions, read.chunk.actions)
    if told.frames is not None and read.frames is not None:
        assert (read.frames.seq, read.frames.first_step) == (told.frames.seq, told.frames.first_step)
        _equal(told.frames.frames, read.frames.frames)
        _equal(told.frames.scene, read.frames.scene)
    assert (read.frames_error is None) == (told.frames_error is None)
    if told.frames_error is not None and read.frames_error is not None:
        assert read.frames_error.text == told.frames_error.text
        assert type(read.frames_error) is type(told.frames_error)


def _equal(a: Any, b: Any) -> None:
    assert (a is None) == (b is None)
    if a is not None:
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
