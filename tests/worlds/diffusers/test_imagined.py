"""Imagined envs over a diffusers world: a call predicts a chunk, whatever the pipeline reads actions for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from omni_loop.config import Deployment, PipelineConfig
from omni_loop_worlds.imagined import ImaginedVectorEnv, ServedWorld, Start

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")


def test_sessions_dream_in_chunks(folders: dict[str, Path]) -> None:
    options = {"checkpoint": str(folders["cosmos25"]), "frames": 13, **tiny.COSMOS}
    made = PipelineConfig(name="cosmos", template="cosmos", options=options)
    world = ServedWorld(Deployment(pipelines=(made,)), "cosmos", prompt="a cat").hold()
    try:
        most = world.spec.max_predict
        start = Start({"image": tiny.images(6)}, np.zeros((5, *world.spec.action.shape), np.float32))
        envs = ImaginedVectorEnv(world, lambda seed: start, 2, chunk=most, max_steps=most + 2)
        actions = np.zeros(envs.action_space.shape or (), np.float32)
        assert actions.shape == (2, most, *world.spec.action.shape)
        frames, _ = envs.reset(seed=3)
        assert (frames == start.arrays["image"][-1]).all()
        frames, rewards, _, late, infos = envs.step(actions)
        assert frames.shape == (2, tiny.HEIGHT, tiny.WIDTH, 3)
        assert (frames[0] != frames[1]).any()  # other seeds
        assert infos["frames"][0].shape == (most, tiny.HEIGHT, tiny.WIDTH, 3)
        assert not late.any()
        assert not rewards.any()
        _, _, _, late, infos = envs.step(actions)  # two steps are left
        assert late.all()
        assert infos["step"].tolist() == [most + 2] * 2
        envs.close()
    finally:
        world.release()
