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


INFER = {"arrays": GOOD, "step": 0}
NUMBERS: list[tuple[str, object, str]] = [
    ("frames", -1, "frames is -1; it must be at least 0 and at most 4294967295"),
    ("frames", 1 << 40, "frames is 1099511627776; it must be"),
    ("frames", 1.5, "frames is 1.5; it must be a whole number"),
    ("captured_ns", -1, "captured_ns is -1; it must be"),
    ("captured_ns", 1 << 64, "captured_ns is 18446744073709551616; it must be"),
    ("deadline_ms", "x", "deadline_ms is 'x'; it must be a number of milliseconds"),
    ("deadline_ms", float("nan"), "deadline_ms is nan; it must be finite"),
    ("deadline_ms", -1, "deadline_ms is -1; it must be finite and at least 0"),
    ("deadline_ms", 10**400, "deadline_ms is 2\\^1328 or more; it must be finite"),
    ("step", (1 << 53) + 1, f"step is 9007199254740993; it must be at least 0 and at most {1 << 53}"),
    ("arrays", [1, 2], "arrays is a list; it must be a mapping"),
    ("arrays", {1: 2}, "a key in arrays is 1; it must be text"),
]


@pytest.mark.parametrize(("name", "value", "says"), NUMBERS)
def test_arguments_are_named(book: Book, name: str, value: object, says: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{says}"):
        book.infer(**{**INFER, name: value})  # type: ignore[arg-type]
    assert book.seq == 0


def test_the_bounds_themselves_are_taken(book: Book) -> None:
    message = book.infer(GOOD, 1 << 53, frames=(1 << 32) - 1, captured_ns=(1 << 64) - 1, deadline_ms=np.float32(2))  # type: ignore[arg-type]
    assert (message.step, message.frames, message.captured_ns) == (1 << 53, (1 << 32) - 1, (1 << 64) - 1)
    assert message.deadline_ms == 2.0


def test_arguments_of_the_other_calls_are_named(book: Book) -> None:
    with pytest.raises(InvalidInput, match=r"^steps is 4294967296; it must be"):
        book.predict(None, 1 << 32)
    with pytest.raises(InvalidInput, match=r"^deadline_ms is 'x'"):
        book.predict(None, 1, "x")  # type: ignore[arg-type]
    run = {name: array[None] for name, array in GOOD.items()}
    with pytest.raises(InvalidInput, match=r"^first_step is 9223372036854775808; it must be"):
        book.recondition(run, None, 1 << 63)
    with pytest.raises(InvalidInput, match=r"^deadline_ms is a list"):
        book.recondition(run, None, 0, [])  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^prompt is 5; it must be text"):
        book.reset(None, 5)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"^seed is -1; it must be"):
        book.reset(-1, None)
    assert book.seq == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pipeline": 5}, "pipeline is 5; it must be text"),
        ({"pipeline": "x" * 257}, "pipeline 'x{64}'... has 257 characters; at most 256"),
        ({"prompt": 5}, "prompt is 5; it must be text"),
        ({"prompt": "\ud800"}, "prompt is '.ud800', which is not valid UTF-8"),
        ({"seed": 1.5}, "seed is 1.5; it must be a whole number"),
        ({"keys": "image"}, "keys is 'image'; it must be a sequence"),
        ({"keys": 5}, "keys is 5; it must be a sequence"),
        ({"keys": [5]}, "a key in keys is 5; it must be text"),
        ({"options": [1]}, "options is a list; it must be a mapping"),
        ({"options": {"a": object()}}, r"options\['a'\] is a object; it must be text, a number"),
        ({"options": {1: "a"}}, "a name in options is 1; it must be text"),
        ({"spec_digest": None}, "spec_digest is None; it must be text"),
        ({"image_encoding": "gif"}, "image_encoding is 'gif'; it must be one of raw, png, jpeg"),
        ({"image_encoding": 5}, "image_encoding is 5; it must be one of raw, png, jpeg"),
    ],
)
def test_opening_names_the_argument(change: dict[str, object], says: str) -> None:
    good: dict[str, object] = {"pipeline": "toy", "prompt": "", "seed": None, "keys": (), "options": {}}
    with pytest.raises(InvalidInput, match=f"^{says}"):
        open_request(**{**good, "spec_digest": "", **change})  # type: ignore[arg-type]
