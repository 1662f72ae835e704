"""LeRobot's AsyncInference over the toy core, as bytes on the wire; LeRobot itself is not needed."""

import asyncio
import pickle
import sys
import types
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from omni_loop.endpoints import LerobotEndpoint
from omni_loop.errors import ConfigError
from omni_loop.serve.app import Server
from omni_loop.serve.compat import actions, lerobot, pickles
from omni_loop.serve.compat import lerobot_pb2 as pb
from omni_loop.testing.toy_core import SECRET, ToyCore

MODULE = "lerobot.async_inference.helpers"
KEYS = {"observation.state": "agent_pos", "observation.images.top": "image"}
MOTORS = ("a", "b", "c", "d")
FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (4,), "names": list(MOTORS)},
    "observation.images.top": {"dtype": "image", "shape": (8, 8, 3), "names": ["height", "width", "channels"]},
}


@dataclass
class RemotePolicyConfig:
    policy_type: str
    pretrained_name_or_path: str
    lerobot_features: dict[str, Any]
    actions_per_chunk: int
    device: str = "cpu"
    rename_map: dict[str, str] = field(default_factory=dict)


@dataclass
class TimedObservation:
    timestamp: float
    timestep: int
    observation: dict[str, Any]
    must_go: bool = False


@dataclass
class TimedAction:
    timestamp: float
    timestep: int
    action: Any


@pytest.fixture(autouse=True)
def theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """These classes pickle under LeRobot's names, and torch's tensors come back as arrays."""
    helpers = types.ModuleType(MODULE)
    for kind in (RemotePolicyConfig, TimedObservation, TimedAction):
        monkeypatch.setattr(kind, "__module__", MODULE)
        setattr(helpers, kind.__name__, kind)
    torch = types.ModuleType("torch")
    torch.tensor = lambda numbers: np.array(numbers, np.float32)  # type: ignore[attr-defined]
    for name, module in ((MODULE, helpers), ("torch", torch)):
        monkeypatch.setitem(sys.modules, name, module)
    for parent in ("lerobot", "lerobot.async_inference"):
        if parent not in sys.modules:
            monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))


def setup_of(model: str = "toy-model", **changes: Any) -> bytes:
    said = {"lerobot_features": FEATURES, "actions_per_chunk": 4, **changes}
    return pickle.dumps(RemotePolicyConfig("act", model, **said), protocol=4)


def seen(timestep: int = 0, image: int = 0, **changes: Any) -> bytes:
    observation = {**dict.fromkeys(MOTORS, 1.0), "top": np.full((8, 8, 3), image, np.uint8), "task": "push", **changes}
    return pickle.dumps(TimedObservation(100.0, timestep, observation), protocol=4)


class Robot:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel

    async def call(self, method: str, message: Any = None, reply: Any = pb.Empty) -> Any:
        call = self.channel.unary_unary(f"/transport.AsyncInference/{method}")
        return reply.FromString(await call((message or pb.Empty()).SerializeToString(), timeout=20))

    async def begin(self, setup: bytes | None = None) -> None:
        await self.call("Ready")
        await self.call("SendPolicyInstructions", pb.PolicySetup(data=setup or setup_of()))

    async def send(self, data: bytes, pieces: int = 1) -> None:
        call = self.channel.stream_unary("/transport.AsyncInference/SendObservations")
        size = -(-len(data) // pieces)
        states = [pb.TRANSFER_BEGIN, *[pb.TRANSFER_MIDDLE] * (pieces - 2), pb.TRANSFER_END][-pieces:]
        sent = [
            pb.Observation(transfer_state=state, data=data[i * size : (i + 1) * size]).SerializeToString()
            for i, state in enumerate(states)
        ]
        await call(iter(sent), timeout=20)

    async def fetch(self) -> list[Any]:
        """The next chunk, asked for as often as their client would."""
        for _ in range(10):
            data = (await self.call("GetActions", reply=pb.Actions)).data
            if data:
                return list(pickle.loads(data))
        raise AssertionError("no chunk came")


@pytest.fixture
async def address(server: Server) -> str:
    config = LerobotEndpoint(port=0, models={"toy-model": "toy"}, keys=KEYS)
    endpoint = await lerobot.start(config, server.service)
    server.endpoints.append(endpoint)
    return endpoint.address


@asynccontextmanager
async def robot(address: str) -> AsyncIterator[Robot]:
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield Robot(channel)


async def test_ready_setup_observation_actions(address: str, core: ToyCore) -> None:
    async with robot(address) as arm:
        await arm.begin(setup_of(actions_per_chunk=3))
        await arm.send(seen())
        chunk = await arm.fetch()
        assert [action.timestep for action in chunk] == [1, 2, 3]
        assert [action.timestamp for action in chunk] == pytest.approx([100.0, 100.1, 100.2])
        assert core.requests[0].arrays["agent_pos"].shape == (2, 2)
        (live,) = core.live.values()
        assert live.info.epoch == 2, "its task came with the first observation"


@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
async def test_an_observation_comes_in_pieces(address: str, core: ToyCore, pieces: int) -> None:
    async with robot(address) as arm:
        await arm.begin()
        await arm.send(seen(image=9), pieces)
        assert len(await arm.fetch()) == 4
        assert core.requests[0].arrays["image"].max() == 9


async def test_two_robots_on_one_server_get_their_own_actions(address: str, core: ToyCore) -> None:
    async with robot(address) as one, robot(address) as other:
        await one.begin()
        await other.begin()
        seeds = {}
        for arm in (one, other):
            await arm.send(seen())
            seeds[arm] = float((await arm.fetch())[0].action[0])
        assert len(core.live) == 2
        for step in (1, 2):
            for arm in (one, other):
                await arm.send(seen(step))
                assert float((await arm.fetch())[0].action[0]) == seeds[arm] + step


async def test_after_a_failed_inference_the_next_observation_is_answered(address: str, core: ToyCore) -> None:
    async with robot(address) as arm:
        await arm.begin()
        (live,) = core.live.values()
        live.options = {"crash_at": 1}
        await arm.send(seen())
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await arm.fetch()
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert SECRET not in (refused.value.details() or "")
        live.options = {}
        await arm.send(seen())
        assert len(await arm.fetch()) == 4


async def test_observations_that_look_alike_are_all_computed(address: str, core: ToyCore) -> None:
    async with robot(address) as arm:
        await arm.begin()
        for _ in range(4):
            await arm.send(seen())
            await arm.fetch()
        assert core.computed == 4


async def test_of_observations_that_wait_the_newest_is_computed(address: str, core: ToyCore) -> None:
    async with robot(address) as arm:
        await arm.begin()
        core.gate.clear()
        await arm.send(seen(0))
        await asyncio.wait_for(core.entered.wait(), 10)
        for step in (1, 2, 3):
            await arm.send(seen(step))
        core.gate.set()
        assert (await arm.fetch())[0].timestep in (1, 4)
        async with asyncio.timeout(10):
            while core.computed < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert [request.step for request in core.requests] == [0, 3]


async def test_no_actions_is_an_empty_answer_after_a_wait(
    address: str, core: ToyCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lerobot, "WAIT_S", 0.05)
    async with robot(address) as arm:
        await arm.begin()
        assert (await arm.call("GetActions", reply=pb.Actions)).data == b""


async def test_ready_forgets_what_the_connection_did_before(address: str, core: ToyCore) -> None:
    async with robot(address) as arm:
        await arm.begin()
        await arm.send(seen())
        first = await arm.fetch()
        await arm.send(seen(5))
        await arm.begin()
        assert len(core.live) == 1
        await arm.send(seen())
        chunk = await arm.fetch()
        assert [action.timestep for action in chunk] == [action.timestep for action in first]


async def test_a_robot_that_is_gone_leaves_no_session(server: Server, address: str, core: ToyCore) -> None:
    server.service.limits = type(server.service.limits)(grace_s=0.05)
    async with robot(address) as arm:
        await arm.begin()
        assert len(core.live) == 1
    async with asyncio.timeout(10):
        while core.live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_connection_that_was_lost_is_told_so(address: str, core: ToyCore) -> None:
    async with robot(address) as arm:
        for call in (arm.fetch(), arm.send(seen())):
            with pytest.raises(grpc.aio.AioRpcError, match="no session") as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("setup", "code", "says"),
    [
        (lambda: setup_of("/etc/passwd"), "NOT_FOUND", "on this server's list"),
        (lambda: setup_of("toy-modle"), "NOT_FOUND", "Did you mean 'toy-model'"),
        (lambda: setup_of(actions_per_chunk=0), "INVALID_ARGUMENT", "actions_per_chunk"),
        (lambda: setup_of(lerobot_features={}), "INVALID_ARGUMENT", "missing observation keys"),
        (
            lambda: setup_of(lerobot_features={"observation.images.tp": FEATURES["observation.images.top"]}),
            "INVALID_ARGUMENT",
            "Did you mean 'observation.images.top'",
        ),
        (lambda: pickle.dumps(print, protocol=4), "INVALID_ARGUMENT", "builtins.print"),
        (lambda: b"nonsense", "INVALID_ARGUMENT", "no pickle"),
    ],
)
async def test_a_setup_that_does_not_fit_is_refused_before_the_robot_moves(
    address: str, core: ToyCore, setup: Callable[[], bytes], code: str, says: str
) -> None:
    async with robot(address) as arm:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await arm.begin(setup())
        assert refused.value.code().name == code
        assert says in (refused.value.details() or "")
        assert not core.live


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"a": float("nan")}, "not finite"),
        ({"top": np.zeros((9, 8, 3), np.uint8)}, "[9,8,3]"),
        ({"top": np.full((8, 8, 3), 255.0)}, "float64"),
        ({"a": "x"}, "'a' is a str"),
        ({"e": 1.0}, "more than was said: 'e'"),
        ({"task": 3}, "task must be text"),
    ],
)
async def test_a_bad_observation_is_an_error_and_the_next_is_answered(
    address: str, core: ToyCore, change: dict[str, Any], says: str
) -> None:
    async with robot(address) as arm:
        await arm.begin()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await arm.send(seen(**change))
        assert says in (refused.value.details() or "")
        assert core.computed == 0
        await arm.send(seen())
        assert len(await arm.fetch()) == 4


@pytest.mark.parametrize("late", [0, 1, 3])
async def test_the_clients_seams_neither_skip_nor_repeat_a_step(address: str, core: ToyCore, late: int) -> None:
    """Their client drops actions labelled up to the last executed one. The toy's actions, taken as positions relative
    to the observation, must go on by one a step, however late a chunk is."""
    async with robot(address) as arm:
        await arm.begin(setup_of(actions_per_chunk=4))
        latest, position = 0, 0
        executed = []
        for _ in range(5):
            observed, start = latest, position
            await arm.send(seen(observed))
            queue = {a.timestep: start + (i + 1) for i, a in enumerate(await arm.fetch())}
            for _ in range(late if executed else 0):  # the old chunk went on meanwhile
                latest, position = latest + 1, position + 1
                executed.append(position)
            for label in sorted(queue):
                if label > latest:
                    latest, position = label, queue[label]
                    executed.append(position)
        assert executed == list(range(1, len(executed) + 1))


async def test_a_list_of_models_that_cannot_be_served_is_refused(server: Server) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'toy'"):
        await lerobot.start(LerobotEndpoint(port=0, models={"m": "toi"}), server.service)
    with pytest.raises(ConfigError, match="no pipeline"):
        await lerobot.start(LerobotEndpoint(port=0, models={"m": "toy"}, keys={"observation.x": "y"}), server.service)


def test_actions_are_read_back_as_their_client_does() -> None:
    rows = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
    data = actions.pickled(rows, 3.0, 5, 0.1)
    assert len(data) < 1 << 18
    chunk = pickle.loads(data)
    assert [type(action).__name__ for action in chunk] == ["TimedAction"] * 200
    np.testing.assert_array_equal(np.stack([action.action for action in chunk]), rows)
    assert chunk[199].timestep == 204
    assert pickles.SETUP == "RemotePolicyConfig"
