"""What is particular to these stages: steps shared, caches, prompts, frames between chunks, guardrail."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_loop.errors import InvalidInput, MissingExtra, StageFailed
from omni_loop.stage import Stage, TensorSpec
from omni_loop.testing.stage_driver import Driver
from omni_loop_worlds.diffusers.prompts import Prompts, cleaned
from omni_loop_worlds.diffusers.vae_stream import Stream

from . import tiny

pytest.importorskip("transformers")
pytest.importorskip("torchvision")
BOTH = pytest.mark.parametrize("driver", ["cosmos25", "wan22"], indirect=True)


def still(n: int) -> NDArray[np.float32]:
    return np.zeros((n, 2), np.float32)


@pytest.mark.parametrize("driver", ["cosmos2", "cosmos25", "wan21"], indirect=True)
def test_sessions_at_different_steps_share_a_pass(driver: Driver, images: NDArray[np.uint8]) -> None:
    """And come to what they come to alone."""
    stage: Any = driver.stage
    asks = {}
    for session, n in (("s", 5), ("late", 6)):
        if session != "s":
            driver.open(session, seed=6, prompt="a dog")
        driver.tick(session, 0, tiny.see(0, images[:n], 2))
        asks[session] = tiny.ahead(n - 1, still(8))
    alone = {session: tiny.frames(driver.run(session, 1, ask)) for session, ask in asks.items()}
    for session in asks:
        driver.discard(session, 1)
    items, sizes = driver.items(1, asks), []
    model = stage.pipe.transformer
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: sizes.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    first = stage.begin(items["s"])
    stage.advance([first])  # encoded
    jobs = [first, stage.begin(items["late"])]
    while going := [job for job in jobs if not job.finished]:
        assert stage.advance(going) == [None] * len(going)
    hook.remove()
    assert 2 in sizes
    assert 1 in sizes  # the one that came first began alone
    for job, session in zip(jobs, asks, strict=True):
        assert np.abs(tiny.frames(stage.finish(job)) - alone[session]).max() <= 1
        driver.discard(session, 1)


@BOTH
def test_a_job_of_bad_values_fails_alone(driver: Driver, images: NDArray[np.uint8]) -> None:
    stage: Any = driver.stage
    driver.open("bad", seed=6)
    asks = {}
    for session in ("s", "bad"):
        driver.tick(session, 0, tiny.see(0, images[:5], 2))
        asks[session] = tiny.ahead(4, still(4))
    alone = tiny.frames(driver.run("s", 1, asks["s"]))
    driver.discard("s", 1)
    kept = stage.encode

    def poisoned(job: Any) -> Any:
        chunk = kept(job)
        if job.item.session == "bad":
            chunk.latents = chunk.latents * float("nan")
        return chunk

    stage.encode = poisoned
    try:
        results = driver.together(1, asks)
    finally:
        del stage.encode
    assert isinstance(results["bad"], StageFailed)
    assert not isinstance(results["s"], Exception)
    assert np.abs(tiny.frames(results["s"]) - alone).max() <= 1
    driver.discard("s", 1)
    tiny.frames(driver.tick("bad", 1, asks["bad"]))  # and the session goes on


@BOTH
def test_no_frame_is_shown_twice(driver: Driver, images: NDArray[np.uint8]) -> None:
    """What a chunk is conditioned on is made again inside it, and is not shown."""
    driver.tick("s", 0, tiny.see(0, images[:5], 2))
    made = [tiny.frames(driver.tick("s", 1 + i, tiny.ahead(4 + 8 * i, still(8)))) for i in range(3)]
    shown = np.concatenate([images[4:5].astype(np.int16), *made])
    assert len(shown) == 25
    for one, other in itertools.pairwise(shown):
        assert (one != other).any()


def test_wan_shows_a_chunk_in_any_portions(stages: dict[str, Stage], images: NDArray[np.uint8]) -> None:
    driver = Driver(stages["wan22"])
    shown = {}
    for session, portions in {"whole": (8, 4), "parts": (1, 2, 3, 2, 4), "odd": (3, 5, 4)}.items():
        driver.open(session, seed=5)
        driver.tick(session, 0, tiny.see(0, images[:1], 2))
        made, at = [], 0
        for n in portions:
            # The second chunk is drawn in a tick of its own, which must be the same one.
            tick = 1 + at if at < 8 else 9
            made.append(tiny.frames(driver.tick(session, tick, tiny.ahead(at, still(n)))))
            at += n
        shown[session] = np.concatenate(made)
    driver.close()
    assert (shown["whole"] == shown["parts"]).all()
    assert (shown["whole"] == shown["odd"]).all()


@pytest.mark.parametrize("name", ["wan22", "wan5b"])
def test_the_decoders_caches_are_declared(stages: dict[str, Stage], name: str) -> None:
    """Streams that take turns decode what the whole decodes; a copied list is a fork; shapes are those declared."""
    stage: Any = stages[name]
    vae, latents = stage.pipe.vae, torch.randn(2, 4, 4, 1, *stage._size)
    with torch.no_grad():
        streams, made = [Stream(vae), Stream(vae)], ([], [])
        for t in range(3):
            for stream, z, frames in zip(streams, latents[:, t : t + 1], made, strict=True):
                frames.append(stream.decode(z))
        fork = Stream(vae)
        fork.features, fork.count = list(streams[0].features), 3
        last = streams[0].decode(latents[0, 3:])
        assert torch.equal(fork.decode(latents[0, 3:]), last)
        whole = vae.decode(latents[0, :3].permute(3 - 1, 1, 0, 3, 4).contiguous()).sample
        assert torch.allclose(torch.cat(made[0], 2), whole, atol=1e-5)
    declared = {key: spec for key, spec in stage.state_specs().items() if key.startswith("features.")}
    kept = {f"features.{i}": tuple(f.shape[1:]) for i, f in enumerate(streams[0].features) if f is not None}
    assert {key: spec.shape for key, spec in declared.items() if isinstance(spec, TensorSpec)} == kept
    assert len(kept) > 5


def test_embeddings_are_kept_and_bounded() -> None:
    asked = []

    def embed(prompt: str) -> torch.Tensor:
        asked.append(prompt)
        return torch.tensor([[[float(len(prompt))]]])

    prompts = Prompts(embed, 2)
    for prompt in ("a", "bb", "a", "ccc", "a", "bb"):
        assert prompts(prompt).item() == len(prompt)
    assert asked == ["a", "bb", "ccc", "bb"]
    assert len(prompts) == 2


def test_plain_prompts_need_no_ftfy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ftfy", None)
    assert cleaned("  pick &amp;amp; place\n the  cup ") == "pick & place the cup"
    with pytest.raises(MissingExtra, match="ftfy"):
        cleaned("caf\u00e9")


@BOTH
def test_a_prompt_changes_what_is_shown(driver: Driver, images: NDArray[np.uint8]) -> None:
    stage: Any = driver.stage
    driver.open("other", seed=5, prompt="zzzzzzzz")
    latents = {}
    for session in ("s", "other"):
        driver.tick(session, 0, tiny.see(0, images[:5], 2))
        job = stage.begin(driver.items(1, {session: tiny.ahead(4, still(8))})[session])
        while job.chunk is None or not job.chunk.done:
            stage.advance([job])
        latents[session] = job.chunk.latents
        driver.discard(session, 1)
    assert (latents["s"] - latents["other"]).abs().max() > 1e-4


class _Checker:
    """Stands where NVIDIA's would: refuses a word, and darkens what is shown."""

    def to(self, device: str) -> _Checker:
        return self

    def check_text_safety(self, prompt: str) -> bool:
        return "bomb" not in prompt

    def check_video_safety(self, frames: NDArray[np.uint8]) -> NDArray[np.uint8] | None:
        return None if len(frames) == 3 else frames // 2


def test_the_guardrail_stands_between_model_and_client(
    folders: dict[str, Path], stages: dict[str, Stage], images: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    from omni_loop_worlds.diffusers.cosmos import CosmosStage

    options = {**tiny.COSMOS, "guardrail": True, "frames": 13, "action_dim": 2}
    monkeypatch.setitem(sys.modules, "cosmos_guardrail", None)
    with pytest.raises(MissingExtra, match="cosmos_guardrail"):
        CosmosStage(str(folders["cosmos25"]), **options)
    module = ModuleType("cosmos_guardrail")
    module.CosmosSafetyChecker = _Checker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cosmos_guardrail", module)
    guarded, plain = Driver(CosmosStage(str(folders["cosmos25"]), **options)), Driver(stages["cosmos25"])
    shown = []
    for driver in (guarded, plain):
        driver.open("s", seed=5, prompt="a cat")
        driver.tick("s", 0, tiny.see(0, images[:5], 2))
        shown.append(tiny.frames(driver.tick("s", 1, tiny.ahead(4, still(4)))))
    assert np.abs(shown[0] - shown[1] // 2).max() <= 1
    with pytest.raises(StageFailed, match="guardrail"):
        guarded.run("s", 2, tiny.ahead(8, still(3)))
    guarded.open("bad", seed=5, prompt="a bomb")
    guarded.tick("bad", 0, tiny.see(0, images[:5], 2))
    with pytest.raises(InvalidInput, match="guardrail"):
        guarded.run("bad", 1, tiny.ahead(4, still(4)))
    guarded.close()
    plain.close()
