"""What the client checks before it sends, without any server."""

import numpy as np
import pytest

from omni_loop.client import connect, connect_async
from omni_loop.client.book import Book, open_request, restore_request
from omni_loop.errors import InvalidInput, OmniLoopError, TensorError
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


def reply(**fields: object) -> pb.OpenSessionReply:
    return pb.OpenSessionReply(session="c", spec=codec.encode_spec(SPEC), observation_keys=KEYS, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("used", "answered", "next_seq"), [(3, 3, 4), (3, 2, 4), (3, 0, 4), (0, 5, 6)])
def test_a_child_goes_on_above_both_what_was_sent_and_what_was_accepted(
    book: Book, used: int, answered: int, next_seq: int
) -> None:
    for step in range(used):
        book.infer(GOOD, step)
    child = book.forked(reply(last_seq=answered, step=7, epoch=2))
    assert child.infer(GOOD, 8).seq == next_seq
    assert (child.ref.session, child.start_step, child.epoch) == ("c", 7, 2)
    assert book.seq == used


def test_what_is_restored_goes_on_above_the_last_seq_accepted() -> None:
    restored = Book(reply(last_seq=41, step=40, epoch=3))
    assert restored.plan(None, None, None, "cem", 0, None, None).seq == 42
    assert (restored.epoch, restored.start_step) == (3, 40)


def test_rewind_and_reset_say_where_the_session_stands(book: Book) -> None:
    assert book.read_rewind(pb.RewindReply(epoch=4, step=9)) == book.epoch == 4
    assert book.start_step == 9
    assert book.read_reset(pb.ResetReply(epoch=5)) == 5
    assert book.start_step == 0


PLAN: dict[str, object] = {
    "horizon": 3,
    "candidates": 8,
    "iterations": 2,
    "method": "cem",
    "budget_ms": 0,
    "goal": None,
    "init": None,
}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"horizon": 9}, "horizon is 9; it must be at least 1 and at most 8"),
        ({"horizon": 0}, "horizon is 0; it must be at least 1"),
        ({"horizon": 2.0}, "horizon is 2.0; it must be a whole number"),
        ({"candidates": 4097}, "candidates is 4097; it must be at least 1 and at most 4096"),
        ({"candidates": -1}, "candidates is -1; it must be"),
        ({"candidates": 1 << 40}, "candidates is 1099511627776; it must be"),
        ({"iterations": 65}, "iterations is 65; it must be at least 1 and at most 64"),
        ({"iterations": True}, "iterations is True; it must be a whole number"),
        ({"method": "cme"}, "unknown method 'cme'. Did you mean 'cem'?"),
        ({"method": None}, "method is None; it must be text"),
        ({"budget_ms": float("inf")}, "budget_ms is inf; it must be finite"),
        ({"budget_ms": "1"}, "budget_ms is '1'; it must be a number"),
        ({"goal": np.zeros((9, 8, 3), np.uint8)}, r"'goal' has shape \[9,8,3\]; it must be \[8,8,3\]"),
        ({"goal": np.zeros((8, 8, 3), np.float32)}, "'goal' is float32; it must be uint8"),
        ({"goal": "goal.png"}, "'goal' holds"),
        ({"init": [[1, 2]]}, "'init' has 1 rows, but horizon is 3"),
        ({"init": np.zeros((9, 2), np.float32), "horizon": None}, "horizon is 9; it must be at least 1 and at most 8"),
        ({"init": np.zeros((3, 3), np.float32)}, r"'init' has shape \[3,3\]"),
        ({"init": [[1, 2], [3, 4], [5, float("nan")]]}, "'init' is not finite"),
        ({"deadline_ms": -1}, "deadline_ms is -1"),
    ],
)
def test_what_a_plan_cannot_be_is_named_and_uses_no_seq(book: Book, change: dict[str, object], says: str) -> None:
    with pytest.raises(InvalidInput, match=f"^{says}"):
        book.plan(**{**PLAN, **change})  # type: ignore[arg-type]
    assert book.seq == 0


def test_the_horizon_of_a_plan_is_that_of_its_beginning(book: Book) -> None:
    message = book.plan(None, None, None, "cem", 0, None, [[1, 2]] * 5)
    assert not message.HasField("horizon")
    assert codec.decode_plan(message, SPEC, LIMITS).horizon == 5


def test_arguments_of_branching_calls_are_named(book: Book) -> None:
    for call, says in (
        (lambda: book.fork(-1), "seed is -1; it must be"),
        (lambda: book.fork("1"), "seed is '1'; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: book.rewind(-1), "step is -1; it must be"),
        (lambda: book.rewind(1.5), "step is 1.5; it must be a whole number"),  # type: ignore[arg-type]
        (lambda: book.rewind((1 << 54) + 1), "step is 18014398509481985; it must be"),
        (lambda: book.snapshot(5), "name is 5; it must be text"),  # type: ignore[arg-type]
        (lambda: book.snapshot("../a"), "the snapshot's name is '../a'; it must be 1 to 100 letters"),
        (lambda: restore_request("a/b"), "the snapshot's name is 'a/b'; it must be"),
        (lambda: restore_request("a", "gif"), "image_encoding is 'gif'; it must be one of raw, png, jpeg"),
    ):
        with pytest.raises(InvalidInput) as refusal:
            call()
        assert refusal.value.text.startswith(says)


@pytest.mark.parametrize("make", [connect, connect_async])
@pytest.mark.parametrize(
    ("address", "says"),
    [
        (5, "address is 5; it must be text"),
        (None, "address is None; it must be text"),
        ("", "address is ''; it must be host:port, such as 127.0.0.1:50051"),
        ("localhost", "address is 'localhost'; it must be host:port"),
        (":50051", "address is ':50051'; it must be host:port"),
        ("localhost:", "address is 'localhost:'; it must be host:port"),
        ("localhost:http", "address is 'localhost:http', whose port is no number from 1 to 65535"),
        ("localhost:0", "address is 'localhost:0', whose port is no number"),
        ("localhost:65536", "address is 'localhost:65536', whose port is no number"),
        ("localhost:-1", "address is 'localhost:-1', whose port is no number"),
        ("localhost:\u0661", "address is 'localhost:\u0661', whose port is no number"),
        ("localhost:" + "9" * 200, "address is 'localhost:9{54}'..., whose port is no number"),
        ("http://localhost:50051", "address is 'http://localhost:50051', whose host is no name and no IPv4 address"),
        ("local host:50051", "address is 'local host:50051', whose host is no name"),
        ("localhost:50051/x", "address is 'localhost:50051/x', whose port is no number"),
        ("user@localhost:1", "address is 'user@localhost:1', whose host is no name"),
        ("::1:50051", r"address is '::1:50051'; an IPv6 host stands in brackets: \[::1\]:50051"),
        ("[::1:50051", r"address is '\[::1:50051', whose host is no IPv6 address; write \[::1\]:50051"),
        ("[localhost]:50051", r"address is '\[localhost\]:50051', whose host is no IPv6 address"),
        ("[]:50051", r"address is '\[\]:50051', whose host is no IPv6 address"),
        ("x" * 300 + ":1", "address 'x{64}'... has 302 characters; at most 256"),
    ],
)
def test_an_address_that_cannot_be_one_is_named(make, address: object, says: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput, match=f"^{says}"):
        make(address)


@pytest.mark.parametrize(
    ("timeout_s", "says"),
    [
        (0, "timeout_s is 0; it must be above 0 and at most 31536000 seconds"),
        (-1.5, "timeout_s is -1.5; it must be above 0"),
        (float("nan"), "timeout_s is nan; it must be above 0"),
        (float("inf"), "timeout_s is inf; it must be above 0"),
        (10**400, r"timeout_s is 2\^1328 or more; it must be above 0"),
        ("5", "timeout_s is '5'; it must be a number of seconds"),
        (None, "timeout_s is None; it must be a number of seconds"),
        (True, "timeout_s is True; it must be a number of seconds"),
    ],
)
def test_a_time_that_cannot_be_one_is_named(timeout_s: object, says: str) -> None:
    with pytest.raises(OmniLoopError, match=f"^{says}"):
        connect("127.0.0.1:1", timeout_s=timeout_s)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:65535", "[::1]:50051", "robot-7.lab_2.example:9", "h:1"])
def test_good_addresses_are_taken_as_they_are(address: str) -> None:
    with connect(address, timeout_s=np.float32(2)) as client:  # type: ignore[arg-type]
        assert client.address == address
