"""An env whose simulator lives in another process, which may be of another Python environment.

What it gives is the simulator's to the bit. The checks every env makes are made on this side.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_loop.env import BaseEnv, EnvStep
from omni_loop.types import Array, ArraySpec

from .process import Limits, WorkerProcess
from .side.wire import Message

#: Starts a worker in this project's own environment.
HERE = (sys.executable, "-P", "-m", "omni_loop_envs.worker.side")


class WorkerEnv(BaseEnv):
    """The env that ``adapter`` makes of ``options`` in the process that ``command`` starts.

    ``instruction`` is the task in words, "" where the simulator has none; ``versions`` are those of the packages that
    decide what happens in it, by name.

    Raises (at every call):
        EnvFailed: the worker crashed, hung, raised or answered nonsense. It is killed, and this env of no more use.
        Unsupported: at the start, the worker is of another version than this side.
    """

    def __init__(
        self,
        name: str,
        adapter: str,
        options: Mapping[str, Any],
        *,
        command: Sequence[str] = HERE,
        environ: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.name, self._limits = name, limits or Limits()
        self._arrays: dict[str, Array] = {}
        self._wanted: tuple[str, ...] = ()
        self._worker = WorkerProcess(name, command, environ)
        try:
            hello = {"adapter": adapter, "options": dict(options)}
            said = self._worker.ask("hello", self._limits.start, hello).fields.get("spec")
            super().__init__(self._take_spec(said if isinstance(said, dict) else {}))
        except BaseException:
            self._worker.kill()
            raise

    @property
    def pid(self) -> int:
        """Of the worker's process."""
        return self._worker.pid

    @property
    def versions(self) -> Mapping[str, str]:
        return self._versions

    def _take_spec(self, said: Mapping[str, Any]) -> int:
        """Keep what the worker says it is; returns the step limit."""
        try:
            self.name = str(said["name"])
            self.observations = tuple(_spec(entry) for entry in said["observations"])
            self.action = _spec(said["action"])
            self.control_hz = float(said["control_hz"])
            self.score = None if said["score"] is None else str(said["score"])
            self.instruction = str(said["instruction"])
            self._versions = {str(name): str(version) for name, version in said["versions"].items()}
            return int(said["max_steps"])
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as e:
            raise self._worker.failed(f"describes its env wrongly ({type(e).__name__}: {e})") from None

    # One request each, whatever is looked at: the base asks for one array after the other, which are there by then.

    def reset(self, seed: int, keys: Collection[str] | None = None) -> dict[str, Array]:
        self._wanted = self._check_keys(keys)
        return super().reset(seed, keys)

    def step(self, action: Array, keys: Collection[str] | None = None) -> EnvStep:
        self._wanted = self._check_keys(keys)
        return super().step(action, keys)

    def observe(self, keys: Collection[str] | None = None) -> dict[str, Array]:
        self._require("observe", "running", "done")
        wanted = self._check_keys(keys)
        self._keep(self._ask("observe", {"keys": wanted}), wanted)
        return super().observe(wanted)

    def hold(self) -> NDArray[np.float32]:
        return np.asarray(self._array_of(self._ask("hold"), "action", self.action), np.float32)

    def _reset(self, seed: int) -> None:
        self._keep(self._ask("reset", {"seed": int(seed), "keys": self._wanted}), self._wanted)

    def _step(self, action: NDArray[np.float32]) -> EnvStep:
        answer = self._ask("step", {"keys": self._wanted}, {"action": action})
        self._keep(answer, self._wanted)
        said = answer.fields.get("outcome")
        try:
            info = {str(key): float(value) for key, value in said["info"].items()}  # type: ignore[index]
            over, cut, success = (bool(said[key]) for key in ("terminated", "truncated", "success"))  # type: ignore[index]
            return EnvStep({}, float(said["reward"]), over, cut, success, info)  # type: ignore[index]
        except (AttributeError, KeyError, TypeError, ValueError):
            raise self._worker.failed("answered 'step' without its outcome") from None

    def _array(self, key: str) -> Array:
        return self._arrays[key]

    def _render(self) -> NDArray[np.uint8]:
        frame = self._ask("render").arrays.get("frame")
        if frame is None or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise self._worker.failed("answered 'render' without a frame")
        return frame

    def _close(self) -> None:
        self._worker.close()

    def _ask(
        self, request: str, fields: Mapping[str, Any] | None = None, arrays: Mapping[str, Array] | None = None
    ) -> Message:
        return self._worker.ask(request, self._limits.answer, fields, arrays)

    def _keep(self, answer: Message, wanted: Sequence[str]) -> None:
        specs = {spec.name: spec for spec in self.observations}
        self._arrays = {key: self._array_of(answer, key, specs[key]) for key in wanted}

    def _array_of(self, answer: Message, key: str, spec: ArraySpec) -> Array:
        array = answer.arrays.get(key)
        if array is None or array.dtype != np.dtype(spec.dtype) or array.shape != spec.shape:
            got = "nothing" if array is None else f"{array.dtype}{list(array.shape)}"
            raise self._worker.failed(f"gave {got} for {key!r}, which is {spec.dtype}{list(spec.shape)}")
        return array


def _spec(entry: Mapping[str, Any]) -> ArraySpec:
    return ArraySpec(**{**entry, "shape": tuple(entry["shape"])})
