"""The only decoder. Everything that comes off a wire passes through here, and every limit is enforced here.

Bytes become a message (:func:`parse`), a message becomes checked values: sizes in integers before anything is
allocated, then finite values, then the session's spec. Whatever does not fit raises a typed error
(:class:`~omni_loop.errors.InvalidInput` and its kind) and nothing else.
"""

from __future__ import annotations

from .check import (
    check_actions,
    check_array,
    check_keys,
    check_observation,
)
from .faults import ERROR_KEY, decode_error, encode_error
from .limits import (
    MAX_CANDIDATES,
    MAX_ITERATIONS,
    MAX_NAME,
    Limits,
    check_name,
    check_snapshot_name,
    decode_limits,
    encode_limits,
)
from .replies import decode_frames, decode_result, encode_frames, encode_frames_error, encode_result
from .requests import (
    METHODS,
    Plan,
    Predict,
    Recondition,
    check_list,
    check_open,
    check_plan,
    check_rewind,
    decode_observation,
    decode_plan,
    decode_predict,
    decode_recondition,
    goal_spec,
    parse,
)
from .specs import decode_array_spec, decode_spec, encode_array_spec, encode_spec
from .tensors import check_finite, decode_tensor, encode_tensor

__all__ = [
    "ERROR_KEY",
    "MAX_CANDIDATES",
    "MAX_ITERATIONS",
    "MAX_NAME",
    "METHODS",
    "Limits",
    "Plan",
    "Predict",
    "Recondition",
    "check_actions",
    "check_array",
    "check_finite",
    "check_keys",
    "check_list",
    "check_name",
    "check_observation",
    "check_open",
    "check_plan",
    "check_rewind",
    "check_snapshot_name",
    "decode_array_spec",
    "decode_error",
    "decode_frames",
    "decode_limits",
    "decode_observation",
    "decode_plan",
    "decode_predict",
    "decode_recondition",
    "decode_result",
    "decode_spec",
    "decode_tensor",
    "encode_array_spec",
    "encode_error",
    "encode_frames",
    "encode_frames_error",
    "encode_limits",
    "encode_result",
    "encode_spec",
    "encode_tensor",
    "goal_spec",
    "parse",
]
