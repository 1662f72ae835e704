"""What one stream has to say and has not said yet, bounded, without IO.

While the client reads nothing is lost. When more than ``max_bytes`` wait the newest wins: what comes besides answers
goes first (parts of frames, then whole frames), then the chunks that a newer one has made useless; each is replaced by
a few bytes that say so. Every request still has exactly one terminal answer, in its order. Answers of the other kinds
(predictions, plans, errors) are never replaced: then the outbox is :attr:`~Outbox.full`, and the client is not read
from.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from .._compat import StrEnum
from ..errors import Reason, StateError
from ..telemetry import metrics
from ..types import TickResult
from ..wire import codec
from ..wire import loop_pb2 as pb

ENTRY_BYTES = 256  # what an entry takes besides its bytes
SUPERSEDED = "superseded"

_dropped = metrics.counter(
    "omni_loop_outbox_dropped", "Messages that clients did not read in time, replaced or left out", ("kind",)
)


class Kind(StrEnum):
    """What may happen to a message that waits for too long."""

    ANSWER = "answer"  # nothing
    CHUNK = "chunk"  # the answer of an observation: replaced by skipped{superseded} once there is a newer one
    FRAMES = "frames"  # whole frames besides an answer: replaced by an error
    PART = "part"  # frames on their way: left out


def kind_of(result: TickResult) -> Kind:
    """Of a tick's answer, or of the part of it that leaves before its frames."""
    alone = result.frames is None and result.frames_error is None
    of_observation = result.chunk is not None and result.plan is None and (alone or result.early is not None)
    return Kind.CHUNK if of_observation else Kind.ANSWER


@dataclass(slots=True)
class _Entry:
    kind: Kind
    data: bytes
    seq: int
    epoch: int

    @property
    def nbytes(self) -> int:
        return ENTRY_BYTES + len(self.data)


class Outbox:
    """:meth:`put` and :meth:`take`; the order is that of putting."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.nbytes = 0
        self.dropped = 0  # messages replaced or left out
        self._waiting: OrderedDict[int, _Entry] = OrderedDict()
        self._number = 0
        # Numbers of the entries that may go, oldest first. They leave by `take` or by `_shrink`, both at the front.
        self._may_go: dict[Kind, deque[int]] = {kind: deque() for kind in (Kind.PART, Kind.FRAMES, Kind.CHUNK)}
        self._due: dict[int, bool] = {}  # seqs whose frames are still to come: whether their chunk was replaced
        self._lost: dict[int, int] = {}  # seqs whose frames were replaced: the entry that says so

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        """More waits than may, although all that can be is replaced."""
        return self.nbytes > self.max_bytes

    def put(self, kind: Kind, message: pb.ServerMessage, seq: int = 0, epoch: int = 0, *, more: bool = False) -> None:
        """Add ``message``. ``seq``: the request it belongs to; ``epoch``: of what may take its place. ``more``: FRAMES
        of the seq will follow."""
        if kind is Kind.CHUNK and more:
            self._due[seq] = False
        elif self._due.pop(seq, False) if kind is Kind.FRAMES else kind is Kind.PART and self._due.get(seq, False):
            self._count(kind)  # the request was answered as superseded
            return
        self._number += 1
        entry = _Entry(kind, message.SerializeToString(deterministic=True), seq, epoch)
        self._waiting[self._number] = entry
        self.nbytes += entry.nbytes
        if kind is not Kind.ANSWER:
            self._may_go[kind].append(self._number)
        if self.full:
            self._shrink()

    def take(self) -> bytes | None:
        """The oldest message; None: nothing waits."""
        if not self._waiting:
            return None
        number, entry = self._waiting.popitem(last=False)
        self.nbytes -= entry.nbytes
        if entry.kind is not Kind.ANSWER:
            self._may_go[entry.kind].popleft()
        elif self._lost.get(entry.seq) == number:
            del self._lost[entry.seq]
        return entry.data

    def _shrink(self) -> None:
        parts, frames, chunks = (self._may_go[kind] for kind in (Kind.PART, Kind.FRAMES, Kind.CHUNK))
        while self.full and parts:
            self.nbytes -= self._waiting.pop(parts.popleft()).nbytes
            self._count(Kind.PART)
        while self.full and frames:
            number = frames.popleft()
            entry = self._waiting[number]
            error = StateError("the frames waited for too long to be read", reason=Reason.SUPERSEDED)
            lost = codec.encode_frames_error(error, entry.seq, entry.epoch)
            self._replace(entry, pb.ServerMessage(frames=lost))
            self._lost[entry.seq] = number
        while self.full and len(chunks) > 1:
            entry = self._waiting[chunks.popleft()]
            skipped = pb.Skipped(seq=entry.seq, reason=SUPERSEDED, epoch=entry.epoch)
            self._replace(entry, pb.ServerMessage(skipped=skipped))
            if entry.seq in self._due:
                self._due[entry.seq] = True
            if number := self._lost.pop(entry.seq, 0):  # one end is enough
                self.nbytes -= self._waiting.pop(number).nbytes

    def _replace(self, entry: _Entry, message: pb.ServerMessage) -> None:
        self.nbytes -= entry.nbytes
        self._count(entry.kind)
        entry.kind, entry.data = Kind.ANSWER, message.SerializeToString(deterministic=True)
        self.nbytes += entry.nbytes

    def _count(self, kind: Kind) -> None:
        self.dropped += 1
        _dropped.inc(kind=kind)
