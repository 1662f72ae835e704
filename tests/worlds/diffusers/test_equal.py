"""A chunk of a stage is what the pipeline's own ``__call__`` computes, given the same frames, prompt and generator."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_loop.stage import Stage
from omni_loop.testing.stage_driver import Driver
from omni_loop_worlds.diffusers.stage import to_uint8

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")
PROMPT = "a cat"


class _NoGuard:
    """Lets everything pass, for the pipelines, which insist on one."""

    def to(self, device: Any) -> None: ...

    def check_text_safety(self, prompt: str) -> bool:
        return True


def predicted(driver: Driver, seen: NDArray[np.uint8], n: int) -> tuple[NDArray[np.int16], torch.Tensor, Any]:
    """``n`` frames after ``seen``, the latents they were decoded from, and the generator these were drawn with."""
    driver.tick("s", 0, tiny.see(0, seen, 2))
    stage: Any = driver.stage
    item = driver.items(1, {"s": tiny.ahead(len(seen) - 1, np.zeros((n, 2), np.float32))})["s"]
    job, latents = stage.begin(item), torch.empty(0)
    while not job.finished:
        assert stage.advance([job]) == [None]
        latents = latents if job.chunk is None else job.chunk.latents
    made = tiny.frames(stage.finish(job))
    driver.commit("s", 1)
    return made, latents, torch.Generator().manual_seed(item.noise_seed("frames"))


def pictures(seen: NDArray[np.uint8]) -> list[Any]:
    from PIL import Image

    return [Image.fromarray(frame) for frame in seen]


@pytest.mark.parametrize(
    ("driver", "seen"),
    [*itertools.product(["cosmos2", "cosmos25"], [1, 5, 9]), ("cosmos2-half", 5), ("cosmos25-half", 5)],
    indirect=["driver"],
)
def test_cosmos(driver: Driver, images: NDArray[np.uint8], seen: int) -> None:
    stage: Any = driver.stage
    got, made, generator = predicted(driver, images[:seen], 8)
    known = 1 if seen < 5 else 5
    given = {
        "prompt": PROMPT, "negative_prompt": "bad", "height": tiny.HEIGHT, "width": tiny.WIDTH, "num_frames": 13,
        "num_inference_steps": 2, "guidance_scale": 7.0, "max_sequence_length": 160, "generator": generator,
        "output_type": "latent",
    }  # fmt: skip
    shown = pictures(images[:seen][-known:])
    if type(stage.pipe).__name__.startswith("Cosmos2_5") and known == 1:
        given["image"] = shown[0]
    else:
        given["video"] = shown
    stage.pipe.safety_checker = _NoGuard()
    stage.pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        latents = stage.pipe(**given).frames
        video = stage.pipe.vae.decode(stage._unscaled(latents).to(stage.pipe.vae.dtype)).sample[0].unbind(1)
    want = to_uint8(torch.stack(video[known : known + 8])).numpy()
    assert torch.equal(made, latents)
    assert (got == want).all()
    assert (want[0] != want[1]).any()


@pytest.mark.parametrize("driver", ["wan21", "wan22", "wan22-half", "wan5b"], indirect=True)
def test_wan(driver: Driver, images: NDArray[np.uint8]) -> None:
    stage: Any = driver.stage
    got, made, generator = predicted(driver, images[:2], 8)
    stage.pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        latents = stage.pipe(
            image=pictures(images[1:2])[0],
            prompt_embeds=stage.prompts(PROMPT),
            negative_prompt_embeds=stage.prompts("bad"),
            height=tiny.HEIGHT,
            width=tiny.WIDTH,
            num_frames=9,
            num_inference_steps=2,
            guidance_scale=5.0,
            generator=generator,
            output_type="latent",
        ).frames
        config = stage.pipe.vae.config
        dtype = stage.pipe.vae.dtype
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1).to(dtype) for v in (config.latents_mean, config.latents_std))
        video = stage.pipe.vae.decode(latents.to(dtype) / (1.0 / std) + mean).sample[0].unbind(1)
    want = to_uint8(torch.stack(video[1:])).numpy()
    # With time for each token, the pipeline also puts the known first frame back into what it returns.
    assert torch.equal(made[:, :, 1:], latents[:, :, 1:])
    assert stage.pipe.config.expand_timesteps or torch.equal(made, latents)
    # A latent frame at a time, or all at once: the same convolutions of other shapes.
    assert np.abs(got - want).max() <= 1
    assert (got != want).mean() < 1e-3
    assert (want[0] != want[1]).any()


def test_wan_embeds_prompts_as_the_pipeline(stages: dict[str, Stage], monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.pipelines.wan import pipeline_wan_i2v

    stage: Any = stages["wan22"]
    # Plain text is what ftfy leaves as it is.
    monkeypatch.setattr(pipeline_wan_i2v, "ftfy", SimpleNamespace(fix_text=str), raising=False)
    for prompt in ("", "a  cat &amp; a dog\n", 40 * "long "):
        with torch.no_grad():
            want = stage.pipe._get_t5_prompt_embeds(prompt, max_sequence_length=160)
            assert torch.equal(stage.prompts(prompt), want)
