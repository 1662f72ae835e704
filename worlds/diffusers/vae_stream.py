"""The causal decoder of Wan's VAE, one latent frame at a time, with its feature caches in a session's typed state.

Each causal convolution looks at the last two frames of its input, which the decoder takes from a list it is given and
puts back there. Diffusers keeps that list in the module, for one video at a time; here it is the session's, so that
sessions take turns, fork, rewind and are saved like all other state. The lists' tensors are replaced, never changed.

Until the second latent frame the caches are shorter, or say that there is nothing yet. The first one is what a chunk
is conditioned on and shows nothing new, so a tick that decodes it decodes the second, too: what is committed always
is the full form, a tensor of fixed shape for each convolution that keeps one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from omni_loop.stage import StateSpec, StateView, TensorSpec


def cache_specs(vae: Any, latent_height: int, latent_width: int) -> dict[str, StateSpec]:
    """The typed state of one session's caches, from a decoder without memory."""
    with torch.device("meta"):
        stream = Stream(type(vae).from_config(vae.config))
        for _ in range(2):
            stream.decode(torch.empty(1, vae.config.z_dim, 1, latent_height, latent_width))
    dtype = str(vae.dtype).removeprefix("torch.")
    return {_name(i): TensorSpec(tuple(c.shape[1:]), dtype) for i, c in enumerate(stream.features) if c is not None}


class Stream:
    """A video under way. ``count`` latent frames of it have been decoded."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae
        self.features: list[Any] = [None] * vae._cached_conv_counts["decoder"]
        self.count = 0

    def decode(self, latent: Tensor) -> Tensor:
        """The next latent frame ``[1, c, 1, h, w]`` to its frames ``[1, 3, n, H, W]`` in -1..1: one for the first."""
        x = self._vae.post_quant_conv(latent)
        # ``feat_idx`` always: its default is one list that all calls share.
        out = self._vae.decoder(x, feat_cache=self.features, feat_idx=[0], first_chunk=self.count == 0)
        self.count += 1
        if (patch := self._vae.config.patch_size) is not None:
            from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

            out = unpatchify(out, patch_size=patch)
        return out.clamp(-1.0, 1.0)


def restored(vae: Any, state: StateView, names: Sequence[str], count: int) -> Stream:
    """The stream as committed after ``count >= 2`` latent frames."""
    stream = Stream(vae)
    stream.count = count
    for i in range(len(stream.features)):
        if _name(i) in names:
            stream.features[i] = state.tensor(_name(i)).get()[None].to(vae.device)
    return stream


def commit(stream: Stream, state: StateView, names: Sequence[str]) -> None:
    for i, features in enumerate(stream.features):
        if _name(i) in names:
            state.tensor(_name(i)).set(features[0])


def _name(i: int) -> str:
    return f"features.{i}"
