"""One seeded episode in closed loop through the client API.

A session is opened for every episode rather than reset: noise is a function of (seed, epoch, tick, stage), so
only a fresh session makes the result independent of the episodes before it.
"""

from __future__ import annotations

import logging
import time

import numpy as np

from omni_loop.env import Env
from omni_loop.errors import OmniLoopError

from .api import LoopClient, LoopSession, attach
from .course import Course, EnvDied, EpisodeTimeout, must_live
from .drive import drive
from .live import drive_live
from .results import EpisodeResult, Outcome, Prediction, Tick
from .suite import EvalSuite

__all__ = ("EpisodeResult", "EpisodeTimeout", "Outcome", "Prediction", "Tick", "run_episode")

log = logging.getLogger(__name__)


def run_episode(client: LoopClient, env: Env, suite: EvalSuite, episode: int, task: str = "") -> EpisodeResult:
    """Run episode number ``episode`` of ``task`` in ``env``, which is that task's. Whatever raises is recorded in the
    result, never passed on."""
    seed, began = suite.first_seed + episode, time.monotonic()
    course = Course(env, suite, seed, began + suite.time_limit_s)
    outcome, died = Outcome.ERROR, False
    session: LoopSession | None = None
    try:
        attach(client, env)
        prompt = prompt_of(env, suite, seed, task)
        session = client.open(suite.pipeline, prompt=prompt, seed=seed, keys=suite.keys, options=suite.options)
        if suite.mode == "live":
            drive_live(course, session, task)
        else:
            drive(course, session, episode)
        outcome = Outcome.SUCCESS if course.success else Outcome.FAILURE
    except EpisodeTimeout as e:
        outcome = Outcome.TIMEOUT
        course.notes.append(str(e))
    except EnvDied as e:
        died = True
        course.notes.append(f"the env broke: {e}")
    except OmniLoopError as e:
        course.notes.append(f"{e.reason}: {e.text}")
    except Exception as e:
        log.exception("episode %d (seed %d) failed", episode, seed)
        course.notes.append(f"{type(e).__name__}: {e}")
    if session is not None:
        try:
            session.close()
        except OmniLoopError as e:  # the episode's outcome stands; that its session may linger is said
            course.notes.append(f"closing the session: {e.reason}: {e.text}")
    return EpisodeResult(
        episode=episode,
        seed=seed,
        outcome=outcome,
        steps=len(course.actions),
        score=course.score,
        actions=np.array(course.actions, np.float32).reshape(-1, env.action.shape[0]),
        ticks=tuple(course.ticks),
        predictions=tuple(course.predictions),
        reason="; ".join(course.notes),
        wall_s=round(time.monotonic() - began, 3),
        policy_revision=course.revision,
        session="" if session is None else session.id,
        task=task,
        deadline_misses=course.misses,
        env_died=died,
    )


def prompt_of(env: Env, suite: EvalSuite, seed: int, task: str) -> str:
    """What a policy is told in the episode of ``seed``: the suite's prompt, or where that is empty the env's own
    ``instruction``.

    Raises:
        EnvDied: the env had to begin the episode to say it, and broke.
    """
    said = suite.task(task).prompt
    if said:
        return said
    if getattr(env, "instruction_of_episode", False):
        with must_live():
            env.reset(seed, ())  # until then it is that of the episode before; whoever plays begins the same again
    return str(getattr(env, "instruction", ""))
