"""What the client checks before it sends, without any server."""

import numpy as np
import pytest

from omni_loop.client.book import Book, open_request
from omni_loop.errors import InvalidInput, TensorError
from omni_loop.testing.bad_inputs import LIMITS, good_arrays
from omni_loop.testing.toy_core import SPEC
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

KEYS = ("image", "agent_pos")
GOOD = {name: good_arrays()[name] for name in KEYS}


@pytest.fixture
def book() -> Book:
    return Book(
        pb.OpenSessionReply(session="s", resume_token="t", epoch=1, spec=codec.encode_spec(SPEC), observation_keys=KEYS)
    )


def sent(message: pb.Observation) -> dict[str, np.ndarray]:
    return {name: codec.decode_tensor(name, tensor, LIMITS) for name, tensor in message.arrays.items()}


def test_seq_counts_from_one_and_a_refusal_uses_none(book: Book) -> None:
    assert book.infer(GOOD, 0).seq == 1
    with pytest.raises(TensorError):
        book.infer({}, 1)
    assert book.predict(None, 3).seq == 2
    assert book.recondition({name: array[None] for name, array in GOOD.items()}, None, 0).seq == 3


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"image": np.zeros((8, 8, 3), np.float32)}, "'image' is float32; it must be uint8"),
        ({"agent_pos": np.zeros((2, 2))}, "'agent_pos' is float64; it must be float32"),
        ({"agent_pos": np.zeros((2, 2), np.int64)}, "'agent_pos' is int64; it must be float32"),
        ({"image": np.zeros((9, 8, 3), np.uint8)}, r"'image' has shape \[9,8,3\]; it must be \[8,8,3\]"),
        ({"agent_pos": np.full((2, 2), np.nan, np.float32)}, "'agent_pos' is not finite"),
        ({"agent_pos": [[1, 2], [3, float("inf")]]}, "'agent_pos' is not finite"),
        ({"agent_pos": [[1, 2], [3]]}, "'agent_pos' is a ragged list"),
        ({"agent_pos": [["a", "b"], ["c", "d"]]}, "'agent_pos' holds str"),
        ({"agent_pos": [[1, 2], [3, 1000]]}, "'agent_pos' goes up to 1000"),
        ({"image": [[[1.5, 0, 0]] * 8] * 8}, "'image' holds numbers that uint8 cannot"),
        ({"image": [[[256, 0, 0]] * 8] * 8}, "'image' holds numbers that uint8 cannot"),
        ({"imag": np.zeros(1)}, "unknown observation keys: 'imag'. Did you mean 'image'"),
    ],
)
def test_nothing_is_cast_and_the_key_is_named(book: Book, change: dict[str, object], says: str) -> None:
    with pytest.raises(TensorError, match=says):
        book.infer({**GOOD, **change}, 0)  # type: ignore[dict-item]


def test_a_missing_key_is_named(book: Book) -> None:
    with pytest.raises(TensorError, match="missing observation keys: 'agent_pos'"):
        book.infer({"image": GOOD["image"]}, 0)


def test_lists_of_numbers_take_the_dtype_of_the_spec(book: Book) -> None:
    arrays = sent(book.infer({"image": GOOD["image"].tolist(), "agent_pos": [[1, 2.5], [3, 4]]}, 0))
    np.testing.assert_array_equal(arrays["image"], GOOD["image"])
    assert arrays["agent_pos"].dtype == np.float32
    assert arrays["agent_pos"][0, 1] == 2.5


def test_executed_may_be_empty_and_actions_may_be_a_list(book: Book) -> None:
    executed = codec.decode_tensor("executed", book.infer(GOOD, 0, executed=[]).executed, LIMITS)
    assert executed.shape == (0, 2)
    actions = codec.decode_tensor("actions", book.predict([[1, 2], [3, 4]], 0).actions, LIMITS)
    assert (actions.shape, actions.dtype) == ((2, 2), np.float32)


@pytest.mark.parametrize("bad", [np.zeros((2, 3), np.float32), np.zeros(2, np.float32), np.zeros((2, 2)), [[1, 2, 3]]])
def test_actions_of_another_width_are_refused(book: Book, bad: object) -> None:
    with pytest.raises(TensorError, match="'actions'"):
        book.predict(bad, 0)  # type: ignore[arg-type]


@pytest.mark.parametrize("step", [1.0, "1", None, True, -1, 1 << 63])
def test_a_step_is_a_whole_number(book: Book, step: object) -> None:
    with pytest.raises(InvalidInput, match="step is"):
        book.infer(GOOD, step)  # type: ignore[arg-type]


def test_numpy_integers_count_as_whole_numbers(book: Book) -> None:
    assert book.infer(GOOD, np.int64(4)).step == 4  # type: ignore[arg-type]
    assert open_request("toy", "", int(np.uint64(1 << 63)), (), {}, "").seed == 1 << 63


def test_only_images_are_compressed() -> None:
    reply = pb.OpenSessionReply(spec=codec.encode_spec(SPEC), observation_keys=KEYS)
    message = Book(reply, "png").infer(GOOD, 0)
    assert message.arrays["image"].encoding == pb.ENCODING_PNG
    assert message.arrays["agent_pos"].encoding == pb.ENCODING_RAW
    np.testing.assert_array_equal(sent(message)["image"], GOOD["image"])
