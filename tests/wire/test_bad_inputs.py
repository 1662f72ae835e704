"""Every named bad input is refused with a typed error that names what is wrong."""

from typing import Any

import numpy as np
import pytest

from omni_loop.errors import InvalidInput, Reason
from omni_loop.testing.bad_inputs import KEYS, LIMITS, BadInput, cases, good_arrays, good_request
from omni_loop.testing.toy_core import SPEC
from omni_loop.types import Observation
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
