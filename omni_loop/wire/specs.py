"""ArraySpec and SessionSpec <-> proto."""

from __future__ import annotations

from ..errors import InvalidInput, Reason
from ..types import ArraySpec, Op, SessionSpec
from . import loop_pb2 as pb
from .tensors import dtype_code, dtype_name


def encode_array_spec(spec: ArraySpec) -> pb.ArraySpec:
    return pb.ArraySpec(
        name=spec.name,
        dtype=dtype_code(spec.dtype),
        shape=spec.shape,
        unit=spec.unit,
        low=spec.low,
        high=spec.high,
        optional=spec.optional,
        max_length=spec.max_length,
        description=spec.description,
    )


def decode_array_spec(message: pb.ArraySpec) -> ArraySpec:
    return ArraySpec(
        name=message.name,
        dtype=dtype_name(message.dtype),
        shape=tuple(message.shape),
        unit=message.unit,
        low=message.low if message.HasField("low") else None,
        high=message.high if message.HasField("high") else None,
        optional=message.optional,
        max_length=message.max_length,
        description=message.description,
    )


def encode_spec(spec: SessionSpec) -> pb.SessionSpec:
    return pb.SessionSpec(
        pipeline=spec.pipeline,
        observations=[encode_array_spec(s) for s in spec.observations],
        action=encode_array_spec(spec.action),
        horizon=spec.horizon,
        execution_horizon=spec.execution_horizon,
        control_hz=spec.control_hz,
        ops=[str(op) for op in spec.ops],
        frame=None if spec.frame is None else encode_array_spec(spec.frame),
        max_predict=spec.max_predict,
        prompt=spec.prompt,
        normalisation=spec.normalisation,
        description=spec.description,
        digest=spec.digest,
    )


def decode_spec(message: pb.SessionSpec) -> SessionSpec:
    """Raises :class:`InvalidInput` for an operation this version does not know."""
    try:
        ops = tuple(Op(op) for op in message.ops)
    except ValueError:
        raise InvalidInput(
            f"pipeline {message.pipeline!r} has operations this version does not know: {', '.join(message.ops)}",
            reason=Reason.BAD_SPEC,
        ) from None
    return SessionSpec(
        pipeline=message.pipeline,
        observations=tuple(decode_array_spec(s) for s in message.observations),
        action=decode_array_spec(message.action),
        horizon=message.horizon,
        execution_horizon=message.execution_horizon,
        control_hz=message.control_hz,
        ops=ops,
        frame=decode_array_spec(message.frame) if message.HasField("frame") else None,
        max_predict=message.max_predict,
        prompt=message.prompt,
        normalisation=message.normalisation,
        description=message.description,
    )
