"""One request whose frames are watched while they are made: a short stream of its own, without IO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ..errors import DeadlineExceeded, OmniLoopError, Reason, ServerUnavailable, StateError
from ..types import FramePrediction, TickResult
from ..wire import codec
from ..wire import loop_pb2 as pb
from .book import ANSWERS, Book

OnPart = Callable[[FramePrediction], None]


class Watch:
    """Send :attr:`messages`, then hand what comes to :meth:`hear` until it gives the answer, which is what the unary
    call would have given. ``on_part`` hears of every part; what it raises ends the call."""

    def __init__(self, book: Book, request: pb.Observation | pb.PredictRequest, on_part: OnPart) -> None:
        self._book, self._on_part = book, on_part
        self._besides = isinstance(request, pb.Observation) and request.frames > 0
        self._answer: TickResult | None = None  # the frames besides it are still to come
        request.previews = True
        message = pb.ClientMessage()
        if isinstance(request, pb.Observation):
            message.observation.CopyFrom(request)
        else:
            message.predict.CopyFrom(request)
        self.messages = (pb.ClientMessage(attach=pb.Attach(session=book.ref)), message)

    def hear(self, message: pb.ServerMessage) -> TickResult | None:
        """The answer, once it is there. Raises what the server refuses the request with."""
        kind = message.WhichOneof("kind")
        if kind == "attached":
            self._book.epoch = message.attached.epoch
        elif kind == "tick":
            answer = self._book.read(message.tick)
            if not self._besides or answer.frames is not None or answer.frames_error is not None:
                return answer
            self._answer = answer
        elif kind == "frames":
            return self._frames(message.frames)
        elif kind == "skipped":
            raise _skipped(message.skipped.reason)
        elif kind == "error":
            raise codec.decode_error(message.error)
        return None

    def ended(self, address: str) -> OmniLoopError:
        """The stream ended before the answer."""
        return ServerUnavailable(f"{address} ended the stream before the answer", reason=Reason.CLOSED)

    def _frames(self, message: pb.FramePrediction) -> TickResult | None:
        if message.part > 0 and not message.HasField("error"):
            self._on_part(codec.decode_frames(message, self._book.spec, ANSWERS))
            return None
        if self._answer is None:
            return None
        if message.HasField("error"):
            return replace(self._answer, frames_error=codec.decode_error(message.error))
        return replace(self._answer, frames=codec.decode_frames(message, self._book.spec, ANSWERS))


def _skipped(reason: str) -> OmniLoopError:
    if reason == "expired":
        return DeadlineExceeded("the deadline has passed")
    return StateError(f"the request was skipped: {reason}", reason=Reason.BUSY, retryable=True)
