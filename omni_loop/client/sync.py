"""The blocking client."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from numpy.typing import ArrayLike

from ..errors import OmniLoopError
from ..types import SessionSpec, TickResult
from ..wire import loop_pb2 as pb
from . import arguments, book, channel, watch
from .credentials import Tls, open_channel
from .watch import OnPart

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Message)


class Client:
    """A connection to a server. Several sessions may share it, also from several threads.

    Every call may raise the typed errors of :mod:`omni_loop.errors`, as the server raised them;
    :class:`~omni_loop.errors.ServerUnavailable` when nobody answers.
    """

    def __init__(
        self, address: str, timeout_s: float = channel.TIMEOUT_S, token: str | None = None, tls: Tls | None = None
    ) -> None:
        self.address = arguments.address("address", address)
        self._timeout_s = arguments.seconds("timeout_s", timeout_s)
        self._channel = open_channel(self.address, token, tls)
        self._calls: dict[str, Any] = {}

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; sessions stay on the server until closed or expired."""
        self._channel.close()

    def info(self) -> book.ServerInfo:
        """What the server serves, and its limits."""
        return book.read_info(self.call("GetServerInfo", pb.GetServerInfoRequest(), pb.GetServerInfoReply))

    def open(
        self,
        pipeline: str,
        *,
        prompt: str = "",
        seed: int | None = None,
        keys: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        spec_digest: str = "",
        image_encoding: str = "raw",
    ) -> Session:
        """A new session. ``keys``: the observation keys that will be sent (none: exactly the required ones);
        ``seed``: None lets the server draw one; sessions opened with one seed and sent the same answer the same,
        each in its first epoch. ``image_encoding`` raw, png (lossless) or jpeg (lossy). An argument that cannot be
        right raises :class:`~omni_loop.errors.InvalidInput` before anything is sent, here and in every call."""
        request = book.open_request(pipeline, prompt, seed, keys, options or {}, spec_digest, image_encoding)
        return Session(self, book.Book(self.call("OpenSession", request, pb.OpenSessionReply), image_encoding))

    def restore(self, name: str, *, image_encoding: str = "raw") -> Session:
        """A session that continues the snapshot ``name`` bit for bit, at its ``start_step``. Raises
        :class:`~omni_loop.errors.UnknownName` when there is none, :class:`~omni_loop.errors.SnapshotError` when it is
        corrupt or of other weights."""
        request = book.restore_request(name, image_encoding)
        return Session(self, book.Book(self.call("Restore", request, pb.OpenSessionReply), image_encoding))

    def sessions(self, *mine: Session) -> book.SessionList:
        """How many sessions are open, and details of those of ``mine`` that are."""
        request = book.list_request(session._book for session in mine)
        return book.read_list(self.call("ListSessions", request, pb.ListSessionsReply))

    def call(self, name: str, request: Message, reply: type[R]) -> R:
        """One unary call, with the server's typed errors."""
        call = self._calls.get(name)
        if call is None:
            call = self._calls[name] = self._channel.unary_unary(
                channel.method(name),
                request_serializer=type(request).SerializeToString,
                response_deserializer=reply.FromString,
            )
        try:
            answer: R = call(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise channel.typed(error, self.address) from None
        return answer

    def watch(self, watched: watch.Watch) -> TickResult:
        """One request on a stream of its own, with the server's typed errors."""
        call = self._channel.stream_stream(
            channel.method("Stream"),
            request_serializer=pb.ClientMessage.SerializeToString,
            response_deserializer=pb.ServerMessage.FromString,
        )(iter(watched.messages), timeout=self._timeout_s)
        try:
            for message in call:
                if (answer := watched.hear(message)) is not None:
                    return answer
        except grpc.RpcError as error:
            raise channel.typed(error, self.address) from None
        finally:
            call.cancel()
        raise watched.ended(self.address)


class Session:
    """One session, for one thread at a time. As a context manager it closes itself."""

    def __init__(self, client: Client, book_: book.Book) -> None:
        self._client = client
        self._book = book_
        self._closed = False

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        try:
            self.close()
        except OmniLoopError as error:
            if kind is None:
                raise
            # The error under way is the one to see; the server frees the session when it has been silent.
            log.warning("closing session %s: %s", self.id, error.text)

    @property
    def id(self) -> str:
        return self._book.ref.session

    @property
    def spec(self) -> SessionSpec:
        return self._book.spec

    @property
    def keys(self) -> tuple[str, ...]:
        """Observation keys to send, chosen when the session was opened."""
        return self._book.keys

    @property
    def epoch(self) -> int:
        return self._book.epoch

    @property
    def seed(self) -> int:
        return self._book.seed

    @property
    def start_step(self) -> int:
        """The control step it stood at when it was opened, forked, restored, reset or rewound."""
        return self._book.start_step

    def infer(
        self,
        arrays: Mapping[str, ArrayLike],
        step: int,
        *,
        executed: ArrayLike | None = None,
        frames: int = 0,
        deadline_ms: float = 0.0,
        captured_ns: int = 0,
        supersede: bool = False,
        executed_through: int | None = None,
        on_part: OnPart | None = None,
    ) -> TickResult:
        """A real observation in, an action chunk out. ``arrays`` are the session's keys, of the spec's dtype:
        nothing is cast. ``executed float32[k, action_dim]`` since the observation before; None: the first
        (step - previous step) rows of the last chunk. ``frames``: predicted frames wanted besides; ``on_part`` hears of
        them while they are made, see :meth:`predict`. ``supersede``: the session's observations that wait and have not
        begun are replaced by this one. ``executed_through``: the last control step whose action will have been executed
        when the answer is there: rows up to it repeat the chunk before, those after it join it without a jump
        (real-time chunking; how: the chunk's ``frozen`` and ``joined``). None: the chunk is made afresh."""
        observation = self._book.infer(
            arrays, step, executed, frames, deadline_ms, captured_ns, supersede, executed_through
        )
        if on_part is not None:
            return self._client.watch(watch.Watch(self._book, observation, on_part))
        request = pb.InferRequest(session=self._book.ref, observation=observation)
        return self._book.read(self._client.call("Infer", request, pb.TickReply))

    def predict(
        self,
        actions: ArrayLike | None = None,
        *,
        steps: int = 0,
        deadline_ms: float = 0.0,
        on_part: OnPart | None = None,
    ) -> TickResult:
        """Frames that follow from ``actions float32[n, action_dim]``, or the next ``steps`` imagined ones.

        ``on_part`` hears of frames while the rest is made, in this thread: a ``preview`` of the first one, and finished
        ones that are not committed yet. The result is the same with it; when the call fails, parts are void.
        """
        request = self._book.predict(actions, steps, deadline_ms)
        if on_part is not None:
            return self._client.watch(watch.Watch(self._book, request, on_part))
        return self._book.read(self._client.call("Predict", request, pb.TickReply))

    def recondition(
        self,
        arrays: Mapping[str, ArrayLike],
        *,
        executed: ArrayLike | None = None,
        first_step: int = 0,
        deadline_ms: float = 0.0,
    ) -> TickResult:
        """Real steps replace imagined ones from ``first_step`` on. ``arrays`` have a leading axis of n steps;
        ``executed`` are n rows, or n - 1 when the first step has no predecessor."""
        request = self._book.recondition(arrays, executed, first_step, deadline_ms)
        return self._book.read(self._client.call("Recondition", request, pb.TickReply))

    def plan(
        self,
        *,
        horizon: int | None = None,
        candidates: int | None = None,
        iterations: int | None = None,
        method: str = "cem",
        budget_ms: float = 0.0,
        goal: ArrayLike | None = None,
        init: ArrayLike | None = None,
        deadline_ms: float = 0.0,
    ) -> TickResult:
        """The best actions found by imagining ``candidates`` futures of ``horizon`` steps in each of ``iterations``
        rounds; the session stays as it is. None: the server chooses (8 steps, 64 futures, 3 rounds).

        ``method`` cem or mppi. ``goal uint8[h, w, 3]``: the frame to reach; None: the most progress. ``init
        float32[horizon, action_dim]``: where the search begins. ``budget_ms`` ends the search with the best found so
        far; 0: never. The result's ``chunk`` has the actions, ``plan`` how they were found."""
        request = self._book.plan(horizon, candidates, iterations, method, budget_ms, goal, init, deadline_ms)
        return self._book.read(self._client.call("Plan", request, pb.TickReply))

    def fork(self, *, seed: int | None = None) -> Session:
        """A child that stands where this session stands; from here on each goes its own way. Its next seq and step are
        this one's. ``seed``: None keeps the parent's, and the same calls are answered the same."""
        reply = self._client.call("Fork", self._book.fork(seed), pb.OpenSessionReply)
        return Session(self._client, self._book.forked(reply))

    def rewind(self, step: int) -> int:
        """Go back to the last commit at which the session stood at ``step``; the new epoch. What came later is
        forgotten. Raises :class:`~omni_loop.errors.StateError` naming the steps that can be reached."""
        return self._book.read_rewind(self._client.call("Rewind", self._book.rewind(step), pb.RewindReply))

    def snapshot(self, name: str) -> int:
        """Keep the session's state on the server under ``name`` (letters, digits, dots, dashes and underscores), for
        :meth:`Client.restore`; the bytes written."""
        return self._client.call("Snapshot", self._book.snapshot(name), pb.SnapshotReply).bytes

    def reset(self, *, seed: int | None = None, prompt: str | None = None) -> int:
        """Begin a new episode; the new epoch. None keeps the seed or the prompt.

        Noise is a function of (seed, epoch, tick, stage) and the epoch is a new one, so a reset to a seed does not
        repeat what a session opened with that seed did: open a new session for that.
        """
        return self._book.read_reset(self._client.call("Reset", self._book.reset(seed, prompt), pb.ResetReply))

    def close(self) -> None:
        """Free everything of the session. Closing twice does nothing."""
        if not self._closed:
            self._client.call("Close", pb.CloseRequest(session=self._book.ref), pb.CloseReply)
            self._closed = True
