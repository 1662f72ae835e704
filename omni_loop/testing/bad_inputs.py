"""Named bad inputs: what a codec must refuse, with the reason and the words that help.

Each case spoils a good ``Infer`` request of a session of :data:`~omni_loop.testing.toy_core.SPEC` that sends
``KEYS``, those of :func:`plan_cases` a good ``Plan``; :data:`BAD_SNAPSHOT_NAMES` are for ``Snapshot`` and
``Restore``. Shipped, so that every server in front of an orchestrator can be held to it.
"""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Reason
from ..types import Array
from ..wire import loop_pb2 as pb
from ..wire.codec import Limits, encode_tensor

KEYS = ("image", "agent_pos", "points", "gripper")
LIMITS = Limits(max_message_bytes=1 << 20, max_tensor_bytes=1 << 16, max_tensors=8, max_rank=4, max_image_pixels=4096)

Spoil = Callable[[Any], "bytes | None"]

BAD_SNAPSHOT_NAMES = (
    *(
        "",
        ".",
        "..",
        ".hidden",
        "-rf",
        "_x",
        " a",
        "a ",
        "a b",
        "a\n",
        "\n",
        "a\0b",
        "a/b",
        "/a",
        "a/",
        "../a",
        "a/../b",
    ),
    *("..\\a", "a\\b", "C:", "C:a", "~", "~root", "$HOME", "%2e%2e", "a%2fb", "a*", "a?", "a:b", "a|b", "a;b", "`a`"),
    *("\u00e9", "\uff0e\uff0e", "a\u2215b", "\u0430", "\u0661", "a\u200b", "x" * 101, "x" * 100_000),
)


@dataclass(frozen=True, slots=True)
class BadInput:
    """``spoil`` changes the request in place, or returns other bytes; ``says`` are words of the refusal."""

    name: str
    spoil: Spoil
    says: tuple[str, ...]
    reason: Reason = Reason.BAD_TENSOR


def good_arrays() -> dict[str, Array]:
    """A good observation of the toy pipeline."""
    return {
        "image": np.arange(192, dtype=np.uint8).reshape(8, 8, 3),
        "agent_pos": np.full((2, 2), 256, np.float32),
        "points": np.zeros((2, 2), np.float32),
        "gripper": np.array([True, False]),
    }


def good_request(seq: int = 1) -> pb.InferRequest:
    arrays = {name: encode_tensor(array) for name, array in good_arrays().items()}
    observation = pb.Observation(seq=seq, step=3, arrays=arrays, executed=encode_tensor(np.ones((3, 2), np.float32)))
    return pb.InferRequest(observation=observation)


def good_plan(seq: int = 1) -> pb.PlanRequest:
    return pb.PlanRequest(
        seq=seq,
        horizon=3,
        candidates=16,
        iterations=2,
        method="mppi",
        budget_ms=20.0,
        goal=encode_tensor(good_arrays()["image"]),
        init=encode_tensor(np.full((3, 2), 5, np.float32)),
    )


def cases() -> list[BadInput]:
    return [*_shapes(), *_values(), *_names(), *_images(), *_numbers(), *_bytes()]


def _tensor(
    name: str,
    dtype: int | None = None,
    shape: tuple[int, ...] | None = None,
    data: bytes | None = None,
    encoding: int | None = None,
) -> Spoil:
    def spoil(request: pb.InferRequest) -> None:
        tensor = request.observation.executed if name == "executed" else request.observation.arrays[name]
        if dtype is not None:
            tensor.dtype = dtype  # type: ignore[assignment]
        if shape is not None:
            tensor.shape[:] = shape
        if data is not None:
            tensor.data = data
        if encoding is not None:
            tensor.encoding = encoding  # type: ignore[assignment]

    return spoil


def _array(name: str, array: Array) -> Spoil:
    def spoil(request: pb.InferRequest) -> None:
        target = request.observation.executed if name == "executed" else request.observation.arrays[name]
        target.CopyFrom(encode_tensor(array))

    return spoil


def _shapes() -> list[BadInput]:
    big, large = (1 << 62) - 1, Reason.TOO_LARGE
    pos = "agent_pos"
    return [
        BadInput("negative dimension", _tensor(pos, shape=(-2, 2)), (pos, "negative dimension -2")),
        BadInput("two negative dimensions", _tensor(pos, shape=(-2, -2)), (pos, "negative")),
        BadInput("most negative dimension", _tensor(pos, shape=(-(1 << 63), 2)), (pos, "negative")),
        BadInput("zero dimension", _tensor(pos, shape=(0, 2), data=b""), (pos, "[0,2]", "[2,2]")),
        BadInput("zero dimension with data", _tensor(pos, shape=(0, 2)), (pos, "needs 0 bytes")),
        BadInput("zero beside a huge dimension", _tensor(pos, shape=(0, big), data=b""), (pos,), large),
        BadInput("product overflows 64 bits", _tensor(pos, shape=(1 << 32, 1 << 32)), (pos, "takes"), large),
        BadInput("product wraps to the right size", _tensor(pos, shape=(1 << 62, 4)), (pos, "takes"), large),
        BadInput("product wraps to zero", _tensor(pos, shape=(1 << 31, 1 << 31, 4)), (pos, "takes"), large),
        BadInput("one element for a big shape", _tensor(pos, shape=(4096, 4), data=b"\0\0\0\0"), ("needs 65536",)),
        BadInput("one byte over the tensor limit", _tensor("image", shape=(65537,)), ("65537", "65536"), large),
        BadInput("no shape", _tensor(pos, shape=()), (pos, "needs 4 bytes")),
        BadInput("scalar", _array(pos, np.array(1, np.float32)), (pos, "shape []", "[2,2]")),
        BadInput("rank too low", _array(pos, np.ones(4, np.float32)), (pos, "[4]", "[2,2]")),
        BadInput("rank too high", _array(pos, np.ones((1, 2, 2), np.float32)), (pos, "[1,2,2]", "[2,2]")),
        BadInput("rank beyond the limit", _tensor(pos, shape=(1, 1, 1, 2, 2)), (pos, "rank 5")),
        BadInput("a thousand dimensions", _tensor(pos, shape=(1,) * 1000), (pos, "rank 1000")),
        BadInput("transposed image", _array("image", np.zeros((3, 8, 8), np.uint8)), ("image", "[3,8,8]", "[8,8,3]")),
        BadInput("image of another size", _array("image", np.zeros((9, 8, 3), np.uint8)), ("[9,8,3]", "[8,8,3]")),
        BadInput("grey image", _array("image", np.zeros((8, 8, 1), np.uint8)), ("image", "[8,8,1]")),
        BadInput("image with alpha", _array("image", np.zeros((8, 8, 4), np.uint8)), ("image", "[8,8,4]")),
        BadInput("too many points", _array("points", np.zeros((5, 2), np.float32)), ("points", "[5,2]", "[n,2]")),
        BadInput("points of another width", _array("points", np.zeros((2, 3), np.float32)), ("points", "[n,2]")),
        BadInput("executed too wide", _array("executed", np.ones((3, 3), np.float32)), ("executed", "[n,2]")),
        BadInput("executed without rows axis", _array("executed", np.ones(2, np.float32)), ("executed", "[n,2]")),
    ]


def _values() -> list[BadInput]:
    pos = "agent_pos"
    nan = np.array([[1, 2], [np.nan, 4]], np.float32)
    return [
        BadInput("NaN", _array(pos, nan), (pos, "not finite", "nan", "[1, 0]")),
        BadInput("plus infinity", _array(pos, np.full((2, 2), np.inf, np.float32)), (pos, "inf")),
        BadInput("minus infinity", _array(pos, np.full((2, 2), -np.inf, np.float32)), (pos, "-inf")),
        BadInput("NaN with a payload", _tensor(pos, data=b"\x01\0\x80\x7f" * 4), (pos, "not finite")),
        BadInput("NaN in executed", _array("executed", np.full((3, 2), np.nan, np.float32)), ("executed", "nan")),
        BadInput("NaN in what may have any length", _array("points", np.full((1, 2), np.nan, np.float32)), ("nan",)),
        BadInput("below the range", _array(pos, np.full((2, 2), -1, np.float32)), (pos, "-1", "least value is 0 px")),
        BadInput("above the range", _array(pos, np.full((2, 2), 513, np.float32)), (pos, "513", "512 px")),
        BadInput("executed out of range", _array("executed", np.full((3, 2), 999, np.float32)), ("executed", "999")),
        BadInput("float image", _array("image", np.ones((8, 8, 3), np.float32)), ("image", "float32", "uint8")),
        BadInput("image of 64-bit integers", _array("image", np.ones((8, 8, 3), np.int64)), ("int64", "uint8")),
        BadInput("doubles for floats", _array(pos, np.ones((2, 2))), (pos, "float64", "float32")),
        BadInput("integers for floats", _array(pos, np.ones((2, 2), np.int32)), (pos, "int32", "float32")),
        BadInput("bytes for booleans", _array("gripper", np.ones(2, np.uint8)), ("gripper", "uint8", "bool")),
        BadInput("executed in doubles", _array("executed", np.ones((3, 2))), ("executed", "float64")),
        BadInput("dtype says more than the data", _tensor(pos, dtype=pb.DTYPE_FLOAT64), (pos, "needs 32", "16")),
        BadInput("dtype says less than the data", _tensor(pos, dtype=pb.DTYPE_UINT8), (pos, "needs 4", "16")),
        BadInput("dtype of the same width", _tensor(pos, dtype=pb.DTYPE_INT32), (pos, "int32", "float32")),
        BadInput("dtype unspecified", _tensor(pos, dtype=0), (pos, "dtype number 0")),
        BadInput("dtype of the future", _tensor(pos, dtype=99), (pos, "dtype number 99", "float32")),
        BadInput("negative dtype", _tensor(pos, dtype=-1), (pos, "dtype number -1")),
        BadInput("a boolean that is 2", _tensor("gripper", data=b"\x01\x02"), ("gripper", "other than 0 and 1")),
        BadInput("data too short by a byte", _tensor(pos, data=b"\0" * 15), (pos, "needs 16", "15")),
        BadInput("data too long by a byte", _tensor(pos, data=b"\0" * 17), (pos, "needs 16", "17")),
        BadInput("no data", _tensor(pos, data=b""), (pos, "needs 16", "0 came")),
        BadInput("empty tensor message", _tensor(pos, dtype=0, shape=(), data=b""), (pos, "dtype number 0")),
    ]


def _names() -> list[BadInput]:
    def rename(old: str, new: str) -> Spoil:
        def spoil(request: pb.InferRequest) -> None:
            request.observation.arrays[new].CopyFrom(request.observation.arrays[old])
            del request.observation.arrays[old]

        return spoil

    def drop(*names: str) -> Spoil:
        def spoil(request: pb.InferRequest) -> None:
            for name in names:
                del request.observation.arrays[name]

        return spoil

    def add(count: int) -> Spoil:
        def spoil(request: pb.InferRequest) -> None:
            for i in range(count):
                request.observation.arrays[f"k{i}"].dtype = pb.DTYPE_UINT8

        return spoil

    return [
        BadInput("a missing key", drop("image"), ("missing", "'image'")),
        BadInput("two missing keys", drop("image", "points"), ("missing", "'image'", "'points'")),
        BadInput("no keys", drop(*KEYS), ("missing", *KEYS)),
        BadInput("an extra key", rename("image", "image2"), ("unknown", "'image2'", "Did you mean 'image'?")),
        BadInput("a key of another case", rename("image", "Image"), ("'Image'", "Did you mean 'image'?")),
        BadInput("a dotted key", rename("agent_pos", "observation.agent_pos"), ("observation.agent_pos", "agent_pos")),
        BadInput("an empty key", rename("image", ""), ("unknown", "''")),
        BadInput("a key that is a path", rename("image", "../../etc/passwd"), ("unknown",)),
        BadInput("a key of 50,000 letters", rename("image", "x" * 50_000), ("unknown",)),
        BadInput("four keys too many", add(4), ("unknown", "'k0'")),
        BadInput("more keys than the limit", add(5), ("9 arrays", "8"), Reason.TOO_LARGE),
        BadInput("100,000 keys", add(100_000), ("100004 arrays",), Reason.TOO_LARGE),
    ]


def _images() -> list[BadInput]:
    from PIL import Image

    def file(form: str, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> bytes:
        target = io.BytesIO()
        Image.new(mode, size).save(target, form)
        return target.getvalue()

    def image(data: bytes, encoding: int = pb.ENCODING_PNG, shape: tuple[int, ...] = (8, 8, 3)) -> Spoil:
        return _tensor("image", data=data, encoding=encoding, shape=shape)

    png, jpeg, bomb = file("PNG"), file("JPEG"), _png_header(60_000, 60_000)
    pixels = _png_chunk(b"IDAT", zlib.compress(b"\0"))
    return [
        BadInput("an encoding of the future", _tensor("image", encoding=7), ("image", "encoding number 7")),
        BadInput("PNG of another size than it claims", image(file("PNG", (9, 8))), ("claims [8,8,3]", "8 x 9")),
        BadInput("JPEG of another size than it claims", image(file("JPEG", (9, 8)), pb.ENCODING_JPEG), ("8 x 9",)),
        BadInput("PNG bomb behind a small claim", image(_png_header(9_000, 9_000) + pixels), ("9000 x 9000",)),
        BadInput(
            "PNG bomb that says so",
            image(bomb, shape=(60_000, 60_000, 3)),
            ("takes",),
            Reason.TOO_LARGE,
        ),
        BadInput("PNG over the pixel limit", image(_png_header(80, 80), shape=(80, 80, 3)), ("80 x 80 pixels", "4096")),
        BadInput("PNG with two headers", image(_png_header(8, 8) + bomb[8:] + pixels), ("image",)),
        BadInput("JPEG called PNG", image(jpeg), ("not a readable PNG",)),
        BadInput("PNG called JPEG", image(png, pb.ENCODING_JPEG), ("not a readable JPEG",)),
        BadInput("GIF called PNG", image(file("GIF")), ("not a readable PNG",)),
        BadInput("a PNG cut short", image(png[:-20]), ("not a readable PNG",)),
        BadInput("a JPEG cut short", image(jpeg[:-20], pb.ENCODING_JPEG), ("not a readable JPEG",)),
        BadInput("a PNG header alone", image(_png_header(8, 8)), ("not a readable PNG",)),
        BadInput("no bytes of PNG", image(b""), ("not a readable PNG",)),
        BadInput("grey PNG", image(file("PNG", mode="L")), ("three channels", "mode L")),
        BadInput("PNG with alpha", image(file("PNG", mode="RGBA")), ("three channels", "mode RGBA")),
        BadInput("PNG with a palette", image(file("PNG", mode="P")), ("three channels", "mode P")),
        BadInput("PNG of 16 bits", image(_png_header(8, 8, depth=16) + pixels), ("three channels of 8 bits",)),
        BadInput("PNG without pixels", image(png, shape=(0, 8, 3)), ("0 x 8 pixels",)),
        BadInput("PNG for floats", _tensor("agent_pos", encoding=pb.ENCODING_PNG), ("agent_pos", "uint8 [h,w,3]")),
        BadInput("PNG of rank 2", image(png, shape=(8, 24)), ("uint8 [h,w,3]", "[8,24]")),
    ]


def _numbers() -> list[BadInput]:
    def put(**values: float) -> Spoil:
        def spoil(request: pb.InferRequest) -> None:
            for name, value in values.items():
                setattr(request.observation, name, value)

        return spoil

    bad = Reason.BAD_REQUEST
    return [
        BadInput("seq 0", put(seq=0), ("seq starts at 1",), bad),
        BadInput("negative step", put(step=-1), ("step -1",), bad),
        BadInput("most negative step", put(step=-(1 << 63)), ("negative",), bad),
        BadInput("seq above its bound", put(seq=(1 << 53) + 1), ("seq is", str(1 << 53)), bad),
        BadInput("greatest seq", put(seq=(1 << 64) - 1), ("seq is", str(1 << 53)), bad),
        BadInput("step above its bound", put(step=(1 << 53) + 1), ("step is", str(1 << 53)), bad),
        BadInput("greatest step", put(step=(1 << 63) - 1), ("step is", str(1 << 53)), bad),
        BadInput("negative deadline", put(deadline_ms=-1.0), ("deadline_ms",), bad),
        BadInput("NaN deadline", put(deadline_ms=float("nan")), ("deadline_ms", "nan"), bad),
        BadInput("infinite deadline", put(deadline_ms=float("inf")), ("deadline_ms", "inf"), bad),
    ]


def plan_cases() -> list[BadInput]:
    def put(**values: Any) -> Spoil:
        def spoil(request: pb.PlanRequest) -> None:
            for name, value in values.items():
                setattr(request, name, value)

        return spoil

    def array(name: str, value: Array) -> Spoil:
        return lambda request: getattr(request, name).CopyFrom(encode_tensor(value))

    def tensor(name: str, **values: Any) -> Spoil:
        def spoil(request: pb.PlanRequest) -> None:
            target = getattr(request, name)
            for field, value in values.items():
                if field == "shape":
                    target.shape[:] = value
                else:
                    setattr(target, field, value)

        return spoil

    def ones(*shape: int, dtype: str = "float32") -> Array:
        return np.ones(shape, dtype)

    def alone(request: pb.PlanRequest) -> None:
        request.ClearField("horizon")
        request.init.CopyFrom(encode_tensor(ones(9, 2)))

    bad, large = Reason.BAD_REQUEST, Reason.TOO_LARGE
    greatest = (1 << 32) - 1
    bomb = _png_header(9_000, 9_000) + _png_chunk(b"IDAT", zlib.compress(b"\0"))
    return [
        BadInput("plan: seq 0", put(seq=0), ("seq starts at 1",), bad),
        BadInput("plan: greatest seq", put(seq=(1 << 64) - 1), ("seq is", str(1 << 53)), bad),
        BadInput("plan: horizon 0", put(horizon=0), ("horizon is 0", "at most 8"), bad),
        BadInput("plan: horizon beyond the spec's", put(horizon=9), ("horizon is 9", "at most 8"), bad),
        BadInput("plan: greatest horizon", put(horizon=greatest), (str(greatest), "at most 8"), bad),
        BadInput("plan: no candidates", put(candidates=0), ("candidates is 0", "at most 4096"), bad),
        BadInput("plan: too many candidates", put(candidates=4097), ("candidates is 4097", "4096"), bad),
        BadInput("plan: greatest candidates", put(candidates=greatest), ("candidates is", "4096"), bad),
        BadInput("plan: no iterations", put(iterations=0), ("iterations is 0", "at most 64"), bad),
        BadInput("plan: too many iterations", put(iterations=65), ("iterations is 65", "at most 64"), bad),
        BadInput("plan: unknown method", put(method="cme"), ("unknown method 'cme'", "Did you mean 'cem'?"), bad),
        BadInput("plan: method of another case", put(method="CEM"), ("unknown method 'CEM'", "cem"), bad),
        BadInput("plan: method of 50,000 letters", put(method="x" * 50_000), ("unknown method",), bad),
        BadInput("plan: negative budget", put(budget_ms=-1.0), ("budget_ms is -1",), bad),
        BadInput("plan: NaN budget", put(budget_ms=float("nan")), ("budget_ms is nan",), bad),
        BadInput("plan: infinite budget", put(budget_ms=float("inf")), ("budget_ms is inf",), bad),
        BadInput("plan: NaN deadline", put(deadline_ms=float("nan")), ("deadline_ms is nan",), bad),
        BadInput("plan: goal of another size", array("goal", ones(9, 8, 3, dtype="uint8")), ("goal", "[9,8,3]")),
        BadInput("plan: goal of floats", array("goal", ones(8, 8, 3)), ("goal", "float32", "uint8")),
        BadInput("plan: two goals", array("goal", ones(2, 8, 8, 3, dtype="uint8")), ("goal", "[2,8,8,3]")),
        BadInput("plan: goal without data", tensor("goal", data=b""), ("goal", "needs 192", "0 came")),
        BadInput("plan: goal that overflows", tensor("goal", shape=(1 << 32, 1 << 32)), ("goal", "takes"), large),
        BadInput("plan: goal bomb", tensor("goal", data=bomb, encoding=pb.ENCODING_PNG), ("9000 x 9000",)),
        BadInput("plan: empty goal", lambda request: request.goal.Clear(), ("goal", "dtype number 0")),
        BadInput("plan: init too short", array("init", ones(2, 2)), ("'init' has 2 rows", "horizon is 3")),
        BadInput("plan: init too long alone", alone, ("horizon is 9", "at most 8"), bad),
        BadInput("plan: init too wide", array("init", ones(3, 3)), ("init", "[3,3]", "[n,2]")),
        BadInput("plan: init without rows axis", array("init", ones(3)), ("init", "[3]", "[n,2]")),
        BadInput("plan: init of negative rows", tensor("init", shape=(-1, 2)), ("'init' has -1 rows",)),
        BadInput("plan: init that overflows", tensor("init", shape=(3, 1 << 62)), ("init", "takes"), large),
        BadInput("plan: NaN in init", array("init", np.full((3, 2), np.nan, np.float32)), ("init", "nan")),
        BadInput("plan: init out of range", array("init", np.full((3, 2), 999, np.float32)), ("init", "999")),
        BadInput("plan: init in doubles", array("init", ones(3, 2, dtype="float64")), ("init", "float64")),
    ]


def _bytes() -> list[BadInput]:
    def raw(data: bytes) -> Spoil:
        return lambda request: data

    def cut(request: pb.InferRequest) -> bytes:
        return request.SerializeToString(deterministic=True)[:-1]

    def no_observation(request: pb.InferRequest) -> None:
        request.ClearField("observation")

    def bad_key(request: pb.InferRequest) -> bytes:
        return request.SerializeToString(deterministic=True).replace(b"gripper", b"gripp\xff\xfe")

    bad = Reason.BAD_REQUEST
    return [
        BadInput("no message", raw(b"\xff" * 64), ("no omni_loop.v1.InferRequest",), bad),
        BadInput("text for a message", raw(b"GET / HTTP/1.1\r\n\r\n"), ("no omni_loop.v1.InferRequest",), bad),
        BadInput("a pickle", raw(b"\x80\x04\x95\x0b\0\0\0\0\0\0\0\x8c\x07builtin\x94."), ("no omni_loop.v1",), bad),
        BadInput("a length beyond the end", raw(b"\x12\xff\xff\xff\xff\x0f"), ("no omni_loop.v1",), bad),
        BadInput("a message cut short", cut, ("no omni_loop.v1",), bad),
        BadInput("groups without end", raw(b"\x0b" * 1000), ("no omni_loop.v1",), bad),
        BadInput("a key that is not UTF-8", bad_key, ("UTF-8",), bad),
        BadInput("no observation", no_observation, ("seq starts at 1",), bad),
    ]


def _png_header(width: int, height: int, depth: int = 8) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + _png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0))


def _png_chunk(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
