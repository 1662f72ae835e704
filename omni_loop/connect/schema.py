"""What a payload on an edge must hold: which arrays, of which dtypes and ranks, in which version.

Every kind of payload has a schema here. An edge may have one of its own, which narrows that of its kind (exact shapes)
and may add arrays; a kind of one's own is any other name, on an edge that has a schema. Payloads are checked where they
are put, and their kind and version again where they are got, since another process or a snapshot may have put them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import ConfigError, Reason, StageFailed, nearest
from ..messages import PayloadKind
from ..stage import Payload

Dims = tuple[int | str, ...]
ANY = "..."  # in dims: any number of axes, once

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_INTS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
#: Classes of dtypes that an :class:`ArrayType` may name instead of one.
DTYPES: Mapping[str, tuple[str, ...]] = {
    "float": _FLOATS,
    "int": _INTS,
    "number": (*_FLOATS, *_INTS),
    "any": (*_FLOATS, *_INTS, "bool", "complex64", "complex128"),
}


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array: its ``dtype`` (a numpy name or a class of :data:`DTYPES`) and its ``dims``, each a length or a name.
    Equal names are equal lengths within a payload; :data:`ANY` stands for any axes; None: any shape."""

    name: str
    dtype: str = "any"
    dims: tuple[int | str, ...] | None = None
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.dims if self.dims is not None else (ANY,)))}]"


@dataclass(frozen=True, slots=True)
class Schema:
    """Payloads of ``kind`` in ``version``; with ``others`` they may hold arrays that ``arrays`` does not name."""

    kind: str
    arrays: tuple[ArrayType, ...] = ()
    version: int = 1
    others: bool = False

    def problem(self, payload: Payload) -> str:
        """What of ``payload`` is not as this says; empty: nothing."""
        if payload.kind != self.kind:
            return f"a payload is of kind {str(payload.kind)!r}, wanted {str(self.kind)!r}"
        if payload.schema != self.version:
            return f"{str(self.kind)!r} is in version {payload.schema}, wanted version {self.version}"
        lengths: dict[str, int] = {}
        seen = 0
        for wanted in self.arrays:
            value = payload.arrays.get(wanted.name)
            if value is None:
                if not wanted.optional:
                    known = nearest(wanted.name, payload.arrays)
                    return f"array {wanted.name!r} is missing, wanted {wanted}.{known}"
                continue
            seen += 1
            dtype, shape = _dtype(value), tuple(value.shape) if hasattr(value, "shape") else np.shape(value)
            fits = dtype == wanted.dtype or dtype in DTYPES.get(wanted.dtype, ())
            if not fits or (wanted.dims is not None and not _fits(wanted.dims, shape, lengths)):
                held = {n: k for n, k in lengths.items() if wanted.dims is not None and n in wanted.dims}
                given = f" with {', '.join(f'{n} = {k}' for n, k in held.items())}" if fits and held else ""
                return f"array {wanted.name!r} is {dtype}{list(shape)}, wanted {wanted}{given}"
        if seen < len(payload.arrays) and not self.others:
            names = [wanted.name for wanted in self.arrays]
            extra = next(name for name in payload.arrays if name not in names)
            return f"array {extra!r} is none of kind {str(self.kind)!r}.{nearest(extra, names)}"
        return ""


@dataclass(frozen=True, slots=True)
class EdgeSchema:
    """A schema and the full name of the edge that has it."""

    edge: str
    schema: Schema

    def check_put(self, payload: Payload) -> None:
        """Raises StageFailed (BAD_OUTPUT) naming edge, array and what was wanted."""
        if problem := self.schema.problem(payload):
            raise StageFailed(f"edge {self.edge}: {problem}", reason=Reason.BAD_OUTPUT)

    def check_got(self, payload: Payload) -> None:
        """Raises StageFailed (BAD_SPEC) for a payload of another kind or version: its arrays may mean anything."""
        if payload.schema != self.schema.version or payload.kind != self.schema.kind:
            wanted = f"{self.schema.kind!s} version {self.schema.version}"
            text = f"edge {self.edge} carries {payload.kind!s} version {payload.schema}, its reader takes {wanted}"
            raise StageFailed(text, reason=Reason.BAD_SPEC)


@dataclass(frozen=True, slots=True)
class StageEdges:
    """Schemas of the edges at one stage: of each output all that leave by it, of each input the one that fills it."""

    outputs: Mapping[str, tuple[EdgeSchema, ...]] = field(default_factory=dict)
    inputs: Mapping[str, EdgeSchema] = field(default_factory=dict)


_N = ("n", ANY)
_K = PayloadKind
#: What the kinds of :class:`~omni_loop.messages.PayloadKind` hold.
SCHEMAS: Mapping[str, Schema] = {
    schema.kind: schema
    for schema in (
        Schema(_K.OBSERVATION, others=True),  # checked against the session's spec where it enters
        Schema(_K.ACTIONS, (ArrayType("actions", "float32", (ANY, "n", "action_dim")),)),
        Schema(
            _K.LATENTS,
            (ArrayType("latents", "float", _N), ArrayType("actions", "float", ("k", "action_dim"), optional=True)),
        ),
        Schema(
            _K.FRAMES,
            (
                ArrayType("frames", "uint8", ("n", "h", "w", 3)),
                ArrayType("scene", "float32", ("n", "points", 2), optional=True),
            ),
        ),
        Schema(_K.HIDDEN, (ArrayType("hidden", "float", (ANY, "width")),)),
        Schema(_K.TOKENS, (ArrayType("tokens", "int", (ANY, "n")),)),
        Schema(_K.KV, (ArrayType("kv", "float", ("layers", 2, "tokens", "heads", "head_dim")),)),
        Schema(_K.SCENE, (ArrayType("points", "float", ("points", "axes")),), others=True),
        Schema(_K.PROGRESS, (ArrayType("progress", "float", (ANY,)), ArrayType("done", "float", (ANY,)))),
        Schema(
            _K.GOAL,
            (
                ArrayType("goal", "uint8", ("h", "w", 3), optional=True),
                ArrayType("init", "float32", ("horizon", "action_dim"), optional=True),
            ),
        ),
        Schema(_K.STATE, others=True),
    )
}


def schema_of(kind: str, own: Schema | None) -> Schema:
    """The schema of an edge of ``kind`` that has ``own``, or none.

    Raises:
        ConfigError: ``own`` is of another kind or contradicts that of its kind; a kind nobody knows, without one.
    """
    base = SCHEMAS.get(kind)
    if own is None:
        if base is None:
            known = nearest(kind, map(str, SCHEMAS))
            raise ConfigError(f"has unknown kind {kind!r}; a kind of your own needs a schema on its edge.{known}")
        return base
    if own.kind != kind:
        raise ConfigError(f"is of kind {str(kind)!r}, its schema of kind {str(own.kind)!r}")
    for array in own.arrays:
        if array.dtype not in DTYPES and array.dtype not in DTYPES["any"]:
            known = nearest(array.dtype, (*DTYPES, *DTYPES["any"]))
            raise ConfigError(f"has a schema whose array {array.name!r} is of unknown dtype {array.dtype!r}.{known}")
    if base is None:
        return own
    arrays = {array.name: array for array in base.arrays}
    for array in own.arrays:
        wide = arrays.get(array.name)
        if wide is not None and not _narrows(array, wide):
            raise ConfigError(f"wants {array.name!r} as {array}, which kind {str(kind)!r} has as {wide}")
        arrays[array.name] = array
    return replace(own, arrays=tuple(arrays.values()), others=own.others or base.others)


def _narrows(own: ArrayType, wide: ArrayType) -> bool:
    classes = DTYPES.get(own.dtype, (own.dtype,))
    if not set(classes) <= set(DTYPES.get(wide.dtype, (wide.dtype,))) or (own.optional and not wide.optional):
        return False
    if wide.dims is None or own.dims is None:
        return own.dims is not None or wide.dims is None
    if ANY in own.dims:
        return own.dims == wide.dims
    # Any lengths for its names: it must then fit, so that some payload fits both.
    shape = tuple(d if isinstance(d, int) else -1 for d in own.dims)
    return _fits(tuple(d if isinstance(d, int) or d == ANY else f"{i}" for i, d in enumerate(wide.dims)), shape, {}, -1)


def _fits(dims: Dims, shape: tuple[int, ...], lengths: dict[str, int], free: int | None = None) -> bool:
    """Whether ``shape`` has ``dims``; ``lengths`` of named ones so far. A length of ``free`` fits all."""
    if ANY in dims:
        at = dims.index(ANY)
        behind = len(dims) - at - 1
        if len(shape) < at + behind:
            return False
        shape = shape[:at] + (shape[len(shape) - behind :] if behind else ())
        dims = dims[:at] + dims[at + 1 :]
    if len(shape) != len(dims):
        return False
    for dim, length in zip(dims, shape, strict=True):
        wanted = lengths.setdefault(dim, length) if isinstance(dim, str) else dim
        if wanted != length and length != free:
            return False
    return True


_NAMES: dict[Any, str] = {}  # of dtypes, numpy's and torch's: making one takes longer than the rest of a check


def _dtype(value: Any) -> str:
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    name = _NAMES.get(dtype)
    if name is None:
        name = _NAMES[dtype] = str(dtype).removeprefix("torch.")
    return name
