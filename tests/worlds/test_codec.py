"""The frame codec's bookkeeping: what is taken apart comes together again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from omni_loop_worlds.codec import CodecConfig, FrameCodec, to_float, to_uint8
from omni_loop_worlds.context.perceive import load_codec
from omni_loop_worlds.scene import KEYPOINTS, pose_points


@pytest.fixture
def codec(small_checkpoints: Path) -> FrameCodec:
    return load_codec(small_checkpoints / "codec")


def test_shapes(codec: FrameCodec) -> None:
    frames = torch.randint(0, 256, (2, 96, 96, 3), dtype=torch.uint8)
    z = codec.encode(to_float(frames))
    assert z.shape == (2, 8, 12, 12)
    assert codec.decode(z).shape == (2, 3, 96, 96)
    assert codec.scene(z).shape == (2, 9, 2)
    tokens = codec.tokens(z)
    assert tokens.shape == (2, codec.config.tokens_per_frame) == (2, 16)
    assert tokens.dtype == torch.int64
    assert tokens.min() >= 0
    assert tokens.max() < codec.config.codes == 1000


def test_values_are_the_inverse_of_tokens(codec: FrameCodec) -> None:
    z = torch.randn(4, 8, 12, 12, generator=torch.Generator().manual_seed(0))
    values, _ = codec.tokenizer.quantise(z)
    back = codec.tokenizer.values(codec.tokenizer.tokens(z))
    assert torch.allclose(back, values.flatten(2).transpose(1, 2), atol=1e-6)


def test_every_code_has_values_of_its_own(codec: FrameCodec) -> None:
    values = codec.tokenizer.values(torch.arange(codec.config.codes))
    assert len({tuple(v) for v in values.tolist()}) == codec.config.codes
    assert values.min() == -1
    assert values.max() == 1


def test_unpatchify_is_the_inverse_of_patchify(codec: FrameCodec) -> None:
    z = torch.arange(2 * 8 * 12 * 12).float().view(2, 8, 12, 12)
    patches = codec.patchify(z)
    assert patches.shape == (2, 16, codec.config.token_dim)
    assert torch.equal(codec.unpatchify(patches), z)
    assert torch.equal(patches[0, 5].view(8, 3, 3), z[0, :, 3:6, 3:6])  # row by row of the 4 x 4 grid


def test_latents_are_normalised_once(codec: FrameCodec) -> None:
    plain = FrameCodec(codec.config)
    plain.load_state_dict(codec.state_dict())
    plain.latent_mean.fill_(0)
    plain.latent_std.fill_(1)
    x = torch.rand(1, 3, 96, 96) * 2 - 1
    with torch.no_grad():
        z = codec.encode(x)
        assert torch.allclose(z * codec.latent_std + codec.latent_mean, plain.encode(x), atol=1e-5)
        assert torch.allclose(codec.decode(z), plain.decode(plain.encode(x)), atol=1e-4)
        assert torch.equal(codec.tokens(z), plain.tokens(plain.encode(x)))


def test_bytes_survive_and_are_clipped_never_wrapped() -> None:
    frames = torch.arange(256, dtype=torch.uint8).view(1, 16, 16, 1).expand(-1, -1, -1, 3)
    assert torch.equal(to_uint8(to_float(frames)), frames)
    x = torch.tensor([-9.0, -1.001, 1.001, 9.0]).view(1, 1, 2, 2).expand(-1, 3, -1, -1)
    assert to_uint8(x)[0, :, :, 0].flatten().tolist() == [0, 0, 255, 255]


def test_frames_can_be_of_other_sizes() -> None:
    codec = FrameCodec(CodecConfig(frame_size=48, width=16, inner=8))
    z = codec.encode(torch.zeros(1, 3, 48, 48))
    assert torch.equal(codec.unpatchify(codec.patchify(z)), z)
    assert codec.config.tokens_per_frame == 4


def test_keypoints_turn_with_the_pose() -> None:
    still, moved = pose_points(torch.zeros(3)), pose_points(torch.tensor([10.0, 20.0, np.pi / 2]))
    assert torch.equal(still, KEYPOINTS)
    turned = torch.stack([-KEYPOINTS[:, 1], KEYPOINTS[:, 0]], 1) + torch.tensor([10.0, 20.0])
    assert torch.allclose(moved, turned, atol=1e-4)
    outline = KEYPOINTS[[0, 1, 2, 6, 4, 5, 7, 3]]  # the T's corners, one after the other
    after = outline.roll(-1, 0)
    area = (outline[:, 0] * after[:, 1] - outline[:, 1] * after[:, 0]).sum().abs() / 2
    assert area == 120 * 30 + 30 * 90  # bar and stem: the outline crosses itself nowhere
