"""The blocking client against a server in another process."""

from collections.abc import Iterator

import numpy as np
import pytest

from omni_loop.client import Client, connect
from omni_loop.config import Deployment
from omni_loop.errors import (
    DeadlineExceeded,
    InvalidInput,
    Reason,
    ServerUnavailable,
    StageFailed,
    UnknownName,
    UnknownSession,
)
from omni_loop.serve.background import BackgroundServer
from omni_loop.testing.bad_inputs import good_arrays
from omni_loop.testing.toy_core import SECRET, SPEC

ARRAYS = {name: good_arrays()[name] for name in ("image", "agent_pos")}


class ToyServer(BackgroundServer):
    module = "omni_loop.testing.toy_server"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ToyServer(Deployment(pipelines=("toy",))) as server:
        yield server.address


@pytest.fixture
def client(address: str) -> Iterator[Client]:
    with connect(address, timeout_s=20) as client:
        yield client


def test_an_episode(client: Client) -> None:
    assert client.info().pipelines == {"toy": SPEC}
    with client.open("toy", prompt="push", seed=5) as session:
        assert (session.seed, session.epoch, session.keys, session.spec) == (5, 1, ("image", "agent_pos"), SPEC)
        for step in range(3):
            result = session.infer(ARRAYS, step, frames=step)
            assert result.chunk is not None
            np.testing.assert_array_equal(result.chunk.actions[:, 0], np.full(4, 6 + step))
            assert result.chunk.first_step == step
            assert (result.frames is None) == (step == 0)
        assert session.predict(steps=2).frames is not None
        assert session.predict(np.ones((1, 2), np.float32)).frames is not None
        run = {name: array[None] for name, array in ARRAYS.items()}
        assert session.recondition(run, first_step=3).seq == 6
        assert session.reset(seed=1, prompt="pull") == 2
        assert session.infer(ARRAYS, 0).epoch == 2
    with pytest.raises(UnknownSession):
        session.infer(ARRAYS, 0)


def test_branches_of_an_episode(client: Client) -> None:
    with client.open("toy", seed=5) as session:
        for step in range(3):
            session.infer(ARRAYS, step)
        with session.fork(seed=9) as child:
            assert (child.seed, child.start_step, child.epoch) == (9, 2, 1)
            assert child.infer(ARRAYS, 3).seq == 4
            shown = client.sessions(session, child)
            assert shown.counts == {"toy": 2}
            assert [s.last_seq for s in shown.sessions] == [3, 4]
        assert session.rewind(1) == session.epoch == 2
        assert session.start_step == 1
        plan = session.plan(horizon=2, candidates=4, goal=ARRAYS["image"], budget_ms=5.0)
        assert plan.seq == 4
        assert plan.plan is not None
        assert (plan.plan.candidates, plan.plan.horizon, plan.plan.out_of_time) == (4, 2, True)
        assert session.snapshot("sync.1") > 0
    with client.restore("sync.1") as again:
        result = again.infer(ARRAYS, 2)
        assert (result.seq, result.epoch) == (5, 2)
        assert result.chunk is not None
        assert result.chunk.actions[0, 0] == 8


def test_the_servers_errors_arrive_as_they_were(client: Client) -> None:
    with pytest.raises(UnknownName, match="Did you mean 'toy'"):
        client.open("toyy")
    session = client.open("toy", options={"fail_at": 1, "crash_at": 2})
    with pytest.raises(StageFailed) as failed:
        session.infer(ARRAYS, 0)
    assert (failed.value.reason, failed.value.epoch) == (Reason.STAGE_FAILED, 1)
    with pytest.raises(StageFailed) as crashed:
        session.infer(ARRAYS, 0)
    assert SECRET not in str(crashed.value)
    assert session.infer(ARRAYS, 0).chunk is not None


def test_an_error_in_the_block_is_the_one_seen(client: Client) -> None:
    def block() -> None:
        with client.open("toy") as session:
            session.close()
            session._closed = False  # so that leaving the block fails as well
            raise InvalidInput("the first")

    with pytest.raises(InvalidInput, match="the first"):
        block()


def test_a_call_is_bounded(client: Client) -> None:
    session = client.open("toy", options={"hang_at": 1})
    client._timeout_s = 0.2
    with pytest.raises(DeadlineExceeded) as late:
        session.infer(ARRAYS, 0)
    assert late.value.reason is Reason.EXPIRED


def test_nobody_answers() -> None:
    with (
        connect("127.0.0.1:1", timeout_s=5) as client,
        pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1") as refusal,
    ):
        client.info()
    assert refusal.value.retryable


def test_a_wrong_encoding_opens_no_session(client: Client) -> None:
    with pytest.raises(InvalidInput, match=r"image_encoding is 'gif'; it must be one of raw, png, jpeg"):
        client.open("no such pipeline: the server would say so", image_encoding="gif")
