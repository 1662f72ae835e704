"""What was asked on a stream and has not had its last answer, without IO.

It says what has to be sent again on a new connection, and what of the server's messages is news.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..errors import Code, Reason
from ..wire import loop_pb2 as pb
from .stream import Attached

TURNINGS = ("reset", "rewind")
_DUPLICATE = "duplicate_in_flight"


@dataclass(eq=False)
class Asked:
    """A request without its last answer. ``seq`` 0: a reset or rewind. ``on``: the connection that has it."""

    message: pb.ClientMessage
    kind: str
    seq: int
    on: object = None
    answered: bool = False  # its chunk is here, and the frames besides it are not
    part: int = 0  # the highest part of its frames that was heard
    cancelled: bool = False  # and the server has to be told
    implied: int = 0  # of a reset or rewind that the server has, and whose answer was lost: 1 + the epoch before it

    @property
    def besides(self) -> bool:
        return self.kind == "observation" and self.message.observation.frames > 0


class Ledger:
    """Requests in the order they were asked; methods return what the client is to hear without the server's saying."""

    def __init__(self) -> None:
        self._asked: list[Asked] = []

    def __len__(self) -> int:
        return len(self._asked)

    def __iter__(self) -> Iterator[Asked]:
        return iter(self._asked)

    def add(self, message: pb.ClientMessage) -> list[pb.ServerMessage]:
        """A new request. Observations that it supersedes and no connection has had are not worth sending."""
        kind = message.WhichOneof("kind") or ""
        said = []
        if kind == "observation" and message.observation.supersede:
            said = [_skipped(asked.seq, "superseded") for asked in self._take_unsent()]
        seq = 0 if kind in TURNINGS else getattr(message, kind).seq
        self._asked.append(Asked(message, kind, seq))
        return said

    def cancel(self, seq: int) -> list[pb.ServerMessage]:
        """Nothing happens for one that is answered."""
        asked = self._find(seq)
        if asked is None:
            return []
        if asked.on is None:
            self._asked.remove(asked)
            return [_skipped(seq, "cancelled")]
        asked.cancelled = True
        return []

    def next(self, connection: object, window: int) -> Asked | None:
        """The first request that ``connection`` has to hear of; at most ``window`` may be there without an answer."""
        there = sum(asked.on is connection for asked in self._asked)
        for asked in self._asked:
            if asked.cancelled and asked.on is connection:
                return asked
            if asked.on is not connection:
                return asked if there < window else None
        return None

    def unsent(self, connection: object) -> bool:
        """Whether ``connection`` has still to hear of a request."""
        return any(asked.on is not connection for asked in self._asked)

    def received(self, last: int) -> int:
        """All up to this seq is answered; ``last``: the last one that was used."""
        return min((asked.seq for asked in self._asked if asked.seq), default=last + 1) - 1

    def hear(self, message: pb.ServerMessage) -> list[pb.ServerMessage]:
        """What of ``message`` the client has not heard: itself, what it means by now, or nothing."""
        kind = message.WhichOneof("kind") or ""
        if kind in TURNINGS or (kind == "error" and not message.error.seq):
            turning = next((asked for asked in self._asked if asked.kind in TURNINGS and not asked.implied), None)
            if turning is not None:
                self._asked.remove(turning)
            return [message] if turning is not None or kind == "error" else []
        if kind not in ("tick", "frames", "skipped", "error"):
            return [message]
        body = getattr(message, kind)
        asked = self._find(body.seq)
        if asked is None or (kind == "skipped" and body.reason == _DUPLICATE):
            return []  # heard before, or its answer is still to come
        said = self._turn(asked, body.epoch)
        if kind == "tick":
            return said + self._hear_tick(asked, message)
        if kind == "frames":
            return said + self._hear_frames(asked, message)
        return said + self._hear_end(asked, message)

    def settle(self, attached: Attached, known: int, connection: object) -> list[pb.ServerMessage]:
        """A new ``connection`` is attached to a session whose epoch was ``known``. What is under way is not sent again;
        what became of resets and rewinds shows in the epoch, and in what the server accepted after them. Where it
        does not show they are sent again: one after which nothing came may be done twice."""
        for asked in self._asked:
            if asked.seq and asked.seq in attached.pending:
                asked.on = connection
        turnings = [asked for asked in self._asked if asked.kind in TURNINGS and asked.on is not None]
        # A recondition to the past begins an epoch too.
        unsure = attached.pending or any(a.kind == "recondition" and a.seq <= attached.accepted for a in self._asked)
        if turnings and not unsure and attached.epoch - known == len(turnings):
            return self._turned(turnings[-1], attached.epoch)
        newest = max((n for n, asked in enumerate(self._asked) if 0 < asked.seq <= attached.accepted), default=0)
        for asked in self._asked[:newest]:
            if asked.kind in TURNINGS:
                asked.on, asked.implied = connection, 1 + known
        return []

    def _turn(self, asked: Asked, epoch: int) -> list[pb.ServerMessage]:
        """``asked`` is answered in ``epoch``: so are the resets and rewinds before it whose own answers were lost."""
        before = self._asked[: self._asked.index(asked)]
        implied = [turning for turning in before if turning.implied]
        return self._turned(implied[-1], epoch) if implied else []

    def _turned(self, last: Asked, epoch: int) -> list[pb.ServerMessage]:
        """All up to ``last`` is over: what was asked before a reset or rewind is never answered after it."""
        said: list[pb.ServerMessage] = []
        while True:
            asked = self._asked.pop(0)
            said.append(_turned(asked, epoch) if asked.kind in TURNINGS else _lost(asked, epoch))
            if asked is last:
                return said

    def _hear_tick(self, asked: Asked, message: pb.ServerMessage) -> list[pb.ServerMessage]:
        if asked.answered:
            return []
        tick = message.tick
        if asked.besides and not tick.HasField("frames") and not tick.HasField("frames_error"):
            asked.answered = True
        else:
            self._asked.remove(asked)
        return [message]

    def _hear_frames(self, asked: Asked, message: pb.ServerMessage) -> list[pb.ServerMessage]:
        part = message.frames.part
        if part and part <= asked.part:
            return []
        asked.part = part
        if not part:
            self._asked.remove(asked)
        return [message]

    def _hear_end(self, asked: Asked, message: pb.ServerMessage) -> list[pb.ServerMessage]:
        self._asked.remove(asked)
        if not asked.answered:
            return [message]
        error = message.error
        if message.WhichOneof("kind") == "skipped":
            error = _error(asked.seq, f"the frames were skipped: {message.skipped.reason}")
        return [pb.ServerMessage(frames=pb.FramePrediction(seq=asked.seq, error=error))]

    def _find(self, seq: int) -> Asked | None:
        return next((asked for asked in self._asked if asked.seq == seq), None) if seq else None

    def _take_unsent(self) -> list[Asked]:
        """Observations since the last reset or rewind that no connection has had; they are taken out."""
        last = max((n for n, asked in enumerate(self._asked) if asked.kind in TURNINGS), default=-1)
        unsent = [asked for asked in self._asked[last + 1 :] if asked.kind == "observation" and asked.on is None]
        self._asked = [asked for asked in self._asked if asked not in unsent]
        return unsent


def _skipped(seq: int, reason: str) -> pb.ServerMessage:
    return pb.ServerMessage(skipped=pb.Skipped(seq=seq, reason=reason))


def _error(seq: int, text: str, epoch: int = 0) -> pb.Error:
    return pb.Error(seq=seq, code=str(Code.FAILED_PRECONDITION), reason=str(Reason.STALE_EPOCH), text=text, epoch=epoch)


def _lost(asked: Asked, epoch: int) -> pb.ServerMessage:
    error = _error(asked.seq, "the answer was lost with the connection, and a newer epoch has begun", epoch)
    if asked.answered:
        return pb.ServerMessage(frames=pb.FramePrediction(seq=asked.seq, epoch=epoch, error=error))
    return pb.ServerMessage(error=error)


def _turned(asked: Asked, epoch: int) -> pb.ServerMessage:
    if asked.implied and epoch < asked.implied:  # the epoch before it goes on
        return pb.ServerMessage(error=_error(0, f"the {asked.kind} was refused; why was lost with the connection"))
    if asked.kind == "reset":
        return pb.ServerMessage(reset=pb.ResetReply(epoch=epoch))
    return pb.ServerMessage(rewind=pb.RewindReply(epoch=epoch, step=asked.message.rewind.step))
