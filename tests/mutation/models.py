"""Checks of session machine, outbox and codec against models that know nothing of how they are written."""

from __future__ import annotations

import random
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np

from omni_loop.errors import InvalidInput, OmniLoopError, Reason, StateError
from omni_loop.serve.outbox import Kind, Outbox
from omni_loop.session.machine import Phase, Position, SessionMachine, Verdict
from omni_loop.testing import bad_inputs
from omni_loop.testing.board import Broken, expect
from omni_loop.testing.fuzz.campaign import Campaign
from omni_loop.testing.history import digest_of
from omni_loop.testing.toy_core import SPEC
from omni_loop.types import ActionChunk, FramePrediction, TickResult, Timings
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

WALKS, STEPS = 40, 120
MOST = 2  # ticks that may wait besides the running one
KEEPS = 1  # answers


@dataclass
class Model:
    """A session, said in another way: every seq has a fate."""

    fates: dict[int, str] = field(default_factory=dict)  # pending, kept, forgotten, failed, superseded, old
    order: list[int] = field(default_factory=list)  # pending ones
    highest: int = 0
    running: int = 0
    trailing: bool = False
    epoch: int = 0
    tick: int = 0
    step: int = 0
    attachment: int = 0
    draining: bool = False
    over: str = ""  # "lost" or "closed"

    def verdict(self, seq: int) -> Verdict | Reason:
        if self.over:
            return Reason.SESSION_LOST if self.over == "lost" else Reason.CLOSED
        fate = self.fates.get(seq)
        if seq in self.order:  # also while what was asked besides still runs
            return Verdict.JOIN
        if fate == "kept":
            return Verdict.REPEAT
        again = fate == "failed" and not any(
            s > seq and f not in ("failed", "superseded") for s, f in self.fates.items()
        )
        if seq <= self.highest and not again:
            return Reason.STALE_SEQ
        if self.draining:
            return Reason.DRAINING
        if len(self.order) > MOST:
            return Reason.BUSY
        return Verdict.NEW if again or seq == self.highest + 1 else Verdict.GAPPED

    def end(self, seq: int, fate: str) -> None:
        self.order.remove(seq)
        self.fates[seq] = fate

    def new_epoch(self) -> None:
        self.epoch, self.tick = self.epoch + 1, 0
        self.fates = dict.fromkeys(self.fates, "old")


def machine() -> None:
    for seed in range(WALKS):
        _walk(random.Random(seed))
    _fork()


def _walk(draw: random.Random) -> None:
    made, model = SessionMachine(MOST), Model()
    made.opened()
    for _ in range(STEPS):
        _act(draw, made, model)
        _compare(made, model)


def _act(draw: random.Random, made: SessionMachine, model: Model) -> None:
    idle = not model.running and not model.over
    match draw.choice("aaaaaaassssccffxuprkkggdl"):
        case "a":
            _arrive(made, model, model.highest + draw.choice((1, 1, 1, 2, 0, -1, -2, -3)))
        case "s" if not idle or not model.order or draw.random() < 0.2:
            wrong = model.order[-1] + 1 if model.order else 1  # nor may a right one start now, when another runs
            _legal(made, lambda: made.started(wrong if idle else model.running or 1), False)
        case "s":
            made.started(model.order[0])
            model.running = model.order[0]
        case "c" if model.running and not model.trailing:
            _answer(draw, made, model)
        case "f" if model.trailing:
            made.finished()
            model.order.remove(model.running)
            model.running, model.trailing = 0, False
        case "f" | "c" if model.running and not model.trailing:
            made.undone()
            model.end(model.running, "failed")
            model.running = 0
        case "x" if model.order:
            _drop(made, model, draw.choice(model.order))
        case "u":
            waits = [seq for seq in model.order if seq != model.running]
            seq = draw.choice(waits) if waits else model.running or 1
            _legal(made, lambda: made.superseded(seq), bool(waits))
            if waits:
                model.end(seq, "superseded")
        case "p" | "r" if not model.over:
            _turn(draw, made, model, idle)
        case "k":
            _attach(draw, made, model)
        case "g":
            oldest = sorted(seq for seq, fate in model.fates.items() if fate == "kept")[:-KEEPS]
            made.forgot(oldest)
            model.fates |= dict.fromkeys(oldest, "forgotten")
        case "d" if draw.random() < 0.2:
            made.draining = model.draining = not model.draining
        case "l" if draw.random() < 0.05 and not model.over:
            _end(draw, made, model)


def _arrive(made: SessionMachine, model: Model, seq: int) -> None:
    if seq < 1:
        _legal(made, lambda: made.judge(seq), False)
        return
    wanted = model.verdict(seq)
    before = deepcopy(made)
    try:
        found: Verdict | Reason = made.judge(seq)
    except OmniLoopError as error:
        found = error.reason
    expect(made == before, f"judging seq {seq} changed the session")
    expect(found == wanted, f"seq {seq} is judged {found}, expected {wanted}")
    if found in (Verdict.NEW, Verdict.GAPPED):
        made.accept(seq)
        model.fates = {s: "old" if f == "failed" and s < seq else f for s, f in model.fates.items()}
        model.fates[seq] = "pending"
        model.order.append(seq)
        model.highest = max(model.highest, seq)
    else:
        _legal(made, lambda: made.accept(seq), False)


def _answer(draw: random.Random, made: SessionMachine, model: Model) -> None:
    seq = model.running
    if draw.random() < 0.2:
        made.replied(seq)
    else:
        past = draw.random() < 0.1
        model.step += 1
        made.committed(seq, Position(model.step, model.step, 0), past)
        model.epoch, model.tick = (model.epoch + 1, 0) if past else (model.epoch, model.tick + 1)
    model.fates = {s: "old" if f == "failed" and s < seq else f for s, f in model.fates.items()}
    model.fates[seq], model.trailing = "kept", True


def _drop(made: SessionMachine, model: Model, seq: int) -> None:
    made.dropped(seq)
    if not (model.trailing and seq == model.running):
        model.end(seq, "failed")
        if seq == model.running:  # its tick is still to be undone
            made.undone()
            model.running = 0


def _turn(draw: random.Random, made: SessionMachine, model: Model, idle: bool) -> None:
    """A reset or rewind, which are for idle sessions with nothing waiting."""
    if idle and model.order:
        return
    if draw.random() < 0.5:
        _legal(made, lambda: made.reset(), idle)
        step = 0
    else:
        step = max(0, model.step - 1)
        _legal(made, lambda: made.rewound(Position(step)), idle)
    if idle:
        model.new_epoch()
        model.step = step


def _attach(draw: random.Random, made: SessionMachine, model: Model) -> None:
    if not model.over:
        model.attachment += 1
        expect(made.attached() == model.attachment, "attachments do not count up")
        made.check_attachment(model.attachment)
    _legal(made, lambda: made.check_attachment(model.attachment - 1), False)


def _end(draw: random.Random, made: SessionMachine, model: Model) -> None:
    if draw.random() < 0.5:
        made.lost()
        model.over = "lost"
        for forbidden in (made.reset, made.attached, made.opened, made.rebuilt):
            _legal(made, forbidden, False)
    else:
        made.closed()
        model.over = "closed"
        _legal(made, made.closed, False)
    model.order, model.running, model.trailing = [], 0, False
    model.fates = {seq: "old" if fate == "pending" else fate for seq, fate in model.fates.items()}


def _legal(made: SessionMachine, act: object, legal: bool) -> None:
    """``act`` applies, or raises and changes nothing."""
    before = deepcopy(made)
    assert callable(act)
    try:
        act()
    except OmniLoopError:
        expect(not legal, "what is legal was refused")
        expect(made == before, "what was refused changed the session")
    else:
        expect(legal, "what is illegal was done")


def _compare(made: SessionMachine, model: Model) -> None:
    expect(made.pending == model.order, f"{made.pending} wait, expected {model.order}")
    kept = sorted(seq for seq, fate in model.fates.items() if fate == "kept")
    expect(sorted(made.kept) == kept, f"{made.kept} are kept, expected {kept}")
    forgotten = max((seq for seq, fate in model.fates.items() if fate == "forgotten"), default=0)
    expect(made.forgotten == forgotten, f"{made.forgotten} is forgotten, expected {forgotten}")
    have = (made.epoch, made.tick, made.position.step, made.accepted, made.attachment, made.running)
    want = (model.epoch, model.tick, model.step, model.highest, model.attachment, model.running)
    expect(have == want, f"epoch, tick, step, accepted, attachment, running are {have}, expected {want}")
    ended = {"lost": Phase.LOST, "closed": Phase.CLOSED}
    expect(model.over == "" or made.phase is ended[model.over], f"an ended session is {made.phase}")


def _fork() -> None:
    """A child goes on after the last seq that is over, and nobody owns it yet."""
    parent = SessionMachine(MOST)
    parent.opened()
    for seq in (1, 2, 3):
        parent.accept(seq)
    parent.attached()
    parent.started(1)
    parent.committed(1, Position(4, 4, 4))
    parent.finished()
    child = parent.forked()
    expect((child.accepted, child.tick, child.position.step, child.attachment) == (1, 1, 4, 0), f"a child is {child}")
    expect(not child.kept and not child.pending, "a child has its parent's answers")


def outbox() -> None:
    for seed in range(WALKS):
        _talk(random.Random(seed))


def _talk(draw: random.Random) -> None:
    """Answers of many kinds at one that reads when it likes: one end for each, in their order, within the bound."""
    bound = draw.choice((2_000, 6_000))
    box, said, put = Outbox(bound), list[pb.ServerMessage](), list[int]()
    owed: dict[int, int] = {}  # seqs whose frames come after so many more answers
    for seq in range(1, 80):
        kind = draw.choice((Kind.CHUNK, Kind.CHUNK, Kind.CHUNK, Kind.ANSWER))
        frames = kind is Kind.CHUNK and draw.random() < 0.4
        box.put(kind, _tick(seq), seq, 1, more=frames)
        put.append(seq)
        owed = {other: left - 1 for other, left in owed.items()}
        if frames:
            owed[seq] = draw.choice((0, 0, 2, 9))
        for other in [s for s, left in owed.items() if left <= 0]:
            del owed[other]
            for part in range(draw.choice((0, 2))):
                box.put(Kind.PART, _frames(other, part + 1), other, 1)
            box.put(Kind.FRAMES, _frames(other, 0), other, 1)
        if draw.random() < 0.3 or box.full:
            while draw.random() < 0.9 and (raw := box.take()) is not None:
                said.append(pb.ServerMessage.FromString(raw))
    replaced = sum(m.WhichOneof("kind") == "skipped" for m in said)
    while (raw := box.take()) is not None:
        message = pb.ServerMessage.FromString(raw)
        replaced += message.WhichOneof("kind") == "skipped"
        said.append(message)
    expect(box.nbytes == 0, f"an empty outbox counts {box.nbytes} bytes")
    expect(box.dropped >= replaced, f"{replaced} answers were replaced and {box.dropped} drops counted")
    _check_said(said, put)


def _check_said(said: list[pb.ServerMessage], put: list[int]) -> None:
    ends = [m.tick.seq or m.skipped.seq for m in said if m.WhichOneof("kind") in ("tick", "skipped")]
    expect(ends == put, f"answers of {Counter(put) - Counter(ends)} are missing, doubled or out of order")
    skipped = {m.skipped.seq for m in said if m.WhichOneof("kind") == "skipped"}
    framed = {m.frames.seq for m in said if m.WhichOneof("kind") == "frames"}
    whole = {m.frames.seq for m in said if m.WhichOneof("kind") == "frames" and not m.frames.part}
    answered = {m.tick.seq for m in said if m.WhichOneof("kind") == "tick"}
    expect(not skipped & whole, f"seqs {skipped & whole} were answered as superseded, and framed")
    expect(framed <= answered | skipped, "frames of nobody")
    expect(put[-1] in answered, "the newest answer was replaced")


def bounded() -> None:
    """At one that never reads, chunks stay within the bound and the newest is there."""
    box = Outbox(4_000)
    for seq in range(1, 2000):
        box.put(Kind.CHUNK, _tick(seq), seq, 1)
        skips = max(0, len(box) - 1)
        expect(box.nbytes <= 4_000 + 300 * skips + 1500, f"{box.nbytes} bytes wait")
    expect(box.dropped > 1900, f"{box.dropped} drops are counted")
    ticks = 0
    while (raw := box.take()) is not None:
        ticks += pb.ServerMessage.FromString(raw).WhichOneof("kind") == "tick"
    expect(ticks < 20, f"{ticks} whole answers waited for one that does not read")


def _tick(seq: int) -> pb.ServerMessage:
    chunk = ActionChunk(seq, seq, np.zeros((32, 2), np.float32), 1)
    return pb.ServerMessage(tick=codec.encode_result(TickResult(seq, 1, chunk)))


def _frames(seq: int, part: int) -> pb.ServerMessage:
    frames = FramePrediction(seq, seq, np.zeros((1, 8, 8, 3), np.uint8), 1, part=part)
    return pb.ServerMessage(frames=codec.encode_frames(frames))


def fuzzed() -> None:
    Campaign(12).run(6000)


def named() -> None:
    """Every named bad input is refused, with its own reason."""
    limits = codec.Limits(max_message_bytes=8 << 20)
    for case in bad_inputs.cases():
        request = bad_inputs.good_request()
        raw = case.spoil(request) or request.SerializeToString()
        try:
            message = codec.parse(pb.InferRequest, raw, limits)
            codec.decode_observation(message.observation, SPEC, bad_inputs.KEYS, bad_inputs.LIMITS)
        except InvalidInput as error:
            expect(error.reason is case.reason, f"{case.name}: {error.reason} ({error.text})")
        except Exception as error:
            raise Broken(f"{case.name}: {type(error).__name__}: {error}") from error
        else:
            expect(False, f"{case.name} was taken")


def round_trip() -> None:
    """What is sent is what arrives, to the last bit: observations, answers and errors."""
    arrays = {**bad_inputs.good_arrays(), "agent_pos": np.array([[1, 2], [3, 4]], np.float32)}
    for array in arrays.values():
        turned = np.asfortranarray(array)  # in memory another way round
        got = codec.decode_tensor("x", codec.encode_tensor(turned), bad_inputs.LIMITS)
        expect(got.dtype == array.dtype and bool((got == array).all()), "an array arrives as another")
    request = bad_inputs.good_request(9).observation
    request.executed_through, request.supersede, request.captured_ns = 5, True, 7
    seen = codec.decode_observation(request, SPEC, bad_inputs.KEYS, bad_inputs.LIMITS)
    told = (seen.seq, seen.step, seen.executed_through, seen.supersede, seen.captured_ns)
    expect(told == (9, 3, 5, True, 7), f"an observation arrives as {told}")
    chunk = ActionChunk(4, 6, np.arange(8, dtype=np.float32).reshape(4, 2), 2, "r", Timings(3.0), 1, "overlap")
    frames = FramePrediction(4, 7, np.full((2, 8, 8, 3), 9, np.uint8), 2, np.ones((2, 3, 2), np.float32))
    result = TickResult(4, 2, chunk, frames, timings=Timings(3.0))
    back = codec.decode_result(codec.encode_result(result), SPEC, codec.Limits())
    expect(digest_of(back) == digest_of(result), "an answer arrives as another")
    expect(back.chunk is not None and back.chunk.joined == "overlap" and back.chunk.first_step == 6, "a chunk's labels")
    error = StateError("no", reason=Reason.FENCED, retry_after_ms=5.0)
    again = codec.decode_error(codec.encode_error(error, 4, 2))
    known = (again.reason, again.code, again.text, again.retry_after_ms, again.epoch)
    expect(known == (Reason.FENCED, error.code, "no", 5.0, 2), f"an error arrives as {known}")
