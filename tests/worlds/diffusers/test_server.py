"""Both templates behind a real server, over gRPC."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.client import connect
from omni_loop.config import Deployment, PipelineConfig
from omni_loop.errors import InvalidInput
from omni_loop.serve.background import BackgroundServer

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")


def test_observe_predict_recondition_predict(folders: dict[str, Path], images: NDArray[np.uint8]) -> None:
    cosmos = {"checkpoint": str(folders["cosmos25"]), "frames": 13, **tiny.COSMOS}
    wan = {"checkpoint": str(folders["wan22"]), "frames": 9, **tiny.WAN}
    pipelines = (
        PipelineConfig(name="cosmos", template="cosmos", options=cosmos),
        PipelineConfig(name="wan", template="wan", options=wan),
    )
    with BackgroundServer(Deployment(pipelines=pipelines), 280.0) as server, connect(server.address) as client:
        for name in ("cosmos", "wan"):
            with client.open(name, prompt="a cat", seed=3) as session:
                session.recondition({"image": images[:6]}, executed=np.zeros((5, 1), np.float32), first_step=0)
                first = session.predict(steps=3).frames
                assert first is not None
                assert first.first_step == 6
                assert first.frames.shape == (3, tiny.HEIGHT, tiny.WIDTH, 3)
                more = session.predict(np.zeros((2, 1), np.float32)).frames
                assert more is not None
                assert more.first_step == 9
                session.recondition({"image": images[6:8]}, executed=np.zeros((2, 1), np.float32), first_step=6)
                again = session.predict(steps=2).frames
                assert again is not None
                assert again.first_step == 8
                assert (again.frames != first.frames[:2]).any()
                with pytest.raises(InvalidInput, match="9"):
                    session.predict(steps=9)
