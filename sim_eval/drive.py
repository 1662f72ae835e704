"""Mode ``sync``: the simulator stands still while the policy thinks. Observe, infer, execute, until the end."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import Reason, StageFailed
from omni_loop.types import ActionChunk, TickResult

from .api import LoopSession
from .course import Course
from .results import Prediction


def drive(course: Course, session: LoopSession, episode: int) -> None:
    """Runs ``course`` to its end. A policy's control step lasts ``action_repeat`` of the env's; with ``delay_steps`` it
    sees what was so many of the env's steps ago, at the beginning the first observation."""
    suite = course.suite
    horizon = suite.execution_horizon or session.spec.execution_horizon
    seen, executed, step = deque([course.reset(suite.keys)], maxlen=suite.delay_steps + 1), None, 0
    while True:
        frames = suite.predictions.frames if _wants_frames(course, episode) else 0
        result = course.infer(session, seen[0], step, executed, frames)
        chunk = checked(result.chunk, step, horizon)
        course.revision = chunk.policy_revision
        actions = chunk.actions[:horizon]
        executed = course.clip(actions)
        for i, action in enumerate(executed):
            for _ in range(suite.action_repeat):
                course.step(action)
                if course.over:
                    break
                if suite.delay_steps:
                    seen.append(course.observe(suite.keys))
            if course.over:
                executed = executed[: i + 1]
                break
        if frames:
            _keep_prediction(course, result, step, actions, executed)
        if course.over:
            return
        step += len(executed)
        if not suite.delay_steps:
            seen.append(course.observe(suite.keys))


def checked(chunk: ActionChunk | None, step: int, horizon: int) -> ActionChunk:
    """The chunk, if it may be executed from ``step``.

    Raises:
        StageFailed: there is none, it begins elsewhere or is too short, or holds what is not finite.
    """
    if chunk is None:
        raise StageFailed("the server answered without an action chunk", reason=Reason.BAD_OUTPUT)
    if chunk.first_step != step or len(chunk.actions) < horizon:
        raise StageFailed(
            f"chunk of {len(chunk.actions)} actions from step {chunk.first_step}, wanted {horizon} from step {step}",
            reason=Reason.BAD_OUTPUT,
        )
    if not np.isfinite(chunk.actions).all():
        raise StageFailed("the chunk holds actions that are not finite", reason=Reason.BAD_OUTPUT)
    return chunk


def _wants_frames(course: Course, episode: int) -> bool:
    suite, wanted = course.suite, course.suite.predictions
    # Frames are a guess for the env's next steps from what is sent: not for repeated ones, nor from steps ago.
    if suite.action_repeat > 1 or suite.delay_steps:
        return False
    # Not at tick 0: nothing has moved yet. Fixed ticks, so that a result depends on suite and seed alone.
    nth = len(course.ticks) % wanted.every == wanted.every - 1
    return suite.frame_key is not None and episode < wanted.episodes and nth


def _keep_prediction(
    course: Course, result: TickResult, step: int, actions: NDArray[np.float32], executed: NDArray[np.float32]
) -> None:
    """Keep predicted frames as far as they belong to what was executed: the world model was told ``actions``."""
    if result.frames_error is not None:
        course.notes.append(f"frames from step {step}: {result.frames_error.reason}: {result.frames_error.text}")
    if result.frames is None:
        return
    n = min(len(result.frames.frames), len(executed))
    same = (actions[:n] == executed[:n]).all(axis=1)
    n = int(np.argmin(same)) if not same.all() else n
    if result.frames.first_step == step + 1 and n:
        course.predictions.append(Prediction(course.seed, step, executed[:n], result.frames.frames[:n]))
