"""How each policy type of LeRobot 0.6.1 is served; known by name, without importing LeRobot.

A LeRobot policy is written for one robot: queues, warm starts and random numbers belong to the object. Here a policy
is shared, so that what is one session's lies in its typed state and is lent to the object for one call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from omni_loop.errors import CheckpointError, Unsupported, nearest

LEROBOT = "0.6.1"
# What each way of normalising needs to know of a feature.
STATISTICS = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}


class History(Enum):
    """What of earlier observations a call is given."""

    NONE = "the present observation only"
    STACKED = "the last {n_obs_steps} observations, stacked"
    QUEUED = "the last {n_obs_steps} observations, put into the policy's queues for the call"


class Noise(Enum):
    """Where a call's random numbers come from; all are functions of session seed, epoch and tick."""

    NONE = "draws no random numbers"
    GIVEN = "starts from each session's own noise"
    ROWS = "draws each session's random numbers from its own generator"  # slower: every call of torch is looked at
    SEEDED = "draws from the global generator, seeded for the call"


@dataclass(frozen=True, slots=True)
class Family:
    """``chunk``: the setting that says how many actions a call gives. ``together``: sessions share a forward pass;
    else each has the policy alone for the call. ``rtc``: has LeRobot's real-time chunking. ``prompt``: reads an
    instruction. ``plain``: normalises by LeRobot's own normaliser steps, so that statistics can be demanded.
    ``note``: what else is particular."""

    chunk: str
    together: bool = False
    history: History = History.NONE
    noise: Noise = Noise.SEEDED
    rtc: bool = False
    prompt: bool = False
    plain: bool = False
    note: str = ""

    def describe(self, type_: str, config: Mapping[str, Any]) -> str:
        """One sentence for a spec's description."""
        how = "sessions share forward passes" if self.together else "one session at a time has the policy"
        history = self.history.value.format(n_obs_steps=config.get("n_obs_steps", 1))
        parts = (f"LeRobot {type_}: {how}", f"sees {history}", self.noise.value, self.note)
        return "; ".join(part for part in parts if part)


def _vla(chunk: str = "chunk_size", **particular: Any) -> Family:
    return Family(chunk, prompt=True, **particular)


_flow = partial(_vla, together=True, noise=Noise.GIVEN, rtc=True, plain=True)
_queued = partial(Family, history=History.QUEUED, plain=True)
FAMILIES: Mapping[str, Family] = {
    "act": Family("chunk_size", together=True, noise=Noise.NONE, plain=True),
    "diffusion": Family("horizon", together=True, history=History.STACKED, noise=Noise.GIVEN, plain=True),
    "multi_task_dit": _queued("horizon", together=True, noise=Noise.ROWS, prompt=True),
    "vqbet": _queued("action_chunk_size", together=True, noise=Noise.ROWS),
    "tdmpc": _queued("horizon", note="each session's last plan is its own warm start"),
    "smolvla": _flow(),
    "pi0": _flow(),
    "pi05": _flow(),
    "pi0_fast": _vla("n_action_steps", plain=True),
    "eo1": _vla(),
    "evo1": _vla(rtc=True),
    "fastwam": _vla("action_horizon"),
    "groot": _vla("n_action_steps", rtc=True),
    "molmoact2": _vla("n_action_steps", rtc=True),
    "vla_jepa": _vla(),
    "wall_x": _vla(),
    "xvla": _vla(),
    "gaussian_actor": Family("", note="gives single actions: a chunk has one step"),
}

#: Types that cannot be shared, and why.
REFUSED: Mapping[str, str] = {
    "lingbot_va": "it keeps an episode's video caches in the object, where neither forks nor rewinds can follow",
}


def family_of(type_: str) -> Family:
    """How policies of ``type_`` are served.

    Raises:
        Unsupported: LeRobot has no such type, or one that cannot be shared; the text says which.
    """
    if type_ in REFUSED:
        raise Unsupported(f"LeRobot's {type_!r} is not served: {REFUSED[type_]}")
    if type_ not in FAMILIES:
        raise Unsupported(f"LeRobot {LEROBOT} has no policy type {type_!r}.{nearest(type_, FAMILIES)}")
    return FAMILIES[type_]


def can_join(type_: str, config: Mapping[str, Any]) -> bool:
    """Whether a tick may ask for a chunk that continues the one before, in a batch with others that do not. Chunks
    relative to a past state cannot be continued; those of a temporal ensemble are not what the policy gave."""
    family = family_of(type_)
    plain = not config.get("use_relative_actions") and config.get("temporal_ensemble_coeff") is None
    return family.rtc and family.together and plain


def chunk_length(type_: str, config: Mapping[str, Any]) -> int:
    """How many actions one call gives, from the present step on."""
    setting = family_of(type_).chunk
    if setting and not isinstance(config.get(setting), int):
        raise CheckpointError(f"config.json of a LeRobot {type_} policy must say its {setting!r}")
    length = int(config[setting]) if setting else 1
    if type_ in ("diffusion", "multi_task_dit"):  # their horizon begins at the oldest observation
        if (left := length - int(config.get("n_obs_steps", 1)) + 1) < 1:
            raise CheckpointError(f"config.json of a LeRobot {type_} policy: n_obs_steps is above its {setting!r}")
        return left
    if type_ == "tdmpc":
        if (repeats := int(config.get("n_action_repeats", 1))) > 1:
            return repeats
        return length if config.get("use_mpc", True) else 1
    return length


def executed(type_: str, config: Mapping[str, Any]) -> int:
    """How many of them are executed before the next call."""
    length = chunk_length(type_, config)
    if type_ == "vqbet" or (type_ == "tdmpc" and int(config.get("n_action_repeats", 1)) > 1):
        return length  # all of them
    return min(int(config.get("n_action_steps", 1)), length)
