"""Answers kept for whoever asks for their seq again: the last few of the epoch, bounded in number and bytes."""

from __future__ import annotations

from collections import OrderedDict

from ..types import TickResult

KEPT_BYTES = 8 << 20  # of arrays; the last answer is kept whatever its size


class Replies:
    """The very objects that were answered, so that a repeat is the same bytes. ``limit``: most that are kept."""

    def __init__(self, limit: int, max_bytes: int = KEPT_BYTES) -> None:
        self._limit, self._max_bytes = limit, max_bytes
        self._kept: OrderedDict[int, TickResult] = OrderedDict()
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, seq: int) -> TickResult | None:
        return self._kept.get(seq)

    def after(self, seq: int) -> tuple[TickResult, ...]:
        """Those above ``seq``, in order."""
        return tuple(reply for key, reply in self._kept.items() if key > seq)

    def keep(self, reply: TickResult) -> list[int]:
        """``reply`` is the answer of its seq from now on; which seqs had to make room for it."""
        before = self._kept.get(reply.seq)
        self.nbytes += _nbytes(reply) - (0 if before is None else _nbytes(before))
        self._kept[reply.seq] = reply
        gone: list[int] = []
        while len(self._kept) > 1 and (len(self._kept) > self._limit or self.nbytes > self._max_bytes):
            seq, old = self._kept.popitem(last=False)
            self.nbytes -= _nbytes(old)
            gone.append(seq)
        return gone

    def clear(self) -> None:
        self._kept.clear()
        self.nbytes = 0


def _nbytes(reply: TickResult) -> int:
    total = 0 if reply.chunk is None else reply.chunk.actions.nbytes
    if reply.frames is not None:
        total += reply.frames.frames.nbytes
        total += 0 if reply.frames.scene is None else reply.frames.scene.nbytes
    return total
