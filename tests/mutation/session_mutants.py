"""Planted bugs of session machine, outbox and codec, and the check that must find each."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from omni_loop.errors import Reason
from omni_loop.serve.outbox import Kind, Outbox
from omni_loop.session import machine as machines
from omni_loop.session.machine import Arrival, Event, Phase, SessionMachine, Standing, Verdict
from omni_loop.wire import check, codec, images, limits, replies, requests, tensors
from omni_loop.wire import loop_pb2 as pb

from . import models
from .mutants import Mutant, instead

Change = Callable[[Any], Any]


def _arrives_as(wrong: Arrival, right: Arrival) -> Change:
    """What is ``right`` is taken for ``wrong``."""

    def change(original: Any) -> Any:
        def arrival(self: SessionMachine, seq: int) -> Arrival:
            found: Arrival = original(self, seq)
            return wrong if found is right else found

        return arrival

    return change


def _entry(key: Any, value: Any) -> Change:
    return lambda original: {**original, key: value}


def _attribute(name: str, value: Callable[[SessionMachine], Any]) -> Change:
    """After the method, ``name`` is something else."""

    def change(original: Any) -> Any:
        def method(self: SessionMachine, *args: Any, **named: Any) -> Any:
            before = value(self)
            result = original(self, *args, **named)
            setattr(self, name, before)
            return result

        return method

    return change


def _accept_lowers(original: Any) -> Any:
    def accept(self: SessionMachine, seq: int) -> None:
        original(self, seq)
        self.accepted = seq

    return accept


def _plan_counts(original: Any) -> Any:
    def replied(self: SessionMachine, seq: int) -> None:
        original(self, seq)
        self.tick += 1

    return replied


def _drops_the_committed(original: Any) -> Any:
    def dropped(self: SessionMachine, seq: int) -> None:
        if seq in self.pending and seq == self.running:
            self.pending.remove(seq)
            self.running = 0
        else:
            original(self, seq)

    return dropped


def _supersedes_the_running(original: Any) -> Any:
    return lambda self, seq: self.pending.remove(seq) if seq in self.pending else None


def _judges_first(original: Any) -> Any:
    """It says no after it has changed something."""

    def started(self: SessionMachine, seq: int) -> None:
        self.running = seq
        original(self, seq)

    return started


def _waits_without_bound(original: Any) -> Any:
    return lambda self, seq, freeing=0: original(self, seq, freeing=1 << 30)


def _child_of_all(original: Any) -> Any:
    def forked(self: SessionMachine) -> SessionMachine:
        child: SessionMachine = original(self)
        child.accepted = self.accepted
        return child

    return forked


def _newest_goes(original: Any) -> Any:
    """The newest chunk is replaced, not the oldest."""

    def shrink(self: Outbox) -> None:
        for waiting in self._may_go.values():
            waiting.reverse()
        original(self)
        for waiting in self._may_go.values():
            waiting.reverse()

    return shrink


def _goes_without_a_word(original: Any) -> Any:
    def take(self: Outbox) -> bytes | None:
        taken: bytes | None = original(self)
        while taken is not None and pb.ServerMessage.FromString(taken).HasField("skipped"):
            taken = original(self)
        return taken

    return take


def _frames_of_the_replaced(original: Any) -> Any:
    def put(self: Outbox, kind: Kind, *args: Any, more: bool = False, **named: Any) -> None:
        original(self, kind, *args, more=False, **named)

    return put


def _swaps_two(original: Any) -> Any:
    held: list[bytes] = []

    def take(self: Outbox) -> bytes | None:
        if held:
            return held.pop()
        first: bytes | None = original(self)
        second: bytes | None = original(self)
        if first is not None and second is not None:
            held.append(first)
        return second or first

    return take


def _takes_uncounted(original: Any) -> Any:
    def take(self: Outbox) -> bytes | None:
        before = self.nbytes
        taken: bytes | None = original(self)
        self.nbytes = before
        return taken

    return take


def _wraps(original: Any) -> Any:
    """Sizes as 64-bit integers, which overflow."""

    def check_shape(self: limits.Limits, name: str, shape: Any, itemsize: int) -> int:
        with np.errstate(over="ignore"):
            nbytes = int(np.prod(np.array([itemsize, *shape], np.int64)))
        original(replace(self, max_tensor_bytes=1 << 200), name, shape, itemsize)
        return nbytes

    return check_shape


def _transposed(original: Any) -> Any:
    return lambda array, encoding="raw": original(np.asarray(array).T if np.ndim(array) == 2 else array, encoding)


def _next_step(original: Any) -> Any:
    def decode(reply: Any, *args: Any) -> Any:
        return replace(original(reply, *args), first_step=reply.chunk.first_step + 1)

    return decode


def _any_reason(original: Any) -> Any:
    def encode(error: Any, *args: Any) -> Any:
        message = original(error, *args)
        message.reason = str(Reason.STAGE_FAILED)
        return message

    return encode


def _untyped(original: Any) -> Any:
    return lambda kind, raw, limits: kind.FromString(raw)


def _any_picture(original: Any) -> Any:
    def decoded(name: str, form: str, data: bytes, size: tuple[int, int]) -> Any:
        from PIL import Image

        return Image.open(io.BytesIO(data), formats=(form,)).convert("RGB").resize(size)

    return decoded


def _machine(bug: str, name: str, change: Change, owner: Any = SessionMachine) -> Mutant:
    return Mutant(bug, owner, name, change, "the machine's model", models.machine)


def _outbox(bug: str, name: str, change: Change, bounded: bool = False) -> Mutant:
    found_by, check_ = ("the outbox's bound", models.bounded) if bounded else ("the outbox's model", models.outbox)
    return Mutant(bug, Outbox, name, change, found_by, check_)


def _codec(bug: str, owner: Any, name: str, change: Change, found_by: str = "the codec's fuzzer") -> Mutant:
    checks = {"named bad inputs": models.named, "a round trip": models.round_trip, "the codec's fuzzer": models.fuzzed}
    return Mutant(bug, owner, name, change, found_by, checks[found_by])


_NOTHING = instead(lambda *args, **named: None)

SESSION_MUTANTS = (
    _machine("a duplicate is computed again", "arrival", _arrives_as(Arrival.NEXT, Arrival.ANSWERED)),
    _machine("a seq under way is accepted twice", "arrival", _arrives_as(Arrival.NEXT, Arrival.WAITING)),
    _machine("a stale seq is computed", "arrival", _arrives_as(Arrival.AHEAD, Arrival.OLD)),
    _machine("a seq that failed is never taken again", "arrival", _arrives_as(Arrival.OLD, Arrival.FAILED)),
    _machine("a retry lowers the highest seq", "accept", _accept_lowers),
    _machine("an old epoch's answers outlive a reset", "_forget", _NOTHING),
    _machine("a reset stays in its epoch", "reset", _attribute("epoch", lambda m: m.epoch)),
    _machine("a rewind goes on counting ticks", "rewound", _attribute("tick", lambda m: m.tick)),
    _machine("a commit counts no tick", "committed", _attribute("tick", lambda m: m.tick)),
    _machine("a plan draws the next tick's noise", "replied", _plan_counts),
    _machine("a fenced stream goes on", "check_attachment", _NOTHING),
    _machine("an attach does not fence", "attached", _attribute("attachment", lambda m: m.attachment)),
    _machine("what runs is superseded", "superseded", _supersedes_the_running),
    _machine("a committed tick is dropped", "dropped", _drops_the_committed),
    _machine("a refused start leaves a trace", "started", _judges_first),
    _machine("any number of ticks may wait", "judge", _waits_without_bound),
    _machine(
        "an answer is kept no longer, and nobody is told", "forgot", _attribute("forgotten", lambda m: m.forgotten)
    ),
    _machine("a child skips what its parent has not done", "forked", _child_of_all),
    _machine(
        "a draining server begins new ticks",
        "VERDICTS",
        _entry((Standing.DRAINING, Arrival.NEXT), Verdict.NEW),
        machines,
    ),
    _machine("a lost session is reset", "TABLE", _entry((Phase.LOST, Event.RESET), Phase.IDLE), machines),
    _outbox("an answer goes without a word", "take", _goes_without_a_word),
    _outbox("the newest goes first", "_shrink", _newest_goes),
    _outbox("frames of a replaced chunk end its request again", "put", _frames_of_the_replaced),
    _outbox("two answers change places", "take", _swaps_two),
    _outbox("bytes that were read still count", "take", _takes_uncounted),
    _outbox("nothing is ever dropped", "_shrink", _NOTHING, bounded=True),
    _outbox("drops are not counted", "_count", _NOTHING),
    _codec("NaN is a number", tensors, "check_finite", _NOTHING),
    _codec("sizes overflow", limits.Limits, "check_shape", _wraps, "named bad inputs"),
    _codec("arrays are not counted", limits.Limits, "check_count", _NOTHING, "named bad inputs"),
    _codec("no value is out of range", check, "_check_range", _NOTHING),
    _codec("any shape fits", check, "_fits", instead(lambda *args: True)),
    _codec("seq 0 is taken", requests, "_check_counts", _NOTHING),
    _codec("what does not parse is nobody's fault", codec, "parse", _untyped, "named bad inputs"),
    _codec("a picture cut short is whole", images, "_PNG_END", instead(b""), "named bad inputs"),
    _codec("an array arrives transposed", codec, "encode_tensor", _transposed, "a round trip"),
    _codec("a chunk begins a step late", replies, "_decode_chunk", _next_step, "a round trip"),
    _codec("every error is the same", codec, "encode_error", _any_reason, "a round trip"),
    _codec("pictures are of any mode", images, "_decoded", _any_picture, "named bad inputs"),
)
