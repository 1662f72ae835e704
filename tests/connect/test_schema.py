"""What an edge accepts: payloads made to fit pass, and one thing wrong is named."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omni_loop.connect.schema import ANY, DTYPES, SCHEMAS, ArrayType, EdgeSchema, Schema, schema_of
from omni_loop.errors import ConfigError, Reason, StageFailed
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload

NUMPY = ("uint8", "int32", "int64", "float16", "float32", "float64", "bool")
types = st.builds(
    ArrayType,
    st.sampled_from("abc"),
    st.sampled_from((*DTYPES, "float32", "uint8", "bool")),
    st.one_of(st.none(), st.lists(st.one_of(st.integers(0, 4), st.sampled_from("nhw")), max_size=4).map(tuple)),
    st.booleans(),
)
schemas = st.lists(types, max_size=3, unique_by=lambda t: t.name).map(lambda a: Schema("mine", tuple(a), version=2))


def array_of(wanted: ArrayType, lengths: dict[str, int], draw: st.DrawFn) -> np.ndarray:
    dtype = draw(st.sampled_from([d for d in NUMPY if d == wanted.dtype or d in DTYPES.get(wanted.dtype, ())]))
    dims = wanted.dims if wanted.dims is not None else draw(st.lists(st.integers(0, 3), max_size=3))
    shape = [d if isinstance(d, int) else lengths.setdefault(d, draw(st.integers(0, 4))) for d in dims]
    return np.zeros(shape, dtype)


@st.composite
def fitting(draw: st.DrawFn) -> tuple[Schema, Payload]:
    schema, lengths = draw(schemas), dict[str, int]()
    arrays = {t.name: array_of(t, lengths, draw) for t in schema.arrays if not t.optional or draw(st.booleans())}
    return schema, Payload("mine", arrays, schema=2)


@given(fitting())
def test_what_is_made_to_fit_fits(made: tuple[Schema, Payload]) -> None:
    schema, payload = made
    assert schema.problem(payload) == ""
    tensors = {name: torch.as_tensor(array) for name, array in payload.arrays.items()}
    assert schema.problem(replace(payload, arrays=tensors)) == ""
    assert "kind" in schema.problem(replace(payload, kind="other"))
    assert "version 3" in schema.problem(replace(payload, schema=3))
    extra = schema.problem(replace(payload, arrays={**payload.arrays, "z": np.zeros(1)}))
    assert "'z'" in extra
    assert not replace(schema, others=True).problem(replace(payload, arrays={**payload.arrays, "z": np.zeros(1)}))


@given(fitting(), st.data())
def test_one_thing_wrong_is_named(made: tuple[Schema, Payload], data: st.DataObject) -> None:
    schema, payload = made
    here = [t for t in schema.arrays if t.name in payload.arrays]
    if not here:
        return
    wanted = data.draw(st.sampled_from(here))
    array = payload.arrays[wanted.name]
    ways = ["dtype"] if wanted.dtype != "any" else []
    ways += ["rank"] * (wanted.dims is not None) + ["missing"] * (not wanted.optional)
    ways += ["length"] * any(isinstance(d, int) for d in wanted.dims or ())
    if not ways:
        return
    way, arrays = data.draw(st.sampled_from(ways)), dict(payload.arrays)
    if way == "missing":
        del arrays[wanted.name]
    elif way == "dtype":
        arrays[wanted.name] = array.astype("complex64")
    elif way == "rank":
        arrays[wanted.name] = array[None]
    else:
        at = next(i for i, d in enumerate(wanted.dims or ()) if isinstance(d, int))
        arrays[wanted.name] = np.zeros([n + (i == at) for i, n in enumerate(array.shape)], array.dtype)
    problem = schema.problem(replace(payload, arrays=arrays))
    assert repr(wanted.name) in problem
    assert f"wanted {wanted}" in problem


def test_equal_names_are_equal_lengths() -> None:
    frames = SCHEMAS[PayloadKind.FRAMES]
    payload = Payload(
        PayloadKind.FRAMES, {"frames": np.zeros((2, 4, 4, 3), np.uint8), "scene": np.zeros((2, 9, 2), np.float32)}
    )
    assert frames.problem(payload) == ""
    payload.arrays["scene"] = np.zeros((3, 9, 2), np.float32)  # type: ignore[index]
    assert frames.problem(payload) == "array 'scene' is float32[3, 9, 2], wanted float32[n, points, 2] with n = 2"


def test_any_number_of_axes_may_stand_for_one_entry() -> None:
    kind = Schema("mine", (ArrayType("a", "any", ("n", ANY, 2)),))
    for shape in ((5, 2), (5, 7, 2), (5, 7, 8, 2)):
        assert kind.problem(Payload("mine", {"a": np.zeros(shape)})) == ""
    for shape in ((2,), (5, 3), ()):
        assert "wanted any[n, ..., 2]" in kind.problem(Payload("mine", {"a": np.zeros(shape)}))


def test_every_kind_has_a_schema() -> None:
    assert set(SCHEMAS) == set(PayloadKind)


def test_an_edge_narrows_its_kind_and_may_add_to_it() -> None:
    own = Schema(
        PayloadKind.LATENTS,
        (ArrayType("latents", "float32", ("n", 16, 72)), ArrayType("scale", "float32", (), optional=True)),
        version=3,
    )
    merged = schema_of(PayloadKind.LATENTS, own)
    good = Payload(PayloadKind.LATENTS, {"latents": np.zeros((2, 16, 72), np.float32)}, schema=3)
    assert merged.problem(good) == ""
    assert (
        merged.problem(replace(good, arrays={**good.arrays, "scale": np.float32(1), "actions": np.zeros((2, 2))})) == ""
    )
    assert "wanted float32[n, 16, 72]" in merged.problem(replace(good, arrays={"latents": np.zeros((2, 16, 72))}))
    assert schema_of("lidar", Schema("lidar", others=True)).problem(Payload("lidar", {"x": np.zeros(2)})) == ""


@pytest.mark.parametrize(
    ("kind", "own", "text"),
    [
        ("laents", None, "needs a schema on its edge. Did you mean 'latents'"),
        (PayloadKind.KV, Schema(PayloadKind.LATENTS), "is of kind 'kv', its schema of kind 'latents'"),
        (PayloadKind.KV, Schema(PayloadKind.KV, (ArrayType("kv", "uint8"),)), "wants 'kv' as uint8"),
        (
            PayloadKind.KV,
            Schema(PayloadKind.KV, (ArrayType("kv", "float32", (1, 3, 1, 1, 1)),)),
            "wants 'kv' as float32",
        ),
        (PayloadKind.KV, Schema(PayloadKind.KV, (ArrayType("kv", "flot32"),)), "unknown dtype 'flot32'. Did you mean"),
        (PayloadKind.KV, Schema(PayloadKind.KV, (ArrayType("kv", "float", optional=True),)), "wants 'kv' as float"),
    ],
)
def test_what_contradicts_a_kind_is_refused(kind: str, own: Schema | None, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        schema_of(kind, own)


def test_errors_name_the_edge() -> None:
    edge = EdgeSchema("p/a.x>b.x", SCHEMAS[PayloadKind.TOKENS])
    with pytest.raises(StageFailed, match=r"edge p/a.x>b.x: array 'tokens' is float64\[1\], wanted int") as caught:
        edge.check_put(Payload(PayloadKind.TOKENS, {"tokens": np.zeros(1)}))
    assert caught.value.reason is Reason.BAD_OUTPUT
    with pytest.raises(StageFailed, match="carries tokens version 2, its reader takes tokens version 1") as caught:
        edge.check_got(Payload(PayloadKind.TOKENS, {"tokens": np.zeros(1, np.int64)}, schema=2))
    assert caught.value.reason is Reason.BAD_SPEC
