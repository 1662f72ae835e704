"""LeRobot's robots at this server: each its own session, its newest observation, and its answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import SHOWN, InvalidInput, OmniLoopError, Reason, ServerUnavailable, TensorError, UnknownName, nearest
from ...loop.tick import eager
from ...types import MAX_COUNT, Array
from ..refusal import public
from . import actions, pickles
from .schema import Schema
from .seat import Seat

if TYPE_CHECKING:
    from ..service import LoopService

_PREFIX, _IMAGES = "observation.", "observation.images."
_TASK = "task"
_MOST_ACTIONS = 1 << 16


@dataclass(frozen=True, slots=True)
class Feature:
    """One of a robot's dataset features: a camera, or a vector of numbers with a name each."""

    name: str
    names: tuple[str, ...] = ()  # of a vector's numbers; (): a camera, or an array that comes whole


@dataclass(frozen=True, slots=True)
class Setup:
    """What a robot says once: the model it names, what it will send, and how many actions it takes at a time."""

    model: str
    features: tuple[Feature, ...]
    actions_per_chunk: int

    @classmethod
    def read(cls, data: bytes, service: LoopService) -> Setup:
        """From the pickle of a RemotePolicyConfig. Its ``device`` and ``policy_type`` are this server's own affair.
        Raises :class:`InvalidInput`."""
        found = pickles.read(data, pickles.SETUP, service.limits)
        model, most = found.get("pretrained_name_or_path"), found.get("actions_per_chunk")
        if type(model) is not str:
            raise InvalidInput("pretrained_name_or_path must be text")
        if type(most) is not int or not 1 <= most <= _MOST_ACTIONS:
            raise InvalidInput(f"actions_per_chunk must be 1 to {_MOST_ACTIONS}")
        given = pickles.entries(found.get("lerobot_features"))
        renamed = pickles.entries(found.get("rename_map") or {})
        service.limits.check_count(len(given))
        return cls(model, tuple(_feature(name, each, renamed) for name, each in given.items()), most)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(feature.name for feature in self.features)


def _feature(name: str, value: Any, renamed: Mapping[str, Any]) -> Feature:
    said = pickles.entries(value)
    names = said.get("names")
    shown = renamed.get(name, name)
    if type(shown) is not str:
        raise InvalidInput(f"rename_map gives {name[:SHOWN]!r} a name that is no text")
    if said.get("dtype") in ("image", "video"):
        return Feature(shown, ())
    if not isinstance(names, list | tuple) or not all(type(each) is str for each in names):
        raise InvalidInput(f"lerobot_features: {name[:SHOWN]!r} does not name its numbers")
    return Feature(shown, tuple(names))


@dataclass(frozen=True, slots=True)
class Seen:
    """One observation. ``timestep`` is the label of the last action that the robot has executed."""

    timestamp: float
    timestep: int
    arrays: Mapping[str, Array]
    task: str
    came: float  # of time.perf_counter


class Robot:
    """One connection. Of observations that wait the newest is computed; each ends in one answer, or one error, or is
    replaced by a newer one."""

    def __init__(self, service: LoopService, setup: Setup, schema: Schema, seat: Seat) -> None:
        self._service, self._setup, self._schema, self.seat = service, setup, schema, seat
        self._waiting: Seen | None = None
        self._ready: bytes | OmniLoopError | None = None
        self._changed = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self.replaced = 0

    def observe(self, data: bytes) -> None:
        """Take the pickle of a TimedObservation; what waited before is replaced. Raises :class:`InvalidInput`, for
        arrays :class:`TensorError`."""
        self.replaced += self._waiting is not None
        self._waiting = self._read(data, time.perf_counter())
        if self._work is None or self._work.done():
            self._work = eager(self._run())

    async def answer(self, wait_s: float) -> bytes:
        """The newest chunk that nobody has fetched; b"" when none comes within ``wait_s``. Raises what its observation
        ended with."""
        try:
            async with asyncio.timeout(wait_s):
                while self._ready is None:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return b""
        ready, self._ready = self._ready, None
        if isinstance(ready, OmniLoopError):
            raise ready
        return ready

    async def close(self) -> None:
        self._waiting = None
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)
        await self.seat.close()

    async def _run(self) -> None:
        while (seen := self._waiting) is not None:
            self._waiting = None
            try:
                self._ready = await self._infer(seen)
            except Exception as error:
                self._ready = public(error, "GetActions")
            self._changed.set()

    async def _infer(self, seen: Seen) -> bytes:
        """The answer as bytes. The chunk's first action is for the step after the last executed one: its label is one
        more than the observation's, where LeRobot's own server repeats it and its client then drops that action."""
        if self.seat.keys is None:
            await self.seat.open(self._schema.keys(self._setup.names), seen.task)
        elif not self.seat.follows(seen.task):
            await self.seat.reset(prompt=seen.task)
        result = await self.seat.infer(seen.arrays, seen.timestep, 1e3 * (time.perf_counter() - seen.came))
        if result.chunk is None:
            raise ServerUnavailable("the pipeline gave no actions", reason=Reason.BAD_OUTPUT, retryable=False)
        rows = result.chunk.actions[: self._setup.actions_per_chunk]
        return actions.pickled(rows, seen.timestamp, seen.timestep + 1, 1 / self._schema.spec.control_hz)

    def _read(self, data: bytes, came: float) -> Seen:
        found = pickles.read(data, pickles.OBSERVATION, self._service.limits)
        timestamp, timestep = found.get("timestamp"), found.get("timestep")
        if type(timestep) is not int or not 0 <= timestep <= MAX_COUNT:
            raise InvalidInput("the observation's timestep must be an integer of at least 0")
        if type(timestamp) is not float:
            raise InvalidInput("the observation's timestamp must be a float")
        raw = pickles.entries(found.get("observation"))
        task = raw.pop(_TASK, "")
        if type(task) is not str:
            raise InvalidInput(f"the observation's {_TASK} must be text")
        gathered = gather(self._setup.features, raw)
        arrays = self._schema.arrays(gathered, self._schema.keys(gathered))
        return Seen(timestamp, timestep, arrays, task if self._schema.spec.prompt else "", came)


def gather(features: tuple[Feature, ...], raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a robot sends by motor and camera, by dataset feature. Raises :class:`TensorError` that names what is
    missing and what is more than was said."""
    cameras = {f.name: f.name.removeprefix(_IMAGES).removeprefix(_PREFIX) for f in features if not f.names}
    wanted = {*cameras.values(), *(name for f in features for name in f.names)}
    missing, extra = sorted(wanted - raw.keys()), sorted(raw.keys() - wanted)
    if missing or extra:
        said = [f"missing {', '.join(map(repr, missing[:8]))}"] * bool(missing)
        said += [f"more than was said: {', '.join(repr(e[:SHOWN]) for e in extra[:8])}"] * bool(extra)
        hint = nearest(extra[0], missing) if missing and extra else ""
        raise TensorError(f"the robot's observation: {'; '.join(said)}.{hint}")
    gathered: dict[str, Any] = {name: raw[key] for name, key in cameras.items()}
    for feature in features:
        if feature.names:
            numbers = [_number(name, raw[name]) for name in feature.names]
            gathered[feature.name] = np.array(numbers, np.float32)
    return gathered


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool | int | float | np.number) or (isinstance(value, np.ndarray) and value.size == 1):
        return float(value)
    raise TensorError(f"{name[:SHOWN]!r} is a {type(value).__name__}; a number is needed")


def choose(models: Mapping[str, str], model: str) -> str:
    """The pipeline that a client gets for the model it names. Raises :class:`UnknownName`."""
    if model not in models:
        raise UnknownName(f"no model {model[:SHOWN]!r} is on this server's list.{nearest(model, models)}")
    return models[model]
