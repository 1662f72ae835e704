"""Named bad calls other than observations and plans: opening, names, resets, rewinds, lists and first messages.

Each is bytes for one method, with the reason and the words that help.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from ..errors import Reason
from ..wire import loop_pb2 as pb
from .bad_inputs import BAD_SNAPSHOT_NAMES
from .toy_core import SPEC


@dataclass(frozen=True, slots=True)
class BadCall:
    """``method`` is asked with ``raw``; ``says`` are words of the refusal. ``own``: of a session that is open."""

    name: str
    method: str
    request: Message | bytes
    says: str
    reason: Reason = Reason.BAD_REQUEST
    own: bool = False

    def raw(self, ref: pb.SessionRef) -> bytes:
        """Bytes of the request, about the session ``ref`` where it is about one's own."""
        if isinstance(self.request, bytes):
            return self.request
        if self.own:
            request: Any = type(self.request).FromString(self.request.SerializeToString(deterministic=True))
            request.session.CopyFrom(ref)
            return bytes(request.SerializeToString(deterministic=True))
        return self.request.SerializeToString(deterministic=True)


def bad_calls() -> list[BadCall]:
    return [*_opens(), *_strangers(), *_names(), *_turns(), *_bytes()]


def _opens() -> list[BadCall]:
    def opening(name: str, says: str, reason: Reason = Reason.TOO_LARGE, **fields: Any) -> BadCall:
        return BadCall(
            f"open: {name}", "OpenSession", pb.OpenSessionRequest(**{"pipeline": "toy", **fields}), says, reason
        )

    long, digest = "x" * 257, SPEC.digest
    return [
        opening("no pipeline", "no pipeline ''", Reason.UNKNOWN_NAME, pipeline=""),
        opening("an unknown pipeline", "Did you mean 'toy'?", Reason.UNKNOWN_NAME, pipeline="toi"),
        opening("a pipeline that is a path", "no pipeline", Reason.UNKNOWN_NAME, pipeline="../../etc/passwd"),
        opening("a pipeline of 257 letters", "the pipeline 'x", pipeline=long),
        opening("a prompt of 1 MB", "1000000 bytes", prompt="x" * 1_000_000),
        opening("a prompt over its bound in another script", "bytes", prompt="推" * 2000),
        opening("a prompt with a NUL", "NUL", Reason.BAD_REQUEST, prompt="push\0pull"),
        opening("another spec", "another spec here", Reason.BAD_SPEC, spec_digest=digest[::-1]),
        opening("a digest of 257 letters", "the spec digest", spec_digest=long),
        opening("a key of 257 letters", "the observation key", observation_keys=["image", long]),
        opening("100,000 keys", "100000 arrays", observation_keys=["k"] * 100_000),
        opening("an option's name of 257 letters", "the option", options={long: "1"}),
        opening("an option's value of 257 letters", "the value", options={"a": long}),
        opening("10,000 options", "10000 arrays", options={f"o{n}": "1" for n in range(10_000)}),
    ]


def _strangers() -> list[BadCall]:
    """No session of that id, and none whose token one has: the two look alike."""
    nobody = pb.SessionRef(session="f" * 32, resume_token="f" * 32)
    unknown = Reason.UNKNOWN_SESSION
    refs = {
        "an unknown session": nobody,
        "no session": pb.SessionRef(),
        "a session that is a path": pb.SessionRef(session="../../etc/passwd", resume_token="x"),
        "a session of 50,000 letters": pb.SessionRef(session="x" * 50_000, resume_token="x" * 50_000),
        "a token in another script": pb.SessionRef(session="f" * 32, resume_token="推 T"),
    }
    calls: dict[str, Any] = {
        "Infer": pb.InferRequest,
        "Predict": pb.PredictRequest,
        "Reset": pb.ResetRequest,
        "Rewind": pb.RewindRequest,
        "Fork": pb.ForkRequest,
        "Close": pb.CloseRequest,
    }
    return [
        BadCall(f"{method}: {name}", method, kind(session=ref), "session", unknown)
        for method, kind in calls.items()
        for name, ref in refs.items()
    ]


def _names() -> list[BadCall]:
    bad = [name for name in BAD_SNAPSHOT_NAMES if len(name) < 1000]
    return [
        *(
            BadCall(f"snapshot: name {n}", "Snapshot", pb.SnapshotRequest(name=name), "snapshot's name", own=True)
            for n, name in enumerate(bad)
        ),
        *(
            BadCall(f"restore: name {n}", "Restore", pb.RestoreRequest(name=name), "snapshot's name")
            for n, name in enumerate(bad)
        ),
        BadCall(
            "restore: nothing of that name",
            "Restore",
            pb.RestoreRequest(name="nothing"),
            "nothing",
            Reason.UNKNOWN_NAME,
        ),
    ]


def _turns() -> list[BadCall]:
    refs = [pb.SessionRef(session=str(n)) for n in range(100)]
    return [
        BadCall(
            "reset: a prompt of 1 MB", "Reset", pb.ResetRequest(prompt="x" * 1_000_000), "bytes", Reason.TOO_LARGE, True
        ),
        BadCall("reset: a NUL", "Reset", pb.ResetRequest(prompt="\0"), "NUL", own=True),
        BadCall("rewind: a negative step", "Rewind", pb.RewindRequest(step=-1), "negative", own=True),
        BadCall("rewind: the greatest step", "Rewind", pb.RewindRequest(step=(1 << 63) - 1), "at most", own=True),
        BadCall("rewind: where it never stood", "Rewind", pb.RewindRequest(step=77), "cannot be reached", own=True),
        BadCall(
            "list: more than there can be",
            "ListSessions",
            pb.ListSessionsRequest(sessions=refs),
            "at most",
            Reason.TOO_LARGE,
        ),
    ]


def _bytes() -> list[BadCall]:
    open_ = pb.OpenSessionRequest(pipeline="toy", prompt="push").SerializeToString(deterministic=True)
    raws = {
        "no message": b"\xff" * 64,
        "a prompt that is not UTF-8": open_.replace(b"push", b"\xff\xfe\xfd\xfc"),
        "overlong UTF-8": open_.replace(b"push", b"\xc0\xaf\xc0\xaf"),
        "a surrogate in UTF-8": open_.replace(b"push", b"x\xed\xa0\x80"),
        "a message cut short": open_[:-1],
        "a pickle": b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07builtin\x94.",
        "groups within groups": b"\x0b" * 200,
        "a length of 4 GB": b"\x0a\xff\xff\xff\xff\x0f",
    }
    return [BadCall(f"open: {name}", "OpenSession", raw, "no omni_loop.v1") for name, raw in raws.items()]
