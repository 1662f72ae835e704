"""Row S7: no answer tells a traceback, a path, a token or another's data; no metric and no log line a secret."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...client import AsyncClient, AsyncSession
from ...endpoints import AccessConfig, QuotaConfig
from ...errors import OmniLoopError
from ...record.snapshot import ZarrSnapshots
from ...telemetry import metrics
from ...wire import loop_pb2 as pb
from ...wire.faults import encode_error
from ..board import Broken, expect
from .served import Served, served
from .toys import NAME, WIDTH

ALICE, BOB, WRONG = "canary-alice-" + "a" * 32, "canary-bob-" + "b" * 32, "canary-wrong-" + "w" * 32
PLACE, DATA = "canary-folder", "canary-data-of-another-session"
_OF_CODE = ("Traceback", 'File "', ".py", "site-packages", "omni_loop_", "0x7f", "Error(", "object at")


def measure(seed: int, full: bool) -> float:
    """Answers and lines read."""
    with tempfile.TemporaryDirectory(prefix=PLACE) as folder, _logs() as lines:
        return asyncio.run(_measure(seed, Path(folder), lines))


async def _measure(seed: int, folder: Path, lines: list[str]) -> float:
    tokens = folder / "tokens"
    tokens.touch(mode=0o600)
    tokens.write_text(f"alice {ALICE}\nbob {BOB}\n")
    access = AccessConfig(tokens=str(tokens), quotas={"alice": QuotaConfig(sessions=2)})
    async with served(access=access, store=ZarrSnapshots(folder / "kept", 1 << 30)) as made:
        secrets, others, answers = await _refusals(made, seed, folder)
    for what, text in answers:
        _holds_none(text, [*secrets, *others, *_OF_CODE], f"the answer to {what}")
    shown = metrics.exposition().decode()
    _holds_none(shown, [*secrets, *others, DATA], "the metrics")
    expect(any(DATA in line for line in lines), "the log does not say why a stage failed: it is not being read")
    for line in lines:
        _holds_none(line, secrets, "the log")
    return len(answers) + len(lines) + shown.count("\n")


async def _refusals(made: Served, seed: int, folder: Path) -> tuple[list[str], list[str], list[tuple[str, str]]]:
    """Secrets, what is another's, and what alice is answered."""
    async with made.client(token=ALICE) as alice, made.client(token=BOB) as bob, made.client(token=WRONG) as wrong:
        mine, theirs = await alice.open(NAME, seed=seed), await bob.open(NAME, seed=seed)
        await theirs.snapshot("kept-by-another")
        await mine.snapshot("own")
        secrets = [ALICE, BOB, WRONG, mine._book.ref.resume_token, theirs._book.ref.resume_token]
        calls = _calls(alice, wrong, mine, theirs)
        answers = [await _error(what, call) for what, call in calls.items()]
        for step, stage in enumerate(("frames", "decode", "context", "act")):
            answers.append(await _stage_fails(made, mine, folder, stage, step))
        for path in (folder / "kept").glob("*own/**/*"):
            if path.is_file():
                path.write_bytes(b"{")
        answers.append(await _error("a corrupt snapshot", lambda: alice.restore("own")))
        await mine.close()
        await theirs.close()
    return secrets, [theirs.id, DATA, PLACE], answers


def _calls(
    alice: AsyncClient, wrong: AsyncClient, mine: AsyncSession, theirs: AsyncSession
) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Calls that are refused, for as many reasons as there are."""
    x, ref = np.zeros(WIDTH, np.float32), mine._book.ref
    stolen = pb.SessionRef(session=theirs.id, resume_token=theirs._book.ref.resume_token)

    def send(name: str, request: Any, reply: Any = pb.OpenSessionReply) -> Callable[[], Awaitable[Any]]:
        return lambda: alice.call(name, request, reply)

    bad = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[WIDTH], data=b"short")
    return {
        "a wrong token": wrong.info,
        "an unknown pipeline": send("OpenSession", pb.OpenSessionRequest(pipeline="nothing")),
        "an unknown key": send("OpenSession", pb.OpenSessionRequest(pipeline=NAME, observation_keys=["../x"])),
        "a snapshot of nobody": lambda: alice.restore("nothing"),
        "a snapshot of another": lambda: alice.restore("kept-by-another"),
        "a name that is none": send("Restore", pb.RestoreRequest(name="../tokens")),
        "another's session": send("Fork", pb.ForkRequest(session=stolen)),
        "another's session to close": send("Close", pb.CloseRequest(session=stolen), pb.CloseReply),
        "a short tensor": send(
            "Infer",
            pb.InferRequest(session=ref, observation=pb.Observation(seq=9, step=0, arrays={"x": bad})),
            pb.TickReply,
        ),
        "a step from nowhere": lambda: mine.rewind(99),
        "no observation": send("Infer", pb.InferRequest(session=ref), pb.TickReply),
        "no value": lambda: mine.infer({"x": x * np.nan}, 0),
        "one session too many": lambda: _opens(alice),
    }


async def _opens(alice: AsyncClient) -> None:
    """The second of these; one is open already."""
    async with await alice.open(NAME):
        await alice.open(NAME)


async def _error(what: str, call: Callable[[], Awaitable[Any]]) -> tuple[str, str]:
    """All that a client learns of a refusal."""
    try:
        await call()
    except OmniLoopError as error:
        return what, f"{error.text} {encode_error(error)}"
    raise Broken(f"{what} is not refused")


async def _stage_fails(made: Served, mine: AsyncSession, folder: Path, stage: str, step: int) -> tuple[str, str]:
    def spoil(item: Any, outputs: Any) -> Any:
        raise RuntimeError(f"{DATA} in {folder}/weights.bin")

    made.bed.faults.plant(stage, mine.id, spoil)
    try:
        result = await mine.infer({"x": np.zeros(WIDTH, np.float32)}, min(step, 2), frames=1)
    except OmniLoopError as error:
        return f"a failure of {stage}", f"{error.text} {encode_error(error)}"
    finally:
        made.bed.faults.lift(stage, mine.id)
    if result.frames_error is None:
        raise Broken(f"a failure of {stage} goes unnoticed")
    return f"a failure of {stage}", f"{result.frames_error.text} {encode_error(result.frames_error)}"


def _holds_none(text: str, secrets: list[str], where: str) -> None:
    for secret in secrets:
        expect(secret not in text, f"{where} holds {secret!r}: {text[:300]}")


@contextmanager
def _logs() -> Iterator[list[str]]:
    """Every line that any logger of the server or of gRPC writes, with its traceback."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(logging.Formatter().format(record))  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in ("omni_loop", "grpc", "asyncio")]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # these failures are made on purpose
    try:
        yield lines
    finally:
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
