"""Row S2: every method needs a token, and somebody else's session cannot be told from one that never was."""

from __future__ import annotations

import asyncio
import hmac
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from ...client import AsyncClient
from ...endpoints import AccessConfig
from ...errors import UnknownSession
from ...wire import loop_pb2 as pb
from ..board import expect
from .served import Served, served
from .toys import NAME

CALL_S = 20.0
TIMES = 2000  # look-ups per kind whose times are compared, in the whole row
SLOWER = 1.5  # how much slower one kind of refusal may be than another, by median
ALICE, BOB = "alice-" + "a" * 32, "bob-" + "b" * 32
Refusal = tuple[Any, str | None, tuple[Any, ...]]


def measure(seed: int, full: bool) -> float:
    """Calls refused."""
    # Sessions and blocks are counted by the bed; threads are not: gRPC's own one outlives calls that were aborted.
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), full))


async def _measure(folder: Path, full: bool) -> float:
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"# who may\nalice {ALICE}\nbob {BOB}\nbob {BOB}-new\n")
    async with served(access=AccessConfig(tokens=str(tokens))) as made:
        refused = await _without_tokens(made)
        _compares_all(made)
        refused += await _stolen(made)
        if full:
            await _as_fast(made)
    return refused


def methods() -> list[tuple[str, Any]]:
    """Every method of every service of the port, with its descriptor."""
    files = (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR)
    services = [service for file in files for service in file.services_by_name.values()]
    return [(f"/{service.full_name}/{method.name}", method) for service in services for method in service.methods]


# Tokens -----------------------------------------------------------------------------------------------------


def bad_headers() -> list[tuple[tuple[str, str], ...]]:
    good = f"Bearer {ALICE}"
    single = ["", "Bearer", "Bearer ", ALICE, f"Basic {ALICE}", good[:-1], f"{good}x", f"{good} x", good.upper()]
    several = [(("authorization", good), ("authorization", good)), (("x-authorization", good),), ()]
    return [(("authorization", value),) for value in single] + several


async def _without_tokens(made: Served) -> int:
    seen: set[Refusal] = set()
    refused = 0
    with _handlers(made) as reached:
        async with grpc.aio.insecure_channel(made.address) as channel:
            for path in [path for path, _ in methods()] + ["/omni_loop.v1.Loop/Nothing", "/nobody.Knows/It"]:
                for headers in bad_headers():
                    seen.add(await _ended(channel, path, b"", headers))
                    refused += 1
            expect(not reached, f"{len(reached)} calls without a token were looked up or read")
            expect(len(seen) == 1, f"refusals of tokens differ: {sorted(map(str, seen))}")
            expect(next(iter(seen))[0] is grpc.StatusCode.UNAUTHENTICATED, f"refused as {seen}")
            for path, _ in methods():
                code, *_ = await _ended(channel, path, b"", (("authorization", f"Bearer {ALICE}"),))
                expect(code is not grpc.StatusCode.UNAUTHENTICATED, f"{path} does not take a token that is right")
            expect(len(reached) == len(methods()), "calls that reach a handler are not counted: this proves nothing")
    return refused


@contextmanager
def _handlers(made: Served) -> Iterator[list[str]]:
    """Grows with every call whose handler was given to gRPC."""
    (interceptor,) = made.server.interceptors
    guarded, reached = interceptor._guarded, []  # type: ignore[attr-defined]

    def counted(*args: Any) -> Any:
        reached.append("call")
        return guarded(*args)

    with mock.patch.object(interceptor, "_guarded", counted):
        yield reached


def _compares_all(made: Served) -> None:
    """Whatever the token, every known one is compared, by the comparison whose time tells nothing."""
    counts = {}
    for header in (f"Bearer {ALICE}", f"Bearer {BOB}-new", "Bearer nobody", "", None):
        with mock.patch("omni_loop.serve.tokens.hmac.compare_digest", wraps=hmac.compare_digest) as compare:
            assert made.server.gate._tokens is not None
            made.server.gate._tokens.whose(header)
            counts[header] = compare.call_count
    expect(set(counts.values()) == {3}, f"comparisons by header: {counts}")


# Sessions of others -----------------------------------------------------------------------------------------


async def _stolen(made: Served) -> int:
    """Every method that takes a session, with a reference that is not the caller's."""
    refused = 0
    async with made.client(token=ALICE) as alice, made.client(token=BOB) as bob:
        mine = await alice.open(NAME, seed=1)
        theirs = await bob.open(NAME, seed=2)
        gone = await alice.open(NAME, seed=3)
        was = gone._book.ref
        await gone.close()
        ref = theirs._book.ref
        wrong = {
            "unknown": pb.SessionRef(session="0" * 16, resume_token=ref.resume_token),
            "empty": pb.SessionRef(),
            "without its token": pb.SessionRef(session=ref.session),
            "with a wrong token": pb.SessionRef(session=ref.session, resume_token=ref.resume_token[:-1]),
            "with another's token": pb.SessionRef(session=ref.session, resume_token=mine._book.ref.resume_token),
            "of another principal, with its token": ref,
            "closed": was,
        }
        for path, method in methods():
            if (ask := _asks(method)) is None:
                continue
            answers = {what: await _call(alice, path, ask(reference)) for what, reference in wrong.items()}
            expect(len(set(answers.values())) == 1, f"{path} tells apart: {answers}")
            known = await _call(alice, path, ask(mine._book.ref)) if method.name != "Close" else None
            expect(known != answers["unknown"], f"{path} answers the session's owner the same: this proves nothing")
            refused += len(answers)
        listed = await _listed(alice, [mine._book.ref, *wrong.values()])
        expect(listed == [mine.id], f"ListSessions shows {listed}, expected only the caller's own")
    return refused


def _asks(method: Any) -> Any:
    """Makes the method's request about a session; None: it is about none, or about many."""
    kind = method.input_type
    if kind.name == "ClientMessage":
        return lambda ref: pb.ClientMessage(attach=pb.Attach(session=ref))
    if "session" not in kind.fields_by_name or kind.fields_by_name["session"].message_type is None:
        return None
    request = getattr(pb, kind.name)
    return lambda ref: request(session=ref)


async def _call(client: AsyncClient, path: str, message: Message) -> Refusal:
    return await _ended(client.channel, path, message.SerializeToString(), ())


async def _listed(client: AsyncClient, refs: list[pb.SessionRef]) -> list[str]:
    request = pb.ListSessionsRequest(sessions=refs)
    reply = await client.call("ListSessions", request, pb.ListSessionsReply)
    return [summary.session for summary in reply.sessions]


async def _ended(channel: Any, path: str, message: bytes, headers: tuple[tuple[str, str], ...]) -> Refusal:
    """How a call ends that sends one message, to any kind of method: code, details and trailers; OK when it is
    answered at all, for some methods go on for ever."""
    call = channel.unary_stream(path)(message, timeout=CALL_S, **({"metadata": headers} if headers else {}))
    try:
        answer = await call.read()
        if answer is not grpc.aio.EOF:
            return grpc.StatusCode.OK, None, ()
        return await call.code(), await call.details(), tuple(await call.trailing_metadata() or ())
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details(), tuple(error.trailing_metadata() or ())
    finally:
        call.cancel()


async def _as_fast(made: Served) -> None:
    """By the clock: no kind of reference takes a time of its own. In turns, so that all meet the same machine."""
    async with made.client(token=BOB) as bob:
        theirs = await bob.open(NAME, seed=4)
        ref, core = theirs._book.ref, made.bed.core
        kinds = {
            "unknown": ("0" * 16, ref.resume_token, "alice"),
            "stolen": (ref.session, "x" * len(ref.resume_token), "alice"),
            "of another": (ref.session, ref.resume_token, "alice"),
        }
        took: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(TIMES):
            for kind, given in kinds.items():
                began = time.perf_counter()
                try:
                    core.session(*given)
                except UnknownSession:
                    took[kind].append(time.perf_counter() - began)
        medians = {kind: statistics.median(times) for kind, times in took.items()}
        expect(max(medians.values()) <= SLOWER * min(medians.values()), f"medians of refusals, in s: {medians}")
        await theirs.close()
