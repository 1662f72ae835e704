"""Specs, replies, requests and errors travel unchanged."""

import numpy as np
import pytest

from omni_loop import errors
from omni_loop.errors import Code, Exhausted, InvalidInput, OmniLoopError, Reason, StageFailed, TensorError
from omni_loop.testing.bad_inputs import LIMITS
from omni_loop.testing.toy_core import SPEC
from omni_loop.types import (
    ActionChunk,
    ArraySpec,
    FramePrediction,
    Op,
    PlanSummary,
    Progress,
    SessionSpec,
    TickResult,
    Timings,
)
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

CHUNK = ActionChunk(7, 3, np.arange(8, dtype=np.float32).reshape(4, 2), 2, "rev", Timings(3.0, 2.0, 0.5, {"act": 2.0}))
FRAMES = FramePrediction(7, 4, np.full((2, 8, 8, 3), 9, np.uint8), 2, np.ones((2, 5, 2), np.float32), preview=True)


def error_classes() -> list[type[OmniLoopError]]:
    return [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, OmniLoopError)]


def test_a_spec_round_trips_with_its_digest() -> None:
    wire = codec.encode_spec(SPEC)
    back = codec.decode_spec(pb.SessionSpec.FromString(wire.SerializeToString()))
    assert back == SPEC
    assert wire.digest == back.digest == SPEC.digest


def test_whole_numbers_in_a_spec_do_not_change_its_digest() -> None:
    action = ArraySpec("action", "float32", (2,), low=0, high=512)
    spec = SessionSpec("p", (), action, 4, 2, 10, (Op.INFER,))
    assert codec.decode_spec(codec.encode_spec(spec)).digest == spec.digest


def test_a_spec_without_frames_or_bounds() -> None:
    spec = SessionSpec("p", (), ArraySpec("a", "float32", (3,)), 1, 1, 5.0, (Op.INFER,))
    back = codec.decode_spec(codec.encode_spec(spec))
    assert back.frame is None
    assert back.action.low is None


def test_an_operation_of_the_future_is_refused_by_name() -> None:
    wire = codec.encode_spec(SPEC)
    wire.ops.append("teleport")
    with pytest.raises(InvalidInput, match="teleport"):
        codec.decode_spec(wire)


def test_limits_round_trip() -> None:
    assert codec.decode_limits(codec.encode_limits(LIMITS)) == LIMITS


def test_a_result_round_trips() -> None:
    lost = StageFailed("stage 'frames' failed")
    sent = TickResult(7, 2, CHUNK, FRAMES, Progress(7, 3, 0.5, 0.25, 2), CHUNK.timings, lost)
    back = codec.decode_result(pb.TickReply.FromString(codec.encode_result(sent).SerializeToString()), SPEC, LIMITS)
    assert (back.seq, back.epoch, back.progress, back.timings) == (7, 2, sent.progress, sent.timings)
    assert back.chunk is not None
    assert back.frames is not None
    assert (back.chunk.first_step, back.chunk.policy_revision, back.chunk.timings) == (3, "rev", sent.timings)
    np.testing.assert_array_equal(back.chunk.actions, CHUNK.actions)
    np.testing.assert_array_equal(back.frames.frames, FRAMES.frames)
    assert back.frames.scene is not None
    np.testing.assert_array_equal(back.frames.scene, np.ones((2, 5, 2)))
    assert (back.frames.seq, back.frames.first_step, back.frames.epoch, back.frames.preview) == (7, 4, 2, True)
    assert isinstance(back.frames_error, StageFailed)
    assert back.frames_error.text == lost.text


def test_how_a_plan_was_found_round_trips() -> None:
    sent = TickResult(7, 2, CHUNK, plan=PlanSummary(7, -1.5, 3.25, 64, 2, 8, True))
    back = codec.decode_result(pb.TickReply.FromString(codec.encode_result(sent).SerializeToString()), SPEC, LIMITS)
    assert back.plan == sent.plan


@pytest.mark.parametrize("costs", [{"cost": float("nan")}, {"first_cost": float("inf")}])
def test_a_client_takes_no_cost_that_is_no_number(costs: dict[str, float]) -> None:
    with pytest.raises(StageFailed, match="cost") as refusal:
        codec.decode_result(pb.TickReply(seq=1, plan=pb.PlanSummary(**costs)), SPEC, LIMITS)
    assert refusal.value.reason is Reason.BAD_OUTPUT


def test_an_empty_result_stays_empty() -> None:
    back = codec.decode_result(codec.encode_result(TickResult(1, 1)), SPEC, LIMITS)
    assert back == TickResult(1, 1)


@pytest.mark.parametrize(
    "actions",
    [np.full((4, 2), np.nan, np.float32), np.zeros((4, 3), np.float32), np.zeros((4, 2)), np.zeros(2, np.float32)],
)
def test_a_client_takes_no_chunk_that_breaks_the_spec(actions: np.ndarray) -> None:
    reply = pb.TickReply(seq=1, chunk=pb.ActionChunk(actions=codec.encode_tensor(actions)))
    with pytest.raises(StageFailed) as refusal:
        codec.decode_result(reply, SPEC, LIMITS)
    assert refusal.value.reason is Reason.BAD_OUTPUT


@pytest.mark.parametrize("frames", [np.zeros((2, 9, 8, 3), np.uint8), np.zeros((2, 8, 8, 3), np.float32)])
def test_a_client_takes_no_frames_that_break_the_spec(frames: np.ndarray) -> None:
    with pytest.raises(StageFailed):
        codec.decode_frames(pb.FramePrediction(frames=codec.encode_tensor(frames)), SPEC, LIMITS)


def test_frames_that_failed_raise_their_error() -> None:
    with pytest.raises(StageFailed, match="frames failed") as failure:
        codec.decode_frames(codec.encode_frames_error(StageFailed("frames failed"), 4, 3), SPEC, LIMITS)
    assert failure.value.epoch == 3


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_an_error_keeps_its_class(cls: type[OmniLoopError]) -> None:
    sent = cls("what is wrong")
    back = codec.decode_error(pb.Error.FromString(codec.encode_error(sent, epoch=5).SerializeToString()))
    # The base is a way to spell an internal error; its own kind is StageFailed.
    assert type(back) is (StageFailed if cls is OmniLoopError else cls)
    assert (back.text, back.code, back.reason, back.retryable) == (sent.text, sent.code, sent.reason, sent.retryable)
    assert back.epoch == 5


def test_when_to_try_again_and_what_is_missing_travel() -> None:
    sent = Exhausted("no room", reason=Reason.OUT_OF_BYTES, retry_after_ms=250.5, missing_bytes=1 << 40)
    back = codec.decode_error(pb.Error.FromString(codec.encode_error(sent).SerializeToString()))
    assert (back.retry_after_ms, back.missing_bytes) == (250.5, 1 << 40)
    plain = codec.decode_error(codec.encode_error(Exhausted("no room")))
    assert (plain.retry_after_ms, plain.missing_bytes) == (0.0, 0)


@pytest.mark.parametrize("ms", [float("nan"), float("inf"), -1.0])
def test_a_wait_that_makes_no_sense_is_none(ms: float) -> None:
    assert codec.encode_error(Exhausted("t", retry_after_ms=ms)).retry_after_ms == 0
    assert codec.decode_error(pb.Error(retry_after_ms=ms)).retry_after_ms == 0


@pytest.mark.parametrize(("missing", "sent"), [(-5, 0), (1 << 70, (1 << 64) - 1)])
def test_missing_bytes_that_do_not_fit_are_cut(missing: int, sent: int) -> None:
    assert codec.encode_error(Exhausted("t", missing_bytes=missing)).missing_bytes == sent


@pytest.mark.parametrize("code", list(Code))
@pytest.mark.parametrize("reason", list(Reason))
def test_every_code_and_reason_travels(code: Code, reason: Reason) -> None:
    sent = OmniLoopError("text", code=code, reason=reason, retryable=True)
    back = codec.decode_error(codec.encode_error(sent))
    assert (back.code, back.reason, back.retryable) == (code, reason, True)


def test_a_code_of_the_future_is_an_internal_error() -> None:
    back = codec.decode_error(pb.Error(code="melted", reason="too_hot", text="t"))
    assert (back.code, back.text) == (Code.INTERNAL, "t")


def test_a_long_text_is_cut_and_an_odd_one_mended() -> None:
    assert len(codec.encode_error(TensorError("x" * 5000)).text) == 1024
    assert codec.encode_error(TensorError("\ud800")).text == "?"


def predict(**fields: object) -> codec.Predict:
    return codec.decode_predict(pb.PredictRequest(seq=1, **fields), SPEC, LIMITS)  # type: ignore[arg-type]


def test_predict_with_actions_and_with_steps() -> None:
    actions = np.ones((3, 2), np.float32)
    decoded = predict(actions=codec.encode_tensor(actions), deadline_ms=5.0)
    assert decoded.actions is not None
    np.testing.assert_array_equal(decoded.actions, actions)
    assert decoded.deadline_ms == 5.0
    assert predict(steps=4) == codec.Predict(1, None, 4, 0.0)


@pytest.mark.parametrize("bad", [np.ones((3, 3), np.float32), np.ones((3, 2)), np.full((1, 2), np.inf, np.float32)])
def test_predict_with_bad_actions(bad: np.ndarray) -> None:
    with pytest.raises(TensorError, match="'actions'"):
        predict(actions=codec.encode_tensor(bad))


def recondition(n_image: int, n_pos: int, **spoil: np.ndarray) -> codec.Recondition:
    arrays = {
        "image": np.zeros((n_image, 8, 8, 3), np.uint8),
        "agent_pos": np.zeros((n_pos, 2, 2), np.float32),
        **spoil,
    }
    tensors = {name: codec.encode_tensor(array) for name, array in arrays.items()}
    message = pb.ReconditionRequest(seq=2, first_step=4, arrays=tensors)
    return codec.decode_recondition(message, SPEC, ("image", "agent_pos"), LIMITS)


def test_recondition_has_a_leading_axis_of_steps() -> None:
    run = recondition(3, 3)
    assert (run.seq, run.first_step, run.executed) == (2, 4, None)
    assert run.arrays["image"].shape == (3, 8, 8, 3)


def test_recondition_without_the_axis_names_the_shape() -> None:
    with pytest.raises(TensorError, match=r"'image' has shape \[8,8,3\]; it must be \[n,8,8,3\]"):
        recondition(1, 1, image=np.zeros((8, 8, 3), np.uint8))
