from __future__ import annotations

from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_loop.errors import InvalidInput
from omni_loop.messages import (
    CloseSession,
    Commit,
    Discard,
    Done,
    Failed,
    OpenSession,
    PayloadKey,
    PayloadKind,
    Receipt,
    ReleasePayloads,
    ResetSession,
    RunStage,
)
from omni_loop.runner.packing import pack, unpack
from omni_loop.types import Op

KEY = PayloadKey("a.out>b.in", "s", 1, 2, 3)
RECEIPT = Receipt(KEY, PayloadKind.KV, "shm", "/olp-1", 5)
MESSAGES: list[Any] = [
    OpenSession("s", 2**62, "prömpt", {"a": 1, "b": 1.0, "c": True, "d": "x"}, ("p/a",)),
    RunStage("s", 0, 1, "p/a", Op.PREDICT, -3, {"in": RECEIPT}, {"frames": 8}),
    Commit("s", 0, 1, ("p/a", "p/b")),
    Discard("s", 0, 1, ()),
    ResetSession("s", 1, None, None),
    ResetSession("s", 1, 5, ""),
    CloseSession("s"),
    ReleasePayloads((KEY, KEY)),
    Done(7, {"out": RECEIPT}, 1.5, 0.25),
    Done(7, revisions={"p/a": "one", "p/b": ""}),
    Failed(7, "internal", "stage_failed", True, "text", "detail"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_every_message_arrives_as_it_was(message: Any) -> None:
    request, got, sent = unpack(pack(9, message, 1234))
    assert (request, got, sent) == (9, message, 1234)
    assert type(got) is type(message)
    if isinstance(message, OpenSession):
        assert [type(v) for v in got.options.values()] == [int, float, bool, str]  # type: ignore[union-attr]


def test_any_mapping_and_numpy_scalars_become_plain() -> None:
    message = RunStage("s", 0, 1, "p/a", Op.INFER, 0, MappingProxyType({}), {"n": np.int64(3), "x": np.float32(0.5)})  # type: ignore[dict-item]
    assert unpack(pack(1, message))[1] == RunStage("s", 0, 1, "p/a", Op.INFER, 0, {}, {"n": 3, "x": 0.5})


def test_what_is_no_scalar_is_refused() -> None:
    with pytest.raises(InvalidInput, match="RunStage"):
        pack(1, RunStage("s", 0, 1, "p/a", Op.INFER, 0, {}, {"n": object()}))  # type: ignore[dict-item]


@given(st.binary(max_size=80) | st.sampled_from([pack(1, m) for m in MESSAGES]).map(lambda b: b[:-1]))
def test_bytes_are_a_message_or_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput):
        unpack(data)
