"""Row S3: data never becomes code. The sources hold no way to it; while hostile bytes are read the interpreter neither
compiles, imports, opens nor starts anything; and no message has a field that names a file, a module or a model."""

from __future__ import annotations

import pickletools
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ...errors import OmniLoopError
from ...wire import loop_pb2 as pb
from .. import audit
from ..board import Broken, expect
from ..code_scan import findings, sources
from ..fuzz import targets
from ..fuzz.mutator import Mutator

INPUTS, SCALED = 200_000, 6_000
# Every text a stranger can send, and what becomes of it. None is a path, an address or a name of code.
_TEXTS = {
    *("OpenSessionRequest.pipeline", "OpenSessionRequest.prompt", "OpenSessionRequest.observation_keys"),
    *("OpenSessionRequest.spec_digest", "OpenSessionRequest.OptionsEntry.key", "OpenSessionRequest.OptionsEntry.value"),
    *("SessionRef.session", "SessionRef.resume_token", "SnapshotRequest.name", "RestoreRequest.name"),
    *("PlanRequest.method", "ResetRequest.prompt", "Observation.ArraysEntry.key", "ReconditionRequest.ArraysEntry.key"),
}
_PAYLOADS = (
    "os\nsystem",
    "posix\nsystem",
    "builtins\neval",
    "builtins\nexec",
    "subprocess\nPopen",
    "torch.storage\n_load_from_bytes",
)


def measure(seed: int, full: bool) -> float:
    """Inputs read under watch."""
    _no_way_in_the_sources()
    _no_text_that_names_code()
    return _nothing_runs(random.Random(seed), INPUTS if full else SCALED)


def _no_way_in_the_sources() -> None:
    files = list(sources())
    expect(len(files) > 100, f"{len(files)} sources were found")
    found = [line for path in files for line in findings(path.read_text(encoding="utf-8"), path.name)]
    expect(not found, "; ".join(found[:10]))


def _no_text_that_names_code() -> None:
    service = pb.DESCRIPTOR.services_by_name["Loop"]
    texts: set[str] = set()
    for method in service.methods:
        _texts_of(method.input_type, texts, set())
    expect(texts == _TEXTS, f"texts a stranger may send: {sorted(texts ^ _TEXTS)} are new or gone")


def _texts_of(message: Any, texts: set[str], known: set[str]) -> None:
    if message.full_name in known:
        return
    known.add(message.full_name)
    for field in message.fields:
        if field.message_type is not None:
            _texts_of(field.message_type, texts, known)
        elif field.type == field.TYPE_STRING:
            texts.add(f"{message.full_name.removeprefix(pb.DESCRIPTOR.package + '.')}.{field.name}")


def _nothing_runs(draw: random.Random, count: int) -> int:
    readers = _readers()
    seeds = {name: made for name, (_, made) in readers.items()}
    for read, made in readers.values():  # what is imported once is imported now
        for raw in made:
            _read(read, raw)
    mutator, names = Mutator(draw), sorted(readers)
    with audit.watched() as seen:
        for number in range(count):
            name = names[number % len(names)]
            pool = seeds[name]
            raw = mutator.spoil_bytes(draw.choice(pool), draw.choice(pool))
            _read(readers[name][0], raw)
            if seen:
                raise Broken(f"{name} of {raw[:300]!r}: {', '.join(seen[:5])}")
    return count


def _read(read: Callable[[bytes], Any], raw: bytes) -> None:
    try:
        read(raw)
    except OmniLoopError:
        pass  # refused, as it should be
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error} (of {raw[:300]!r})") from error


def _readers() -> dict[str, tuple[Callable[[bytes], Any], list[bytes]]]:
    """Every reader of strangers' bytes, with what it is tried with."""
    from ...serve.compat import msgpack, pickles

    limits, hostile = targets.LIMITS, [_hostile(name) for name in _PAYLOADS]
    found: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {}
    for target, seeds in ((t, targets.seeds()[t.name]) for t in targets.TARGETS):
        found[target.name] = (target.run, [*seeds, *hostile])
    for kind in (pickles.SETUP, pickles.OBSERVATION):
        found[f"pickle of {kind}"] = (
            partial(pickles.read, kind=kind, limits=limits),
            [*hostile, _lerobot(kind)],
        )
    packed = msgpack.pack({"image": np.zeros((8, 8, 3), np.uint8), "prompt": "push", "state": [1.0, 2.0]})
    found["msgpack"] = (lambda raw: msgpack.unpack(raw, limits), [packed, *hostile])
    return found


def _hostile(name: str) -> bytes:
    """A pickle that calls ``name`` with a text when it is loaded; it is only ever read here."""
    raw = b"\x80\x02c" + name.encode() + b"\n(S'touch omni_loop_was_here'\ntR."
    expect(any(op.name == "REDUCE" for op, _, _ in pickletools.genops(raw)), f"{name} makes no pickle that calls")
    return raw


def _lerobot(kind: str) -> bytes:
    """An instance of a class of LeRobot's as its clients pickle it: empty."""
    return b"\x80\x02clerobot.async_inference.helpers\n" + kind.encode() + b"\n)\x81}b."
