"""``omni-loop bench world``: gates of the world model on held-out episodes, and its KV cache against others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from omni_loop.errors import ConfigError
from omni_loop.training.checkpoint import load_config, load_weights
from omni_loop.training.demos import Demos
from omni_loop_worlds.codec import FrameCodec, to_float
from omni_loop_worlds.context.perceive import load_codec
from omni_loop_worlds.dit import DiT, DiTConfig
from omni_loop_worlds.quality import Quality, Windows, iou, t_mask
from omni_loop_worlds.stages.shared import checkpoint
from omni_loop_worlds.train.codec import evaluate as evaluate_codec

from . import picture, plot
from .held_out import held_out
from .kv import Comparison, compare
from .rows import Bar, Bench, Measured, Result, Settings

CONTEXT, HORIZON, LONG, REAL_EVERY = 5, 16, 48, 8  # frames
MANY = 16  # sessions
_WINDOW = 29  # as the trainer's own figures: four places one step ahead, and the horizon


class World:
    """Models and held-out windows; figures that several rows share are computed once."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def codec(self) -> FrameCodec:
        return load_codec(checkpoint("codec", self.settings.checkpoints))

    @cached_property
    def model(self) -> DiT:
        folder = checkpoint("world", self.settings.checkpoints)
        model = DiT(load_config(folder, DiTConfig))
        load_weights(folder, model)
        return model

    @cached_property
    def demos(self) -> Demos:
        return held_out(self.settings)

    def windows(self, length: int, per_episode: int = 2) -> Windows:
        """Held-out stretches of ``length`` frames."""
        if not (self.demos.length[self.demos.episodes("expert", "perturbed", "random", framed=True)] >= length).any():
            raise ConfigError(f"no held-out episode has {length} frames")
        windows = Windows.of(self.demos, length, per_episode)
        return Windows(windows.frames[:4], windows.actions[:4]) if self.settings.quick else windows

    @cached_property
    def quality(self) -> Quality:
        return Quality(self.codec, self.model, self.windows(_WINDOW))

    @cached_property
    def one_step(self) -> dict[str, float]:
        return self.quality.one_step()

    @cached_property
    def horizon(self) -> list[dict[str, float]]:
        return self.quality.horizon(HORIZON)

    @cached_property
    def frames(self) -> dict[str, float]:
        """The codec's own figures, on every third frame."""
        return evaluate_codec(self.codec, self.demos, stride=60 if self.settings.quick else 3)

    @cached_property
    def alone(self) -> Comparison:
        return compare(self.settings.checkpoints, 1, rounds=2 if self.settings.quick else 40)

    @cached_property
    def crowd(self) -> Comparison:
        return compare(self.settings.checkpoints, MANY, rounds=1 if self.settings.quick else 12)

    def cache(self, name: str, sessions: int = 1) -> Measured:
        """A frame of all sessions on paged KV, against on the cache ``name``."""
        ms = (self.alone if sessions == 1 else self.crowd).ms
        return Measured(ms["paged"], ms[name])


@contextmanager
def _subject(settings: Settings) -> Iterator[World]:
    yield World(settings)


BENCH: Bench[World] = Bench("world", _subject)


@BENCH.row("dB", Bar("ours - baseline", ">=", 3), "quality")
def one_step_gain(world: World) -> Measured:
    """PSNR one frame ahead of real context, against copying the last frame."""
    return Measured(world.one_step["psnr_db"], world.one_step["copy_db"])


@BENCH.row("dB", group="quality")
def one_step_moving(world: World) -> Measured:
    """The same over the pixels that change."""
    return Measured(world.one_step["moving_db"], world.one_step["moving_copy_db"])


@BENCH.row("px", Bar("ratio", ">=", 4), "quality")
def shuffled_action(world: World) -> Measured:
    """Error of the agent under another window's action, against under its own: whether actions are heard."""
    return Measured(world.one_step["agent_shuffled_px"], world.one_step["agent_px"])


@BENCH.row("dB", Bar("ours - baseline", ">", 0), "quality")
def above_copy_16(world: World) -> Measured:
    """PSNR at that of 16 imagined frames which is least above copying the last real one."""
    worst = min(world.horizon, key=lambda row: row["psnr_db"] - row["copy_db"])
    return Measured(worst["psnr_db"], worst["copy_db"])


@BENCH.row("IoU", Bar("ours", ">=", 0.8), "quality")
def iou_1(world: World) -> Measured:
    """Overlap of the T with the true T one frame ahead of real context."""
    return Measured(world.one_step["iou"])


@BENCH.row("IoU", Bar("ours", ">=", 0.6), "quality")
def iou_8(world: World) -> Measured:
    """Overlap of the T after 8 imagined frames, against copying the last real one."""
    row = world.horizon[7]
    return Measured(row["iou"], row["copy_iou"])


@BENCH.row("IoU", group="quality")
def iou_8_moved(world: World) -> Measured:
    """The same over the windows in which the T has moved (copying overlaps by less than 0.8)."""
    frames = world.quality.windows.frames
    true, copied = (t_mask(to_float(frames[:, at])) for at in (CONTEXT + 7, CONTEXT - 1))
    kept = iou(copied, true)
    ours = iou(t_mask(world.quality.imagine(8)[:, 7]), true)
    return Measured(float(ours[kept < 0.8].mean()), float(kept[kept < 0.8].mean()))


@BENCH.row("dB", group="quality")
def real_every_8(world: World) -> Measured:
    """PSNR at imagined frame 48 with a real frame every 8, against imagining all of them."""
    quality = Quality(world.codec, world.model, world.windows(CONTEXT + LONG, per_episode=1))
    return Measured(quality.reconditioned(LONG, REAL_EVERY), quality.reconditioned(LONG, 0))


@BENCH.row("dB", group="quality")
def codec(world: World) -> Measured:
    """PSNR of frames encoded and decoded again: no predicted frame can be above."""
    return Measured(world.frames["psnr_db_episodes"])


@BENCH.row("px of 512", group="quality")
def readout(world: World) -> Measured:
    """Error of the scene's points read from latents, per coordinate."""
    return Measured(world.frames["readout_px_episodes"])


@BENCH.row("CPU ms", Bar("ratio", "<=", 1.05), "kv")
def kv_dense(world: World) -> Measured:
    """A frame on paged KV as served, against a dense tensor a session, otherwise alike."""
    return world.cache("dense")


@BENCH.row("CPU ms", Bar("ratio", "<=", 1), "kv")
def kv_dense_16(world: World) -> Measured:
    """The same of 16 sessions, both in one batch."""
    return world.cache("dense", MANY)


@BENCH.row("CPU ms", Bar("baseline / ours", ">=", 1.6), "kv")
def kv_recompute(world: World) -> Measured:
    """A frame on paged KV as served, against computing the window's frames at every denoise step."""
    return world.cache("recompute")


@BENCH.row("CPU ms", Bar("baseline / ours", ">=", 3.5), "kv")
def kv_recompute_16(world: World) -> Measured:
    """The same of 16 sessions, both in one batch."""
    return world.cache("recompute", MANY)


@BENCH.row("CPU ms", Bar("ratio", "<=", 1), "kv")
def kv_cat(world: World) -> Measured:
    """A frame on paged KV as served, against roped keys and values behind the cached ones by torch.cat."""
    return world.cache("cat")


@BENCH.row("CPU ms", Bar("baseline / ours", ">=", 2.5), "kv")
def kv_cat_16(world: World) -> Measured:
    """The same of 16 sessions: paged in one batch, the other session by session."""
    return world.cache("cat", MANY)


@BENCH.row("CPU ms", Bar("ratio", "<=", 1), "kv")
def kv_ring(world: World) -> Measured:
    """A frame on paged KV as served, against a window of roped keys that is moved a frame at a time."""
    return world.cache("ring")


@BENCH.row("CPU ms", Bar("baseline / ours", ">=", 2.5), "kv")
def kv_ring_16(world: World) -> Measured:
    """The same of 16 sessions: paged in one batch, the other session by session."""
    return world.cache("ring", MANY)


@BENCH.row("share", Bar("ours", "<=", 1e-5), "kv")
def kv_difference(world: World) -> Measured:
    """Largest difference of any cache's latents from those on paged KV, of the largest latent."""
    return Measured(max(world.alone.difference, world.crowd.difference))


def _draw(world: World, results: Sequence[Result], path: Path) -> None:
    if results and all(result.row.group == "kv" for result in results):
        plot.draw(path, results)
        return
    windows, names = picture.choose(world.demos, CONTEXT + max(picture.STEPS))
    imagined = Quality(world.codec, world.model, windows).imagine(max(picture.STEPS))
    picture.strip(path, windows.frames[:, CONTEXT:], imagined, names)


BENCH.picture = _draw
