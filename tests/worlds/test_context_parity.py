"""The context model through the paged pool against a recompute without any cache, and against transformers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from omni_loop.errors import InvalidInput, StateError
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.testing.stage_driver import Ask, Driver
from omni_loop_worlds.context import layout
from omni_loop_worlds.context.decode import Reading, read_instruction, read_tick, slide
from omni_loop_worlds.context.llama import ContextModel
from omni_loop_worlds.context.perceive import load_context
from omni_loop_worlds.stages import ContextStage, context

TICKS = 8  # the window is 3 ticks
PROMPT = "push the T"


@pytest.fixture
def stage(small_checkpoints: Path) -> ContextStage:
    return context(checkpoints=str(small_checkpoints))


@pytest.fixture
def driver(stage: ContextStage) -> Iterator[Driver]:
    driver = Driver(stage)
    driver.open("s", prompt=PROMPT)
    yield driver
    driver.close()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Reading]:
    """Every reading the stage makes."""
    made: list[Reading] = []

    def recorded(*args: Any) -> Reading:
        made.append(read_tick(*args))
        return made[-1]

    monkeypatch.setattr(sys.modules[ContextStage.__module__], "read_tick", recorded)
    return made


def look(case: int, executed: int = 8) -> Ask:
    rng = np.random.default_rng(case)
    arrays = {
        "image": rng.integers(0, 256, (6, 6, 3), np.uint8).repeat(16, 0).repeat(16, 1),
        "agent_pos": rng.uniform(0, 512, (2, 2)).astype(np.float32),
        "executed": rng.uniform(0, 512, (executed if case else 0, 2)).astype(np.float32),
    }
    return Ask({"observation": Payload(PayloadKind.OBSERVATION, arrays)}, step=8 * case)


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Llama's rotary embedding of ``x [.., n, e]`` at ``positions [n]``, written a second time."""
    e = x.shape[-1]
    angle = positions.double()[:, None] * theta ** (-torch.arange(0, e, 2).double() / e)
    cos, sin = (torch.cat([t, t], -1).float() for t in (angle.cos(), angle.sin()))
    return x * cos + torch.cat([-x[..., e // 2 :], x[..., : e // 2]], -1) * sin


@torch.no_grad()
def recompute(model: ContextModel, instruction: Tensor, ticks: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Hidden states ``[n, d]`` and cache ``[layers, 2, n, g, e]`` of all tokens, each layer computed over the whole
    session. A tick sees the ``window_ticks`` before it, and the instruction as if that stood right before them."""
    c = model.config
    tokens = torch.cat([instruction, *ticks])
    part = torch.cat([torch.full((layout.INSTRUCTION,), -1), torch.arange(len(ticks)).repeat_interleave(layout.TICK)])
    at, x, kv = torch.arange(len(tokens)), model.model.embed_tokens(tokens), []
    for layer in model.model.layers:
        q, k, v = (t[0] for t in layer.self_attn.project(layer.input_layernorm(x)[None]))
        kv.append(torch.stack([k, v]).transpose(1, 2))
        seen = torch.zeros_like(q)
        for p in range(-1, len(ticks)):
            rows, gone = torch.nonzero(part == p)[:, 0], max(0, p - c.window_ticks)
            cols = torch.nonzero((part == -1) | ((part >= gone) & (part <= p)))[:, 0]
            place = torch.where(part[cols] == -1, at[cols] + gone * layout.TICK, at[cols])
            group = c.num_attention_heads // c.num_key_value_heads
            keys = rope(k[:, cols], place, c.rope_theta).repeat_interleave(group, 0)
            scores = rope(q[:, rows], at[rows], c.rope_theta) @ keys.transpose(1, 2) * c.head_dim**-0.5
            scores = scores.masked_fill(cols[None] > rows[:, None], float("-inf"))
            seen[:, rows] = scores.softmax(-1) @ v[:, cols].repeat_interleave(group, 0)
        x = x + layer.self_attn.o_proj(seen.transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.model.norm(x), torch.stack(kv)


def test_ticks_through_the_pool_equal_the_recompute(
    stage: ContextStage, driver: Driver, readings: list[Reading]
) -> None:
    outputs = [driver.tick("s", t, look(t)) for t in range(TICKS)]
    instruction = layout.instruction_tokens(PROMPT)
    hidden, kv = recompute(stage.model, instruction, [r.tokens[0] for r in readings])
    assert hidden.abs().mean() > 0.1
    for t, (reading, output) in enumerate(zip(readings, outputs, strict=True)):
        mine = slice(layout.INSTRUCTION + t * layout.TICK, layout.INSTRUCTION + (t + 1) * layout.TICK)
        assert (reading.hidden[0] - hidden[mine]).abs().max() <= 1e-5
        assert (torch.as_tensor(output["kv"].arrays["kv"]) - kv[:, :, mine]).abs().max() <= 1e-5
        logits = stage.model.lm_head(hidden[mine])
        progress = layout.progress_values(logits[-3])
        done = layout.done_probability(logits[-2], stage.model.config.done_bias)
        assert abs(float(output["progress"].arrays["progress"]) - progress) <= 1e-5
        assert abs(float(output["progress"].arrays["done"]) - done) <= 1e-5
        bins = logits[-3, layout.PROGRESS : layout.PROGRESS + layout.PROGRESS_BINS]
        assert reading.tokens[0, layout.PROGRESS_AT] == layout.PROGRESS + bins.argmax()
        assert reading.tokens[0, layout.DONE_AT] == layout.DONE_NO + logits[-2, layout.DONE_NO :][:2].argmax()


def test_what_fell_out_of_the_window_is_not_seen(stage: ContextStage, driver: Driver, readings: list[Reading]) -> None:
    """With another first tick, late ticks differ only by what the window's ticks have seen themselves."""
    driver.open("other", prompt=PROMPT)
    driver.open("unlike", prompt="something else")
    for t in range(TICKS):
        for session, case in (("s", t), ("other", t or 99), ("unlike", t)):
            driver.tick(session, t, look(case))
    # "s" and "other" were given the same instruction, and share its blocks.
    assert driver.blocks == (2 * layout.INSTRUCTION + 3 * stage.model.config.window_ticks * layout.TICK) // 16
    instruction = layout.instruction_tokens(PROMPT)
    for offset in (0, 1):
        hidden, _ = recompute(stage.model, instruction, [r.tokens[0] for r in readings[offset::3]])
        assert (readings[3 * (TICKS - 1) + offset].hidden[0] - hidden[-layout.TICK :]).abs().max() <= 1e-5
    last = [r.hidden for r in readings[-3:]]
    assert (last[0] - last[2]).abs().max() > 1e-3  # the instruction is never forgotten


def test_the_pool_slides_as_training_does(stage: ContextStage, driver: Driver, readings: list[Reading]) -> None:
    model = stage.model
    past = read_instruction(model, layout.instruction_tokens(PROMPT)[None])
    for t in range(TICKS):
        driver.tick("s", t, look(t))
        reading = read_tick(model, past, readings[t].tokens[:, : layout.GIVEN])
        assert torch.equal(reading.tokens, readings[t].tokens)
        assert (reading.kv - readings[t].kv).abs().max() <= 1e-5
        past = slide(past, reading.kv, model.config.window_ticks)


def dream(n: int = 8) -> Ask:
    latents = np.random.default_rng(3).normal(size=(n, 16, 72)).astype(np.float32)
    arrays = {"latents": latents, "actions": np.zeros((n, 2), np.float32)}
    return Ask({"imagined": Payload(PayloadKind.LATENTS, arrays)})


@pytest.mark.parametrize("dreams", [1, 2])
def test_a_real_observation_drops_what_was_imagined(driver: Driver, dreams: int) -> None:
    driver.open("straight", prompt=PROMPT)
    for session in ("s", "straight"):
        driver.tick(session, 0, look(0))
    for tick in range(dreams):
        driver.tick("s", tick, dream())
    got, want = (driver.tick(s, 6, look(1)) for s in ("s", "straight"))
    assert (got["kv"].arrays["kv"] - want["kv"].arrays["kv"]).abs().max() <= 1e-5
    assert driver.blocks == (layout.INSTRUCTION + 2 * 2 * layout.TICK) // 16  # one instruction for both


def test_a_long_dream_leaves_the_instruction(driver: Driver) -> None:
    driver.tick("s", 0, look(0))
    for tick in range(1, 7):
        driver.tick("s", tick, dream())
    driver.tick("s", 7, look(1))
    assert driver.blocks == (layout.INSTRUCTION + layout.TICK) // 16
    driver.tick("s", 8, look(2))
    assert driver.blocks == (layout.INSTRUCTION + 2 * layout.TICK) // 16


def test_the_state_given_takes_the_place_of_the_readout(driver: Driver) -> None:
    ask = look(1, executed=0)
    arrays = {**ask.inputs["observation"].arrays, "block_pose": np.array([256, 300, 0.5], np.float32)}
    given = Ask({"observation": Payload(PayloadKind.OBSERVATION, arrays)})
    outputs = [driver.run("s", 0, given)]
    driver.discard("s", 0)
    outputs.append(driver.run("s", 0, ask))
    driver.discard("s", 0)
    points, estimated = (torch.as_tensor(o["scene"].arrays["points"]) for o in outputs)
    foot = points[5] * 256 + 256  # the foot of the stem: 120 px from the middle of the bar, turned by the angle
    assert torch.allclose(foot, torch.tensor([256 + 15 * np.cos(0.5) - 120 * np.sin(0.5), 300 + 15 * np.sin(0.5)
                                              + 120 * np.cos(0.5)], dtype=torch.float32), atol=1e-2)  # fmt: skip
    assert torch.equal(points[0], estimated[0])  # the agent is measured
    assert (points[1:] != estimated[1:]).any()


def test_nothing_to_look_at_is_said(driver: Driver) -> None:
    with pytest.raises(StateError, match="no observation yet"):
        driver.run("s", 0, Ask({}))
    with pytest.raises(InvalidInput, match="imagined no frames"):
        driver.run("s", 0, dream(0))


def test_transformers_loads_the_same_folder_and_agrees(small_checkpoints: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.LlamaForCausalLM.from_pretrained(small_checkpoints / "context", dtype=torch.float32).eval()
    ours = load_context(small_checkpoints / "context")
    tokens = torch.randint(0, layout.VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = theirs(tokens).logits
        got = ours.lm_head(ours(tokens, ours.empty_cache(2))[0])
        assert (got - want).abs().max() <= 1e-4
        generated = theirs.generate(
            tokens[:1], max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        sequence, cache, new = tokens[:1], ours.empty_cache(1), tokens[:1]
        for _ in range(12):
            hidden, kv = ours(new, cache)
            cache = torch.cat([cache, kv], 3)
            new = ours.lm_head(hidden[:, -1]).argmax(-1, keepdim=True)
            sequence = torch.cat([sequence, new], 1)
    assert torch.equal(sequence, generated)
