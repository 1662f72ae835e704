"""Row B2: messages that parse and make no sense, in any order, to every call and stream of a live server.

Each is answered once, by a reply or a typed refusal, and a canary session stays bit-exact.
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import Any

import grpc
import grpc.aio
import numpy as np
from google.protobuf.message import Message

from ...client import AsyncClient, channel
from ...errors import OmniLoopError, Reason
from ...wire import codec
from ...wire import loop_pb2 as pb
from ..board import Broken, expect
from ..fuzz.mutator import Mutator
from .bed import ANSWER_S, nothing_leaks
from .served import Served, check_typed, served, together, with_canary
from .toys import DIM, HORIZON, NAME, WIDTH

MESSAGES, SCALED = 20_000, 1500
WORKERS = 4
OWN = 3  # sessions a worker keeps open
ON_STREAM = 12  # messages of one stream
_SERVICE = pb.DESCRIPTOR.services_by_name["Loop"]
_REPLY_KINDS = ("tick", "skipped", "error", "reset", "rewind")  # each ends one request
# Finite numbers as great as float32 has are observations too; what the toy model makes of them is refused.
_OF_MODELS = (Reason.BAD_OUTPUT,)


def measure(seed: int, full: bool) -> float:
    """Messages that were answered."""
    with nothing_leaks():
        return asyncio.run(_measure(seed, MESSAGES if full else SCALED))


async def _measure(seed: int, count: int) -> float:
    workers: list[_Worker] = []
    async with served() as made:
        workers += [_Worker(made, seed + 7919 * number) for number in range(WORKERS)]
        await with_canary(made, seed, together(*(worker.run(count // WORKERS) for worker in workers)))
    return sum(worker.answered for worker in workers)


class _Worker:
    """One client that means no good; all it does follows from its seed and the answers it gets."""

    def __init__(self, made: Served, seed: int) -> None:
        self.answered = 0
        self._made = made
        self._draw = random.Random(seed)
        self._mutator = Mutator(self._draw)
        self._refs: list[pb.SessionRef] = []
        self._seq = 0

    async def run(self, count: int) -> None:
        async with self._made.client() as client:
            while self.answered < count:
                if self._draw.random() < 0.2:
                    await self._stream(client)
                else:
                    await self._call(client)
            for ref in self._refs:
                await self._end(client, ref)

    async def _call(self, client: AsyncClient) -> None:
        method = self._draw.choice([m for m in _SERVICE.methods if m.name != "Stream"])
        request = self._request(method.input_type.name)
        raw = self._spoilt(request)
        call = client.channel.unary_unary(channel.method(method.name))
        doing = f"{method.name} with {raw.hex()[:400]}"
        try:
            reply = await call(raw, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            check_typed(_typed(error, doing), doing, _OF_MODELS)
        else:
            read = getattr(pb, method.output_type.name).FromString(reply)
            if isinstance(read, pb.OpenSessionReply):
                await self._opened(client, read)
        self.answered += 1

    async def _stream(self, client: AsyncClient) -> None:
        """Messages in any order on one stream; then no more. Each but the attach is answered once."""
        messages = [self._spoilt(self._client_message(first=number == 0)) for number in range(ON_STREAM)]
        call: Any = client.channel.stream_stream(channel.method("Stream"))(timeout=ANSWER_S)
        doing = f"a stream of {[raw.hex()[:60] for raw in messages]}"
        try:
            # A write to a call that the server has ended hides how it ended, so the attach goes alone.
            await call.write(messages[0])
            first = await call.read()
            kinds = [_kind(first)]
            writing = asyncio.create_task(_write(call, messages[1:]))
            while (raw := await call.read()) is not grpc.aio.EOF:
                kinds.append(_kind(raw))
            await writing
        except grpc.aio.AioRpcError as error:  # the first message was none to attach with
            check_typed(_typed(error, doing), doing, _OF_MODELS)
        else:
            asked = [pb.ClientMessage.FromString(raw).WhichOneof("kind") for raw in messages[1:]]
            ends = sum(kind in _REPLY_KINDS for kind in kinds)
            expect(kinds[:1] == ["attached"], f"{doing} began with {kinds[:1]}")
            attached = pb.ServerMessage.FromString(first).attached
            wanted = sum(kind != "cancel" for kind in asked) + attached.replayed + len(attached.pending)
            expect(ends == wanted, f"{doing}: {wanted} requests had {ends} answers")
        self.answered += ON_STREAM

    def _spoilt(self, message: Message) -> bytes:
        for _ in range(self._draw.choice((0, 0, 1, 1, 2, 3))):
            self._mutator.spoil_message(message)
        return message.SerializeToString()

    def _ref(self) -> pb.SessionRef:
        """One of its own sessions; seldom one that is not there."""
        if self._refs and self._draw.random() < 0.95:
            return self._draw.choice(self._refs)
        return pb.SessionRef(session=f"{self._draw.getrandbits(128):032x}", resume_token="no")

    def _next(self) -> int:
        self._seq = max(1, self._seq + self._draw.choice((1, 1, 1, 1, 2, 0, -1)))
        return self._seq

    def _client_message(self, first: bool) -> pb.ClientMessage:
        kinds = ("observation", "observation", "predict", "recondition", "reset", "rewind", "cancel", "plan", "attach")
        kind = "attach" if first and self._draw.random() < 0.95 else self._draw.choice(kinds)
        if kind == "attach":
            last = self._draw.choice((None, 0, self._seq))
            return pb.ClientMessage(attach=pb.Attach(session=self._ref(), last_received_seq=last))
        if kind == "cancel":
            return pb.ClientMessage(cancel=pb.Cancel(seq=self._next()))
        if kind == "observation":
            return pb.ClientMessage(observation=self._observation())
        request = self._request(f"{kind.capitalize()}Request")
        return pb.ClientMessage(**{kind: request})

    def _observation(self) -> pb.Observation:
        return pb.Observation(
            seq=self._next(),
            step=self._seq,
            arrays={"x": self._tensor(WIDTH)},
            frames=self._draw.choice((0, 0, 1)),
            supersede=self._draw.random() < 0.2,
        )

    def _tensor(self, *shape: int) -> pb.Tensor:
        values = [self._draw.uniform(-1, 1) for _ in range(int(np.prod(shape)))]
        return codec.encode_tensor(np.array(values, np.float32).reshape(shape))

    def _request(self, name: str) -> Any:
        draw = self._draw
        if name == "OpenSessionRequest":
            return pb.OpenSessionRequest(pipeline=NAME, seed=draw.getrandbits(64), observation_keys=["x"])
        if name == "ListSessionsRequest":
            return pb.ListSessionsRequest(sessions=[self._ref(), self._ref()])
        if name in ("GetServerInfoRequest", "RestoreRequest"):
            return pb.GetServerInfoRequest() if name[0] == "G" else pb.RestoreRequest(name="kept")
        ref = self._ref()
        requests: dict[str, Any] = {
            "InferRequest": lambda: pb.InferRequest(session=ref, observation=self._observation()),
            "PredictRequest": lambda: pb.PredictRequest(session=ref, seq=self._next(), actions=self._tensor(2, DIM)),
            "ReconditionRequest": lambda: pb.ReconditionRequest(
                session=ref, seq=self._next(), first_step=self._seq, arrays={"x": self._tensor(2, WIDTH)}
            ),
            "PlanRequest": lambda: pb.PlanRequest(session=ref, seq=self._next(), horizon=HORIZON),
            "ResetRequest": lambda: pb.ResetRequest(session=ref, seed=draw.getrandbits(64)),
            "RewindRequest": lambda: pb.RewindRequest(session=ref, step=max(0, self._seq - draw.randrange(3))),
            "ForkRequest": lambda: pb.ForkRequest(session=ref),
            "SnapshotRequest": lambda: pb.SnapshotRequest(session=ref, name="kept"),
            "CloseRequest": lambda: pb.CloseRequest(session=ref),
        }
        return requests[name]()

    async def _opened(self, client: AsyncClient, reply: pb.OpenSessionReply) -> None:
        self._refs.append(pb.SessionRef(session=reply.session, resume_token=reply.resume_token))
        if len(self._refs) > OWN:
            await self._end(client, self._refs.pop(0))

    async def _end(self, client: AsyncClient, ref: pb.SessionRef) -> None:
        try:
            await client.call("Close", pb.CloseRequest(session=ref), pb.CloseReply)
        except OmniLoopError as error:  # it closed this one before, by a message of its own
            expect(error.reason == Reason.UNKNOWN_SESSION, f"Close: {error.text}")


async def _write(call: Any, messages: list[bytes]) -> None:
    for raw in messages:
        await call.write(raw)
    await call.done_writing()


def _kind(raw: Any) -> str:
    return str(pb.ServerMessage.FromString(raw).WhichOneof("kind")) if isinstance(raw, bytes) else "the end"


def _typed(error: grpc.aio.AioRpcError, doing: str) -> OmniLoopError:
    """The typed error of a failed call. Raises :class:`~..board.Broken` when the server gave none."""
    for key, value in error.trailing_metadata() or ():
        if key == codec.ERROR_KEY and isinstance(value, bytes):
            return codec.decode_error(pb.Error.FromString(value))
    raise Broken(f"{re.sub(r'[0-9a-f]{32,}', '...', doing)}: {error.code()}: {error.details()}")
