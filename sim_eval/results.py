"""What an episode gave: the nouns that the runner makes, the journal keeps and reports are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_loop._compat import StrEnum


class Outcome(StrEnum):
    SUCCESS = "success"
    FAILURE = "failure"
    ERROR = "error"  # something raised; the reason says what
    TIMEOUT = "timeout"  # longer than the suite's time limit


@dataclass(frozen=True, slots=True)
class Tick:
    """Times of one observation's round trip, in ms. ``frames``: predicted frames were asked for besides."""

    step: int
    round_trip_ms: float  # seen by the client: request encoded to answer decoded
    total_ms: float  # in the server
    model_ms: float  # forward passes
    queue_ms: float
    stages_ms: Mapping[str, float]
    frames: bool = False

    @property
    def transport_ms(self) -> float:
        return self.round_trip_ms - self.total_ms

    @property
    def overhead_ms(self) -> float:
        """Everything but the forward passes: server bookkeeping, codec and transport."""
        return self.round_trip_ms - self.model_ms


@dataclass(frozen=True, slots=True)
class Prediction:
    """Frames the world model predicted for the steps after ``step``, and the actions it predicted them for."""

    seed: int
    step: int
    actions: NDArray[np.float32]
    frames: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """What happened. ``actions float32[steps, action_dim]`` are those executed: with the seed they are the
    whole episode, which can be replayed from them to the bit."""

    episode: int
    seed: int
    outcome: Outcome
    steps: int
    score: float  # highest of the episode; 0 when the env has no score
    actions: NDArray[np.float32]
    ticks: tuple[Tick, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    reason: str = ""
    wall_s: float = 0.0
    policy_revision: str = ""
    session: str = ""  # the server's name for it
    task: str = ""  # of the suite; "" where it has none
    deadline_misses: int = 0  # control periods in which no action was there (mode live)
    ended_s: float = 0.0  # seconds of the run that had passed by then, over all of its parts
    env_died: bool = False  # the env broke, not the policy: worth another try with a fresh one

    @property
    def success(self) -> bool:
        return self.outcome == Outcome.SUCCESS
