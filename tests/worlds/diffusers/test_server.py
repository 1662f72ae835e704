"""Both templates behind a real server, over gRPC."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.client import connect
from omni_loop.config import Deployment, Listen, PipelineConfig
from omni_loop.errors import InvalidInput
from omni_loop.serve.app import Server
from omni_loop.types import FramePrediction
from omni_loop_worlds.imagined import ImaginedVectorEnv, ServedWorld, Start

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")


@pytest.fixture(scope="module")
def address(folders: dict[str, Path]) -> Iterator[str]:
    """A server on a thread of this process: another process would take longer to import diffusers than all tests."""
    cosmos = {"checkpoint": str(folders["cosmos25"]), "frames": 13, **tiny.COSMOS}
    wan = {"checkpoint": str(folders["wan22"]), "frames": 9, **tiny.WAN}
    pipelines = (
        PipelineConfig(name="cosmos", template="cosmos", options=cosmos),
        PipelineConfig(name="wan", template="wan", options=wan),
    )
    server = Server(Deployment(pipelines=pipelines, listen=Listen(port=0)))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(server.start(), loop).result(100)
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(100)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_observe_predict_recondition_predict(address: str, images: NDArray[np.uint8]) -> None:
    with connect(address) as client:
        for name in ("cosmos", "wan"):
            with client.open(name, prompt="a cat", seed=3) as session:
                session.recondition({"image": images[:6]}, executed=np.zeros((5, 1), np.float32), first_step=0)
                parts: list[FramePrediction] = []
                first = session.predict(steps=5, on_part=parts.append).frames
                assert first is not None
                if name == "wan":  # latent frame by latent frame
                    assert [(part.first_step, part.preview) for part in parts] == [(6, False)]
                    assert (parts[0].frames == first.frames[:4]).all()
                assert first.first_step == 6
                assert first.frames.shape == (5, tiny.HEIGHT, tiny.WIDTH, 3)
                more = session.predict(np.zeros((2, 1), np.float32)).frames
                assert more is not None
                assert more.first_step == 11
                session.recondition({"image": images[6:8]}, executed=np.zeros((2, 1), np.float32), first_step=6)
                again = session.predict(steps=2).frames
                assert again is not None
                assert again.first_step == 8
                assert (again.frames != first.frames[:2]).any()
                with pytest.raises(InvalidInput, match="9"):
                    session.predict(steps=9)


@pytest.mark.parametrize("name", ["cosmos", "wan"])
def test_sessions_dream_in_chunks(address: str, name: str) -> None:
    world = ServedWorld(address, name, prompt="a cat")
    begin = Start({"image": tiny.images(6)}, np.zeros((5, 1), np.float32))
    envs = ImaginedVectorEnv(world, lambda seed: begin, 2, chunk=4, max_steps=6)
    try:
        assert (envs.reset(seed=3)[0] == begin.arrays["image"][-1]).all()
        frames, _, _, late, infos = envs.step(np.zeros((2, 4, 1), np.float32))
        assert frames.shape == (2, tiny.HEIGHT, tiny.WIDTH, 3)
        assert (frames[0] != frames[1]).any()  # of other seeds
        assert [len(made) for made in infos["frames"]] == [4, 4]
        assert not late.any()
        _, _, _, late, infos = envs.step(np.zeros((2, 4, 1), np.float32))  # two steps are left
        assert late.all()
        assert infos["step"].tolist() == [6, 6]
    finally:
        envs.close()
