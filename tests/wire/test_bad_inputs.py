"""Every named bad input is refused with a typed error that names what is wrong."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from omni_loop.errors import InvalidInput, Reason, Unsupported
from omni_loop.testing.bad_inputs import (
    BAD_SNAPSHOT_NAMES,
    KEYS,
    LIMITS,
    BadInput,
    cases,
    good_arrays,
    good_plan,
    good_request,
    plan_cases,
)
from omni_loop.testing.toy_core import SPEC
from omni_loop.types import Observation, Op
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

CASES = cases()
# 100,000 keys are more bytes than the limit of these tests; the count of arrays is to be what refuses them.
MESSAGES = codec.Limits(max_message_bytes=8 << 20)


def decode(raw: bytes) -> Observation:
    request = codec.parse(pb.InferRequest, raw, MESSAGES)
    return codec.decode_observation(request.observation, SPEC, KEYS, LIMITS)


def test_the_unspoilt_request_is_taken() -> None:
    observation = decode(good_request().SerializeToString())
    assert (observation.seq, observation.step) == (1, 3)
    for name, array in good_arrays().items():
        np.testing.assert_array_equal(observation.arrays[name], array)
        assert observation.arrays[name].dtype == array.dtype
        assert not observation.arrays[name].flags.writeable
    np.testing.assert_array_equal(observation.executed, np.ones((3, 2), np.float32))


def test_there_are_enough_of_them_and_each_has_a_name() -> None:
    assert len(CASES) >= 60
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bad_input(case: BadInput) -> None:
    request = good_request()
    raw = case.spoil(request) or request.SerializeToString()
    with pytest.raises(InvalidInput) as refusal:
        decode(raw)
    assert refusal.value.reason is case.reason
    assert not refusal.value.retryable
    for words in case.says:
        assert words in refusal.value.text
    assert len(codec.encode_error(refusal.value).text) <= 1024


def test_a_message_over_the_limit_is_not_even_parsed() -> None:
    with pytest.raises(InvalidInput, match="at most 10 are taken"):
        codec.parse(pb.InferRequest, b"\xff" * 11, codec.Limits(max_message_bytes=10))


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("x" * 4097, "4097 bytes"),
        ("ü" * 2049, "4098 bytes"),
        ("a\0b", "NUL"),
        ("\ud800", "UTF-8"),
        ("x" * 1_000_000, "1000000"),
    ],
)
def test_bad_prompts(prompt: str, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        codec.Limits().check_prompt(prompt)


def test_a_prompt_in_another_script_is_taken() -> None:
    assert codec.Limits().check_prompt("推 T 到目標") == "推 T 到目標"


LONG = "x" * (codec.MAX_NAME + 1)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"pipeline": LONG}, "the pipeline 'x"),
        ({"spec_digest": LONG}, "the spec digest 'x"),
        ({"observation_keys": ["image", LONG]}, "the observation key 'x"),
        ({"options": {LONG: "1"}}, "the option 'x"),
        ({"options": {"scale": LONG}}, "option 'scale': the value 'x"),
    ],
)
def test_long_names_are_refused_before_they_are_looked_up(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{says}") as refusal:
        codec.check_open(pb.OpenSessionRequest(**fields), LIMITS)
    assert refusal.value.reason is Reason.TOO_LARGE
    assert "x" * 64 in refusal.value.text
    assert "x" * 65 not in refusal.value.text


def test_names_as_long_as_may_be_are_taken() -> None:
    name = LONG[1:]
    codec.check_open(
        pb.OpenSessionRequest(pipeline=name, observation_keys=[name], options={name: name}, spec_digest=name), LIMITS
    )


@pytest.mark.parametrize("step", [(1 << 53) + 1, (1 << 63) - 1])
def test_a_recondition_names_its_own_field(step: int) -> None:
    request = pb.ReconditionRequest(seq=1, first_step=step)
    with pytest.raises(InvalidInput, match=f"^first_step is {step}; it must be at most {1 << 53}"):
        codec.decode_recondition(request, SPEC, KEYS, LIMITS)


def test_the_seq_of_a_predict_is_bounded() -> None:
    with pytest.raises(InvalidInput, match=f"^seq is {1 << 63}; it must be at most {1 << 53}"):
        codec.decode_predict(pb.PredictRequest(seq=1 << 63, steps=1), SPEC, LIMITS)


def plan(raw: bytes) -> codec.Plan:
    return codec.decode_plan(codec.parse(pb.PlanRequest, raw, MESSAGES), SPEC, LIMITS)


def test_the_unspoilt_plan_is_taken() -> None:
    decoded = plan(good_plan(7).SerializeToString())
    assert (decoded.seq, decoded.horizon, decoded.candidates, decoded.iterations) == (7, 3, 16, 2)
    assert (decoded.method, decoded.budget_ms, decoded.deadline_ms) == ("mppi", 20.0, 0.0)
    np.testing.assert_array_equal(decoded.goal, good_arrays()["image"])
    np.testing.assert_array_equal(decoded.init, np.full((3, 2), 5, np.float32))


def test_what_a_plan_leaves_out_is_chosen() -> None:
    assert plan(pb.PlanRequest(seq=1).SerializeToString()) == codec.Plan(1, 8, 64, 3, "cem", 0.0, None, None, 0.0)
    init = pb.PlanRequest(seq=1, init=codec.encode_tensor(np.ones((5, 2), np.float32)))
    assert codec.decode_plan(init, SPEC, LIMITS).horizon == 5
    assert codec.decode_plan(pb.PlanRequest(seq=1), replace(SPEC, max_predict=4), LIMITS).horizon == 4


def test_the_bounds_of_a_plan_themselves_are_taken() -> None:
    decoded = plan(pb.PlanRequest(seq=1, horizon=8, candidates=4096, iterations=64).SerializeToString())
    assert (decoded.horizon, decoded.candidates, decoded.iterations) == (8, 4096, 64)


@pytest.mark.parametrize("case", plan_cases(), ids=lambda case: case.name)
def test_bad_plan(case: BadInput) -> None:
    request = good_plan()
    raw = case.spoil(request) or request.SerializeToString()
    with pytest.raises(InvalidInput) as refusal:
        plan(raw)
    assert refusal.value.reason is case.reason
    for words in case.says:
        assert words in refusal.value.text
    assert len(refusal.value.text) < 400


def test_a_plan_where_the_pipeline_has_none() -> None:
    with pytest.raises(Unsupported, match="cannot plan; it can infer"):
        codec.decode_plan(good_plan(), replace(SPEC, ops=(Op.INFER,), max_predict=0), LIMITS)
    with pytest.raises(Unsupported, match="cannot plan; it can infer"):
        codec.goal_spec(replace(SPEC, ops=(Op.INFER,), frame=None))
    with pytest.raises(Unsupported, match="takes no goal frame"):
        codec.decode_plan(good_plan(), replace(SPEC, frame=None), LIMITS)


@pytest.mark.parametrize("name", BAD_SNAPSHOT_NAMES, ids=lambda name: ascii(name)[:20])
def test_a_name_no_snapshot_can_have(name: str) -> None:
    with pytest.raises(InvalidInput, match="letters, digits, dots, dashes") as refusal:
        codec.check_snapshot_name(name)
    assert len(refusal.value.text) < 400


@pytest.mark.parametrize("name", ["a", "0", "A.b-c_d", "run..2", "x" * 100])
def test_a_name_a_snapshot_can_have(name: str) -> None:
    assert codec.check_snapshot_name(name) == name


@pytest.mark.parametrize("step", [-1, -(1 << 63), (1 << 54) + 1, (1 << 63) - 1])
def test_the_step_of_a_rewind_is_bounded(step: int) -> None:
    with pytest.raises(InvalidInput, match=r"^step"):
        codec.check_rewind(pb.RewindRequest(step=step))


def test_more_sessions_than_there_can_be_are_not_looked_up() -> None:
    request = pb.ListSessionsRequest(sessions=[pb.SessionRef()] * 3)
    with pytest.raises(InvalidInput, match=r"3 sessions .* at most 2"):
        codec.check_list(request, codec.Limits(max_sessions=2))
    codec.check_list(request, codec.Limits(max_sessions=3))
