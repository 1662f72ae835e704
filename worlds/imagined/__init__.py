"""Predicted frames as an environment: any pipeline that offers RECONDITION and PREDICT, driven through the client API.

``ImaginedEnv`` is a ``gymnasium.Env`` over one session, ``ImaginedVectorEnv`` a ``gymnasium.vector.VectorEnv`` over
many of one server, which batches them. :class:`.env.Imagined`, registered as the env ``imagined``, is the same for
whatever evaluates in a simulator.
"""

from __future__ import annotations

from .judge import Coverage, Judge, Progress, Seen, Verdict
from .served import ServedWorld
from .single import ImaginedEnv
from .start import EnvStart, Source, Start
from .vector import ImaginedVectorEnv

__all__ = [
    "Coverage",
    "EnvStart",
    "ImaginedEnv",
    "ImaginedVectorEnv",
    "Judge",
    "Progress",
    "Seen",
    "ServedWorld",
    "Source",
    "Start",
    "Verdict",
]
