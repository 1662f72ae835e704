"""Dialects of openpi's websocket protocol: what each calls things, and how it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...errors import SHOWN, InvalidInput, nearest
from ...messages import Scalar
from ...types import SessionSpec, TickResult
from . import msgpack

INFER, RESET = "infer", "reset"
_STEPS = "num_inference_steps"


@dataclass(frozen=True, slots=True)
class Asked:
    """A message: what it asks for, and what stood in it besides the observation. ``session``: the client's own name
    for one of its sessions on this connection."""

    endpoint: str
    observation: Mapping[str, Any]
    prompt: str = ""
    session: str = ""
    seed: int | None = None
    options: Mapping[str, Scalar] = field(default_factory=dict)


class Openpi:
    """openpi's own: maps in, maps out."""

    # What may stand in a message besides the observation, and its type.
    controls: Mapping[str, type] = {"prompt": str, "endpoint": str}

    def metadata(self, spec: SessionSpec, own: Mapping[str, Scalar]) -> dict[str, Any]:
        """What a client is sent when it connects. ``own``: the deployment's, which comes first."""
        said: dict[str, Any] = {
            "pipeline": spec.pipeline,
            "action_dim": spec.action.shape[0],
            "action_horizon": spec.horizon,
            "execution_horizon": spec.execution_horizon,
            "control_hz": spec.control_hz,
            "reads_prompt": spec.prompt,
        }
        return {**said, **own}

    def read(self, message: Any) -> Asked:
        """Raises :class:`InvalidInput` for what is no map, or has a field of the wrong type."""
        if not isinstance(message, dict):
            raise InvalidInput(f"a message must be a map of an observation, not a {type(message).__name__}")
        controls: dict[str, Any] = {}
        seen: dict[str, Any] = {}
        for key, value in message.items():
            kind = self.controls.get(key) if isinstance(key, str) else None
            if kind is None:
                _flatten(_named(key), value, seen)
            elif value is not None:
                controls[key] = _typed(key, value, kind)
        endpoint = controls.get("endpoint", INFER)
        if endpoint not in (INFER, RESET):
            raise InvalidInput(f"no endpoint is called {endpoint[:SHOWN]!r}.{nearest(endpoint, (INFER, RESET))}")
        return Asked(
            endpoint,
            seen,
            controls.get("prompt", ""),
            controls.get("session_id", ""),
            controls.get("seed"),
            _sampling(controls.get("sampling_params", {})),
        )

    def answer(self, result: TickResult, timing: Mapping[str, float]) -> bytes:
        """``timing``: of this server, in milliseconds."""
        assert result.chunk is not None
        reply = {
            "actions": result.chunk.actions,
            "policy_timing": {"infer_ms": result.timings.model_ms},
            "server_timing": timing,
        }
        return msgpack.pack(reply)

    def was_reset(self) -> str | bytes:
        return msgpack.pack({"status": "reset successful"})


class RoboArena(Openpi):
    """RoboArena's and DreamZero's: an ``endpoint`` in every message, a bare array as the answer, text after a reset."""

    controls: Mapping[str, type] = {**Openpi.controls, "session_id": str}

    def metadata(self, spec: SessionSpec, own: Mapping[str, Scalar]) -> dict[str, Any]:
        images = [s.shape for s in spec.observations if len(s.shape) == 3]
        said: dict[str, Any] = {
            "image_resolution": images[0][:2] if images else None,
            "needs_wrist_camera": any("wrist" in s.name for s in spec.observations if not s.optional),
            "n_external_cameras": sum(len(s.shape) == 3 and "wrist" not in s.name for s in spec.observations),
            "needs_stereo_camera": False,
            "needs_session_id": False,
            "action_space": spec.action.name,
        }
        return {**super().metadata(spec, {}), **said, **own}

    def answer(self, result: TickResult, timing: Mapping[str, float]) -> bytes:
        assert result.chunk is not None
        return msgpack.pack(result.chunk.actions)

    def was_reset(self) -> str | bytes:
        return "reset successful"


class Realtime(Openpi):
    """``/v1/realtime/robot/openpi``: a session's name, its seed, and how the policy samples."""

    controls: Mapping[str, type] = {**Openpi.controls, "session_id": str, "seed": int, "sampling_params": dict}


DIALECTS: dict[str, Openpi] = {"openpi": Openpi(), "roboarena": RoboArena(), "realtime": Realtime()}


def _named(key: Any) -> str:
    return key if isinstance(key, str) else repr(key)


def _typed(key: str, value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise InvalidInput(f"{key!r} is a {type(value).__name__}; it must be a {kind.__name__}")
    return value


def _flatten(key: str, value: Any, into: dict[str, Any]) -> None:
    """Maps in each other become ``outer/inner``."""
    if not isinstance(value, dict):
        into[key] = value
        return
    for inner, each in value.items():
        _flatten(f"{key}/{_named(inner)}", each, into)


def _sampling(params: Mapping[Any, Any]) -> dict[str, Scalar]:
    """Options of the session; raises :class:`InvalidInput` for one that nothing here samples by."""
    for name, value in params.items():
        if name != _STEPS:
            raise InvalidInput(f"sampling_params has no {_named(name)[:SHOWN]!r}.{nearest(_named(name), [_STEPS])}")
        _typed(name, value, int)
    return {"inference_steps": params[_STEPS]} if _STEPS in params else {}
