"""A chunk as the pickle that LeRobot's client reads: ``list[TimedAction(timestamp, timestep, action)]``.

Written opcode by opcode, so that neither LeRobot nor torch is needed here. Each action is a tensor of its own, made by
``torch.tensor`` from its numbers: a pickled tensor would hold its storage, and a row of a chunk the whole chunk's.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

_HEAD = b"\x80\x04"
_ACTION = b"\x8c\x1flerobot.async_inference.helpers\x8c\x0bTimedAction\x93\x94"  # memo 0
_TENSOR = b"\x8c\x05torch\x8c\x06tensor\x93\x94"  # memo 1
_FLOAT = struct.Struct(">d")


def pickled(actions: NDArray[np.float32], timestamp: float, timestep: int, period_s: float) -> bytes:
    """``actions float32[n, action_dim]``; the first is labelled ``timestep`` and ``timestamp`` (seconds), each later
    one a step and ``period_s`` more."""
    parts = [_HEAD, _ACTION, b"0", _TENSOR, b"0", b"]", b"("]
    for row, action in enumerate(actions.tolist()):
        parts += (b"h\x00)\x81}(", _text("timestamp"), b"G", _FLOAT.pack(timestamp + row * period_s))
        parts += (_text("timestep"), b"\x8a\x08", (timestep + row).to_bytes(8, "little", signed=True))
        parts += (_text("action"), b"h\x01](")
        parts += (b"G" + _FLOAT.pack(number) for number in action)
        parts += (b"e\x85Rub",)
    parts.append(b"e.")
    return b"".join(parts)


def _text(text: str) -> bytes:
    data = text.encode()
    return b"\x8c" + bytes([len(data)]) + data
