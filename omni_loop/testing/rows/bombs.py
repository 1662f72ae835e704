"""Row S5: a few bytes that claim or unpack to many are refused, or read as what they are, before memory is taken."""

from __future__ import annotations

import asyncio
import io
import json
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from zarr.core.sync import cleanup_resources

from ...errors import OmniLoopError, SnapshotError
from ...record import sealed
from ...record.snapshot import VERSION, ZarrSnapshots
from ...training.checkpoint import load_weights
from ...wire import codec
from ...wire import loop_pb2 as pb
from ..board import Broken, expect
from ..memory import MIB, peak
from ..toy_core import SPEC
from .bed import bed, row

MOST = 50 * MIB  # besides the bomb itself
_LIMITS = codec.Limits()
_UNPACKED = 300 * MIB  # what a compressed bomb becomes
Case = tuple[str, Callable[[], Any]]


def measure(seed: int, full: bool) -> float:
    """Bombs that did not go off."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            snapshots = asyncio.run(_snapshots(seed, Path(folder)))
            cases = [*_shapes(), *_pictures(), *_texts(), *_packed(), *_weights(Path(folder)), *snapshots]
            for name, read in cases:
                _held(name, read)
        finally:
            cleanup_resources()  # zarr's own loop and threads, which it would keep for ever
    return len(cases)


def _held(name: str, read: Callable[[], Any]) -> None:
    """Refused by a typed error or read, within its memory."""
    with peak() as taken:
        try:
            read()
        except OmniLoopError as error:
            expect(len(error.text) < 2000, f"{name}: the refusal itself has {len(error.text)} letters")
        except Exception as error:
            raise Broken(f"{name}: {type(error).__name__}: {str(error)[:200]}") from error
    expect(taken.bytes < MOST, f"{name} took {taken.bytes >> 20} MiB")


def _tensor(shape: tuple[int, ...], data: bytes, dtype: int = pb.DTYPE_UINT8, encoding: int = 0) -> Callable[[], Any]:
    tensor = pb.Tensor(dtype=dtype, shape=shape, data=data, encoding=encoding)  # type: ignore[arg-type]
    return lambda: codec.decode_tensor("x", tensor, _LIMITS)


def _shapes() -> Iterator[Case]:
    for shape in (
        (1 << 62, 4),
        (1 << 40,),
        (1 << 20, 1 << 20, 0),
        (65_536, 65_536),
        (1,) * 2000,
        (1 << 32, 1 << 32, 2),
    ):
        yield f"a shape of {len(shape)} dimensions, {shape[0]} first", _tensor(shape, b"\0" * 8, pb.DTYPE_FLOAT64)
    many = pb.Observation(seq=1, arrays={f"k{n}": pb.Tensor() for n in range(100_000)})
    yield "more arrays than a message may hold", lambda: codec.decode_observation(many, SPEC, ("x",), _LIMITS)


def _png(size: tuple[int, int] = (8, 8)) -> bytes:
    from PIL import Image

    target = io.BytesIO()
    Image.new("RGB", size).save(target, "PNG")
    return target.getvalue()


def _chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def _with(*chunks: bytes) -> bytes:
    """A good PNG, and ``chunks`` after its header."""
    good = _png()
    return good[:33] + b"".join(chunks) + good[33:]


def _pictures() -> Iterator[Case]:
    png, small = pb.ENCODING_PNG, (8, 8, 3)
    unpacks = zlib.compress(bytes(_UNPACKED), 9)
    texts = [_chunk(b"zTXt", b"k%d\0\0" % n + zlib.compress(bytes(MIB - 100), 9)) for n in range(60)]
    pixels = _png()[:33] + _chunk(b"IDAT", unpacks) + _png()[-12:]
    bombs = {
        "texts of a megabyte each": _with(*texts),
        "a text of 300 MB": _with(_chunk(b"iTXt", b"k\0\1\0\0\0" + unpacks)),
        "a profile of 300 MB": _with(_chunk(b"iCCP", b"k\0\0" + unpacks)),
        "pixels of 300 MB for 8 x 8": pixels,
        "a million chunks": _with(*[_chunk(b"tEXt", b"")] * 1_000_000),
        "another size than it claims": _png((6000, 6000)),
    }
    for name, data in bombs.items():
        yield f"PNG: {name}", _tensor(small, data, encoding=png)
    yield "PNG: as many pixels as it says, and too many", _tensor((6000, 6000, 3), _png((6000, 6000)), encoding=png)
    yield "JPEG: thousands of scans", _tensor((2000, 2000, 3), _scans(5000), encoding=pb.ENCODING_JPEG)


def _scans(count: int) -> bytes:
    from PIL import Image

    target = io.BytesIO()
    Image.new("RGB", (2000, 2000)).save(target, "JPEG", progressive=True)
    data = target.getvalue()
    return data[:-2] + data[data.rfind(b"\xff\xda") : -2] * count + data[-2:]


def _texts() -> Iterator[Case]:
    opening = pb.OpenSessionRequest
    long = {"prompt": "x" * (16 * MIB)}, {"pipeline": "x" * (16 * MIB)}, {"observation_keys": ["k"] * 1_000_000}
    for fields in long:
        request: Any = opening(**fields)
        yield f"a long {next(iter(fields))}", partial(codec.check_open, request, _LIMITS)
    yield "a snapshot's name of 16 MB", lambda: codec.check_snapshot_name("x" * (16 * MIB))


def _packed() -> Iterator[Case]:
    """What the readers of other clients' formats are told to allocate."""
    from ...serve.compat import msgpack, pickles

    packed = {
        "bytes of 4 GB": b"\xc6\xff\xff\xff\xff",
        "an array of 4 G things": b"\xdd\xff\xff\xff\xff" + b"\xc0" * 100,
        "a map of 4 G things": b"\xdf\xff\xff\xff\xff",
        "arrays in arrays": b"\x91" * 100_000,
        "a million small arrays": b"\xdd\x00\x0f\x42\x40" + b"\x90" * 1_000_000,
    }
    for name, data in packed.items():
        yield f"msgpack: {name}", partial(msgpack.unpack, data, _LIMITS)
    laughs = b"\x80\x04]" + b"(" + b"2" * 100_000 + b"e."
    pickled = {
        "bytes of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b".",
        "a text of 4 GB": b"\x80\x04X\xff\xff\xff\xff.",
        "a number of 2 GB": b"\x80\x02\x8b\xff\xff\xff\x7f.",
        "lists of themselves": b"\x80\x04]" + b"\x94h\x00h\x00\x86" * 30 + b".",
        "copies without end": laughs,
        "marks without end": b"\x80\x04" + b"(" * 1_000_000,
        "memo numbers far away": b"\x80\x02Nr\xff\xff\xff\x7f.",
    }
    for name, data in pickled.items():
        yield f"pickle: {name}", partial(pickles.read, data, pickles.OBSERVATION, _LIMITS)


def _weights(folder: Path) -> Iterator[Case]:
    """Checkpoints whose header claims what the file does not hold."""
    import torch

    module = torch.nn.Linear(2, 2)
    huge = {"weight": {"dtype": "F32", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 1 << 42]}}
    wide = {f"w{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(20_000)}
    heads = {
        "a header of 2**62 bytes": struct.pack("<Q", 1 << 62),
        "a header of 99 MB that is not there": struct.pack("<Q", 99_000_000) + b"{",
        "a tensor of 4 TB": _header(huge),
        "20,000 tensors of nothing": _header(wide),
        "a header of nested lists": struct.pack("<Q", 50_000) + b"[" * 50_000,
    }
    for number, (name, data) in enumerate(heads.items()):
        place = folder / f"weights-{number}"
        place.mkdir()
        (place / "model.safetensors").write_bytes(data)
        yield f"safetensors: {name}", partial(load_weights, place, module)


def _header(about: dict[str, Any]) -> bytes:
    text = json.dumps(about).encode()
    return struct.pack("<Q", len(text)) + text


async def _snapshots(seed: int, folder: Path) -> list[Case]:
    """Snapshots sealed anew by somebody who may write the store, whose arrays claim or unpack to more than there is."""
    place = folder / "snapshots"
    place.mkdir()
    store = ZarrSnapshots(place, 1 << 26)
    async with bed(store=store) as made:
        robot = await made.open(seed)
        await robot.infer(row(np.random.default_rng(seed)))
        spoils: dict[str, Callable[[dict[str, Any]], Any]] = {
            "a shape of 4 TB": lambda about: about.update(shape=[1 << 20, 1 << 20]),
            "a chunk of 4 TB": lambda about: about["chunk_grid"]["configuration"].update(
                chunk_shape=[1 << 20, 1 << 20]
            ),
            "chunks that unpack to 300 MB": lambda about: about["codecs"].append(
                {"name": "gzip", "configuration": {"level": 9}}
            ),
        }
        cases: list[Case] = []
        for number, (name, spoil) in enumerate(spoils.items()):
            saved = f"bomb-{number}"
            await made.core.snapshot(robot.info.id, robot.info.token, saved)
            _spoil(place / saved, spoil)
            cases.append((f"snapshot: {name}", partial(_load, store, saved)))
    return cases


def _spoil(place: Path, spoil: Callable[[dict[str, Any]], Any]) -> None:
    (node,) = place.rglob("chunk/zarr.json")
    about = json.loads(node.read_text())
    spoil(about)
    node.write_text(json.dumps(about))
    if len(about["codecs"]) > 1:
        packer = zlib.compressobj(9, zlib.DEFLATED, 31)  # gzip
        (node.parent / "c" / "0" / "0").write_bytes(packer.compress(bytes(_UNPACKED)) + packer.flush())
    (place / sealed.MANIFEST).unlink()
    sealed.seal(place, VERSION)


def _load(store: ZarrSnapshots, name: str) -> None:
    try:
        store.load(name)
    except SnapshotError:
        return
    raise Broken(f"the snapshot {name} was read")
