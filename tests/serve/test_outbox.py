"""What waits for a client that does not read: bounded, nothing terminal lost, the newest wins."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_loop.errors import Reason
from omni_loop.serve.outbox import ENTRY_BYTES, Kind, Outbox
from omni_loop.wire import loop_pb2 as pb

SIZE = 1000


def chunk(seq: int, size: int = SIZE) -> pb.ServerMessage:
    tensor = pb.Tensor(data=b"c" * size)
    return pb.ServerMessage(tick=pb.TickReply(seq=seq, chunk=pb.ActionChunk(actions=tensor)))


def frames(seq: int, part: int = 0, size: int = SIZE) -> pb.ServerMessage:
    return pb.ServerMessage(frames=pb.FramePrediction(seq=seq, part=part, frames=pb.Tensor(data=b"f" * size)))


def read(outbox: Outbox) -> list[str]:
    """All that waits, in a word each."""
    shown = []
    while (data := outbox.take()) is not None:
        message = pb.ServerMessage.FromString(data)
        kind = message.WhichOneof("kind")
        if kind == "skipped":
            shown.append(f"skipped {message.skipped.seq} {message.skipped.reason} {message.skipped.epoch}")
        elif kind == "frames":
            lost = message.frames.error.reason
            shown.append(f"{lost or 'frames'} {message.frames.seq}.{message.frames.part}")
        else:
            shown.append(f"{kind} {message.tick.seq}")
    assert outbox.nbytes == 0
    return shown


def room(messages: int) -> int:
    return messages * (SIZE + ENTRY_BYTES + 64)


def test_all_is_kept_in_order_while_there_is_room() -> None:
    outbox = Outbox(room(4))
    outbox.put(Kind.PART, frames(1, part=1), 1)
    outbox.put(Kind.CHUNK, chunk(1), 1, more=True)
    outbox.put(Kind.FRAMES, frames(1), 1)
    outbox.put(Kind.ANSWER, chunk(2), 2)
    assert not outbox.full
    assert read(outbox) == ["frames 1.1", "tick 1", "frames 1.0", "tick 2"]
    assert outbox.dropped == 0


def test_the_newest_chunk_wins() -> None:
    outbox = Outbox(room(2))
    for seq in range(1, 6):
        outbox.put(Kind.CHUNK, chunk(seq), seq, epoch=7)
    assert read(outbox) == [f"skipped {seq} superseded 7" for seq in (1, 2, 3, 4)] + ["tick 5"]
    assert outbox.dropped == 4


def test_what_comes_besides_goes_first() -> None:
    outbox = Outbox(room(4))
    outbox.put(Kind.CHUNK, chunk(1), 1, more=True)
    outbox.put(Kind.PART, frames(1, part=1, size=3 * SIZE), 1)
    outbox.put(Kind.FRAMES, frames(1, size=3 * SIZE), 1)
    outbox.put(Kind.CHUNK, chunk(2), 2)
    outbox.put(Kind.CHUNK, chunk(3), 3)
    assert read(outbox) == ["tick 1", f"{Reason.SUPERSEDED} 1.0", "tick 2", "tick 3"]


def test_a_chunk_that_is_replaced_takes_its_frames_along() -> None:
    outbox = Outbox(room(2))
    outbox.put(Kind.CHUNK, chunk(1), 1, more=True)
    outbox.put(Kind.FRAMES, frames(1), 1)
    outbox.put(Kind.CHUNK, chunk(2), 2, more=True)
    outbox.put(Kind.CHUNK, chunk(3), 3)
    outbox.put(Kind.PART, frames(2, part=1), 2)
    outbox.put(Kind.FRAMES, frames(2), 2)  # its chunk was replaced before they came
    assert read(outbox) == ["skipped 1 superseded 0", "skipped 2 superseded 0", "tick 3"]


def test_answers_that_nothing_replaces_fill_it() -> None:
    outbox = Outbox(room(2))
    for seq in range(1, 4):
        outbox.put(Kind.ANSWER, chunk(seq), seq)
    assert outbox.full
    outbox.take()
    assert not outbox.full
    assert read(outbox) == ["tick 2", "tick 3"]


def test_one_message_above_the_bound_passes() -> None:
    outbox = Outbox(10)
    outbox.put(Kind.CHUNK, chunk(1), 1)
    assert outbox.full
    assert read(outbox) == ["tick 1"]


def test_skips_fill_it_too() -> None:
    outbox = Outbox(room(2))
    seq = 0
    while not outbox.full:
        seq += 1
        outbox.put(Kind.CHUNK, chunk(seq), seq)
        assert seq < 100, "a client that never reads is never told to stop"
    assert outbox.nbytes < room(3)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["chunk", "more", "part", "frames", "answer", "take"]), st.integers(0, 2000))
    ),
    bound=st.integers(0, 6000),
)
def test_each_request_ends_once_and_memory_is_bounded(steps: list[tuple[str, int]], bound: int) -> None:
    outbox = Outbox(bound)
    seq, due = 0, []
    ends: Counter[tuple[str, int]] = Counter()
    order = []

    def took(data: bytes | None) -> None:
        if data is None:
            return
        message = pb.ServerMessage.FromString(data)
        kind = message.WhichOneof("kind")
        body = getattr(message, kind)
        if kind in ("tick", "skipped"):
            ends["answer", body.seq] += 1
            order.append(body.seq)
        elif body.part == 0:
            ends["frames", body.seq] += 1
            assert body.seq in order, "frames before their answer"
        if kind == "skipped":
            ends["skipped", body.seq] += 1

    with_frames = set()
    for what, size in steps:
        if what in ("chunk", "more"):
            seq += 1
            outbox.put(Kind.CHUNK, chunk(seq, size), seq, more=what == "more")
            if what == "more":
                due.append(seq)
                with_frames.add(seq)
        elif what == "answer":
            seq += 1
            outbox.put(Kind.ANSWER, chunk(seq, size), seq)
        elif what == "part" and due:
            outbox.put(Kind.PART, frames(due[-1], 1, size), due[-1])
        elif what == "frames" and due:
            outbox.put(Kind.FRAMES, frames(due[0], 0, size), due.pop(0))
        elif what == "take":
            took(outbox.take())
        assert outbox.nbytes >= 0
        assert bool(len(outbox)) == (outbox.nbytes > 0)
    while len(outbox):
        took(outbox.take())
    assert outbox.nbytes == 0
    assert order == sorted(order) == list(range(1, seq + 1))
    for n in with_frames - set(due):
        replaced = ends["skipped", n]
        assert ends["frames", n] + replaced == 1 or (replaced and ends["frames", n] == 0)


@pytest.mark.parametrize("kind", list(Kind))
def test_drops_are_counted(kind: Kind) -> None:
    outbox = Outbox(room(1))
    make = frames if kind in (Kind.PART, Kind.FRAMES) else chunk
    outbox.put(kind, make(1), 1)
    outbox.put(Kind.CHUNK, chunk(2), 2)
    assert outbox.dropped == (kind is not Kind.ANSWER)
