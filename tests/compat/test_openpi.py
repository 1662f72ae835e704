"""openpi's websocket endpoint and its dialects over the toy core."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from omni_loop.endpoints import AccessConfig, QuotaConfig
from omni_loop.errors import ConfigError, ServerUnavailable
from omni_loop.serve.app import Endpoint, Server
from omni_loop.serve.auth import Gate
from omni_loop.serve.compat import msgpack
from omni_loop.testing.toy_core import SECRET, ToyCore
from omni_loop.wire.codec import Limits

from .conftest import Start

LIMITS = Limits()
GOOD = {"image": np.zeros((8, 8, 3), np.uint8), "agent_pos": np.ones((2, 2), np.float32)}


class Robot:
    """A client that says what it gets."""

    def __init__(self, socket: ClientConnection, metadata: dict[str, Any]) -> None:
        self.socket, self.metadata = socket, metadata

    async def ask(self, **message: Any) -> Any:
        await self.socket.send(msgpack.pack(message))
        async with asyncio.timeout(20):
            reply = await self.socket.recv()
        return reply if isinstance(reply, str) else msgpack.unpack(reply, LIMITS)


@asynccontextmanager
async def robot(endpoint: Endpoint, **headers: str) -> AsyncIterator[Robot]:
    async with connect(f"ws://{endpoint.address}/any/path", compression=None, additional_headers=headers) as socket:
        metadata = await socket.recv()
        assert isinstance(metadata, bytes)
        yield Robot(socket, msgpack.unpack(metadata, LIMITS))


async def test_metadata_then_one_answer_to_one_observation(listen: Start) -> None:
    async with robot(await listen(metadata={"robot": "toy arm"})) as client:
        assert client.metadata["robot"] == "toy arm"
        assert (client.metadata["pipeline"], client.metadata["action_horizon"]) == ("toy", 4)
        first, second = await client.ask(**GOOD), await client.ask(**GOOD)
        assert first["actions"].dtype == np.float32
        assert first["actions"].shape == (4, 2)
        assert first["policy_timing"]["infer_ms"] > 0
        assert first["server_timing"].keys() == {"infer_ms"}
        assert second["server_timing"].keys() == {"infer_ms", "prev_total_ms"}
        assert second["actions"][0, 0] == first["actions"][0, 0] + 1, "the session goes on"


async def test_an_error_is_text_and_the_next_call_works(listen: Start) -> None:
    async with robot(await listen()) as client:
        refused = await client.ask(image=GOOD["image"], agent_pos=np.full((2, 2), np.nan, np.float32))
        assert isinstance(refused, str)
        assert "agent_pos" in refused
        assert "not finite" in refused
        for raw in (b"", b"\xc1", "text"):
            await client.socket.send(raw)
            assert isinstance(await client.socket.recv(), str)
        assert isinstance(await client.ask(**GOOD), dict)


async def test_a_failed_inference_is_an_error_once_and_nothing_inside_shows(listen: Start, core: ToyCore) -> None:
    async with robot(await listen()) as client:
        assert isinstance(await client.ask(**GOOD), dict)
        (live,) = core.live.values()
        live.options = {"crash_at": 2}
        refused = await client.ask(**GOOD)
        assert isinstance(refused, str)
        assert SECRET not in refused
        live.options = {}
        assert isinstance(await client.ask(**GOOD), dict)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"imag": GOOD["image"], "agent_pos": GOOD["agent_pos"]}, ("'image'", "'imag'", "Did you mean 'image'")),
        ({"observation.image": GOOD["image"], "agent_pos": GOOD["agent_pos"]}, ("Did you mean 'image'",)),
        ({"image": GOOD["image"]}, ("missing observation keys: 'agent_pos'",)),
        ({**GOOD, "wrist": GOOD["image"]}, ("unknown observation keys: 'wrist'",)),
        ({**GOOD, "image": np.zeros((9, 8, 3), np.uint8)}, ("[9,8,3]", "[8,8,3]")),
        ({**GOOD, "image": np.full((8, 8, 3), 255.0, np.float32)}, ("float32", "uint8")),
        ({**GOOD, "agent_pos": np.array("x")}, ("<U1",)),
    ],
)
async def test_missing_and_extra_keys_are_named_before_the_robot_moves(
    listen: Start, core: ToyCore, message: dict[str, Any], says: tuple[str, ...]
) -> None:
    async with robot(await listen()) as client:
        if any(isinstance(v, np.ndarray) and v.dtype.kind == "U" for v in message.values()):
            message = {**message, "agent_pos": "x"}
            says = ("'agent_pos' is a str",)
        refused = await client.ask(**message)
        assert isinstance(refused, str)
        for part in says:
            assert part in refused
        assert core.computed == 0
        assert not core.live


async def test_keys_are_mapped_and_nested_maps_are_flat(listen: Start) -> None:
    endpoint = await listen(keys={"images/top": "image", "state": "agent_pos"})
    async with robot(endpoint) as client:
        reply = await client.ask(images={"top": GOOD["image"]}, state=GOOD["agent_pos"].astype(np.float64))
        assert isinstance(reply, dict)
        assert "'images/top'" in await client.ask(state=GOOD["agent_pos"])


async def test_each_connection_is_a_session_of_its_own_that_ends_with_it(listen: Start, core: ToyCore) -> None:
    endpoint = await listen()
    async with robot(endpoint) as one, robot(endpoint) as other:
        a, b = await one.ask(**GOOD), await other.ask(**GOOD)
        assert len(core.live) == 2
        again = await one.ask(**GOOD)
        assert again["actions"][0, 0] == a["actions"][0, 0] + 1
        assert (await other.ask(**GOOD))["actions"][0, 0] == b["actions"][0, 0] + 1
    async with asyncio.timeout(10):
        while core.live:  # noqa: ASYNC110  the toy core has no event for it
            await asyncio.sleep(0.01)


async def test_a_session_name_that_two_clients_choose_does_not_mix_their_states(listen: Start, core: ToyCore) -> None:
    endpoint = await listen(dialect="realtime")
    async with robot(endpoint) as one, robot(endpoint) as other:
        for client, seed in ((one, 100), (other, 200)):
            reply = await client.ask(**GOOD, session_id="default", seed=seed)
            assert reply["actions"][0, 0] == seed + 1
        assert (await one.ask(**GOOD, session_id="default"))["actions"][0, 0] == 102
        assert (await one.ask(**GOOD, session_id="second", seed=300))["actions"][0, 0] == 301
        assert len(core.live) == 3


async def test_another_prompt_begins_anew(listen: Start, core: ToyCore) -> None:
    async with robot(await listen()) as client:
        first = await client.ask(**GOOD, prompt="push")
        await client.ask(**GOOD, prompt="push")
        anew = await client.ask(**GOOD, prompt="lift")
        assert anew["actions"][0, 0] == first["actions"][0, 0]
        assert [request.step for request in core.requests] == [0, 2, 0]


async def test_roboarena_has_a_bare_array_and_a_text_after_reset(listen: Start, core: ToyCore) -> None:
    async with robot(await listen(dialect="roboarena", metadata={"action_space": "joint_velocity"})) as client:
        wanted = {"image_resolution", "needs_wrist_camera", "n_external_cameras", "needs_stereo_camera"}
        assert wanted | {"needs_session_id", "action_space"} <= client.metadata.keys()
        assert client.metadata["image_resolution"] == [8, 8]
        assert client.metadata["action_space"] == "joint_velocity"
        first = await client.ask(**GOOD, endpoint="infer", session_id="a")
        assert isinstance(first, np.ndarray)
        assert await client.ask(endpoint="reset", session_id="a") == "reset successful"
        np.testing.assert_array_equal((await client.ask(**GOOD, endpoint="infer", session_id="a"))[:, 0], first[:, 0])
        (live,) = core.live.values()
        assert live.info.epoch == 2
        assert "Did you mean 'infer'" in await client.ask(**GOOD, endpoint="infr")


async def test_realtime_resets_with_a_status_and_takes_a_seed(listen: Start, core: ToyCore) -> None:
    async with robot(await listen(dialect="realtime")) as client:
        first = await client.ask(**GOOD, seed=7, sampling_params={"num_inference_steps": 3})
        assert first["actions"][0, 0] == 8
        (live,) = core.live.values()
        assert live.options == {"inference_steps": 3}
        assert (await client.ask(endpoint="reset", seed=9)).keys() == {"status"}
        assert (await client.ask(**GOOD))["actions"][0, 0] == 10
        assert "temperature" in await client.ask(**GOOD, sampling_params={"temperature": 1})
        assert "'seed' is a str" in await client.ask(**GOOD, seed="x")


async def test_health_is_answered_while_an_inference_runs(listen: Start, core: ToyCore) -> None:
    endpoint = await listen()
    core.gate.clear()
    async with robot(endpoint) as client, httpx.AsyncClient() as http:
        asking = asyncio.create_task(client.ask(**GOOD))
        await asyncio.wait_for(core.entered.wait(), 10)
        reply = await http.get(f"http://{endpoint.address}/healthz")
        assert (reply.status_code, reply.text) == (200, "OK\n")
        pong = await client.socket.ping()
        await asyncio.wait_for(pong, 10)
        async with robot(endpoint) as other:
            assert other.metadata["pipeline"] == "toy"
        assert not asking.done()
        core.gate.set()
        assert isinstance(await asking, dict)


async def test_an_inference_ends_with_the_connection_that_asked(listen: Start, core: ToyCore) -> None:
    endpoint = await listen()
    core.gate.clear()
    async with robot(endpoint) as client:
        await client.socket.send(msgpack.pack(GOOD))
        await asyncio.wait_for(core.entered.wait(), 10)
    async with asyncio.timeout(10):
        while core.live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert core.computed == 0


async def test_an_answer_that_is_made_still_leaves_when_the_server_stops(listen: Start, core: ToyCore) -> None:
    endpoint = await listen()
    core.gate.clear()
    async with robot(endpoint) as busy, robot(endpoint) as idle:
        asking = asyncio.create_task(busy.ask(**GOOD))
        await asyncio.wait_for(core.entered.wait(), 10)
        stopping = asyncio.create_task(endpoint.stop(10))
        with pytest.raises(ConnectionClosed) as closed:
            await asyncio.wait_for(idle.socket.recv(), 10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1001
        core.gate.set()
        assert isinstance(await asking, dict)
        await asyncio.wait_for(stopping, 10)


async def test_a_session_that_ended_by_itself_is_said_once(listen: Start, core: ToyCore) -> None:
    async with robot(await listen()) as client:
        await client.ask(**GOOD)
        core.live.clear()
        refused = await client.ask(**GOOD)
        assert isinstance(refused, str)
        assert "has ended" in refused
        assert isinstance(await client.ask(**GOOD), dict)


async def test_a_message_above_the_limit_ends_the_connection(listen: Start) -> None:
    async with robot(await listen()) as client:
        with pytest.raises(ConnectionClosed) as closed:
            await client.ask(image=np.zeros((1 << 20) + 1, np.uint8))
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1009


async def test_keys_of_both_spellings_are_taken_and_others_refused(listen: Start, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("arm 0123456789abcdef0123456789abcdef\n")
    tokens.chmod(0o600)
    gate = Gate(AccessConfig(tokens=str(tokens), quota=QuotaConfig(streams=1)))
    endpoint = await listen(gate)
    for header in ("Api-Key 0123456789abcdef0123456789abcdef", "Bearer 0123456789abcdef0123456789abcdef"):
        async with robot(endpoint, Authorization=header) as client:
            assert isinstance(await client.ask(**GOOD), dict)
            with pytest.raises(ConnectionClosed) as closed:  # its quota
                async with robot(endpoint, Authorization=header):
                    pass
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1013
    for headers in ({}, {"Authorization": "Api-Key nonsense"}):
        with pytest.raises(InvalidStatus) as refused:
            async with robot(endpoint, **headers):
                pass
        assert refused.value.response.status_code == 401
    async with httpx.AsyncClient() as http:
        assert (await http.get(f"http://{endpoint.address}/healthz")).status_code == 200


async def test_what_cannot_be_served_is_refused_at_the_start(listen: Start, server: Server) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'image'"):
        await listen(keys={"x": "imag"})
    endpoint = await listen()
    with pytest.raises(ServerUnavailable, match="busy"):
        await listen(port=int(endpoint.address.rsplit(":", 1)[1]))
