"""The bounds every message is held to, checked in integers before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SHOWN, InvalidInput, Reason, TensorError
from . import loop_pb2 as pb

MIB = 1 << 20
MAX_NAME = 256  # characters of a name, or of an option's value
# A snapshot's name becomes that of a folder: nothing that leads elsewhere can be spelled with these.
SNAPSHOT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
# Of a plan: futures of one round, and rounds.
MAX_CANDIDATES, MAX_ITERATIONS = 4096, 64
MAX_PLANNED_FRAMES = 1 << 16  # candidates times steps times rounds: a search holds its runner until it is over


@dataclass(frozen=True, slots=True)
class Limits:
    """Published in ``GetServerInfo``. Bytes are those of the decoded array, not of a compressed image."""

    max_message_bytes: int = 32 * MIB
    max_tensor_bytes: int = 16 * MIB
    max_tensors: int = 64  # arrays in one message
    max_rank: int = 8
    max_image_pixels: int = 4 * MIB  # height * width of one PNG or JPEG
    max_prompt_bytes: int = 4096  # UTF-8
    max_sessions: int = 64
    # Of sessions and their streams; see SessionConfig.
    max_waiting: int = 4
    idle_ttl_s: float = 600.0
    grace_s: float = 60.0
    replies: int = 8
    min_ping_s: float = 10.0
    max_in_flight: int = 4
    outbox_bytes: int = 8 * MIB

    def check_message(self, nbytes: int) -> None:
        """Raises :class:`InvalidInput` (too large)."""
        if nbytes > self.max_message_bytes:
            raise InvalidInput(
                f"the message has {nbytes} bytes; at most {self.max_message_bytes} are taken", reason=Reason.TOO_LARGE
            )

    def check_count(self, count: int) -> None:
        """Raises :class:`TensorError` (too large) for more arrays than one message may hold."""
        if count > self.max_tensors:
            raise TensorError(
                f"the message has {count} arrays; at most {self.max_tensors} are taken", reason=Reason.TOO_LARGE
            )

    def check_shape(self, name: str, shape: Sequence[int], itemsize: int) -> int:
        """Bytes of an array of that shape; raises :class:`TensorError` before anybody allocates them.

        Python integers do not overflow, so the product is exact for any dimensions. A zero counts as one
        here: numpy multiplies the others all the same.
        """
        if len(shape) > self.max_rank:
            raise TensorError(f"{name!r} has rank {len(shape)}; at most {self.max_rank} is taken")
        padded = itemsize
        for dim in shape:
            if dim < 0:
                raise TensorError(f"{name!r} has the negative dimension {dim}")
            padded *= max(dim, 1)
        if padded > self.max_tensor_bytes:
            raise TensorError(
                f"{name!r} of shape {shown(shape)} takes {padded} bytes; at most {self.max_tensor_bytes} are taken",
                reason=Reason.TOO_LARGE,
            )
        return 0 if 0 in shape else padded

    def check_prompt(self, prompt: str) -> str:
        """The prompt; raises :class:`InvalidInput` when it is too long or not text."""
        try:
            size = len(prompt.encode())
        except UnicodeEncodeError:
            raise InvalidInput("the prompt is not valid UTF-8") from None
        if size > self.max_prompt_bytes:
            raise InvalidInput(
                f"the prompt has {size} bytes; at most {self.max_prompt_bytes} are taken", reason=Reason.TOO_LARGE
            )
        if "\0" in prompt:
            raise InvalidInput("the prompt holds a NUL character")
        return prompt


def check_name(what: str, name: str) -> None:
    """Raises :class:`InvalidInput` (too large) for a name that is too long to be looked up or repeated."""
    if len(name) > MAX_NAME:
        raise InvalidInput(
            f"{what} {name[:SHOWN]!r}... has {len(name)} characters; at most {MAX_NAME} are taken",
            reason=Reason.TOO_LARGE,
        )


def check_snapshot_name(name: str) -> str:
    """The name; raises :class:`InvalidInput` for one that is not on the allow-list."""
    if not SNAPSHOT_NAME.fullmatch(name):
        cut = f"{name[:SHOWN]!r}..." if len(name) > SHOWN else repr(name)
        raise InvalidInput(
            f"the snapshot's name is {cut}; it must be 1 to 100 letters, digits, dots, dashes and underscores of "
            "ASCII, the first a letter or a digit"
        )
    return name


def shown(shape: Sequence[int]) -> str:
    """``[96,96,3]``, for texts."""
    return "[" + ",".join(str(d) for d in shape) + "]"


def encode_limits(limits: Limits) -> pb.Limits:
    return pb.Limits(**{name: getattr(limits, name) for name in Limits.__slots__})


def decode_limits(message: pb.Limits) -> Limits:
    return Limits(**{name: getattr(message, name) for name in Limits.__slots__})
