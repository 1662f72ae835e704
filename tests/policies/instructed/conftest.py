"""Instructed policies that are small and random, as checkpoints: how they compute is not meaningless."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omni_loop.training.checkpoint import save
from omni_loop_policies.instructed.eye import EyeConfig
from omni_loop_policies.instructed.model import HeadConfig, Instructed, InstructedConfig
from omni_loop_policies.instructed.samples import vocabulary
from omni_loop_policies.instructed.text import TextConfig

TEXT = TextConfig(words=vocabulary(), layers=2, head_dim=16, feed_forward=32)
EYE = EyeConfig(channels=(8, 8, 8, 8), points=4, out=8)
HEADS = {
    "metaworld": HeadConfig(width=32, condition=32, blocks=2, steps=3),
    "metaworld-pixels": HeadConfig(features=4, width=32, condition=32, blocks=2, steps=3, eye=EYE),
}


@pytest.fixture(scope="session")
def instructed_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints ``metaworld`` and ``metaworld-pixels``."""
    folder = tmp_path_factory.mktemp("instructed")
    generator = torch.Generator().manual_seed(0)
    for name, head in HEADS.items():
        config = InstructedConfig(text=TEXT, head=head)
        model = Instructed(config)
        with torch.no_grad():
            for p in model.parameters():  # also what is zero before training, and lets nothing through
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
            model.action_spread.fill_(0.3)
        save(folder / name, config.model_dump(mode="json"), model.state_dict(), {}, "small and random\n")
    return folder
