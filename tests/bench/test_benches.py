"""Every shipped row runs, on drawn weights and a handful of episodes. Nothing is timed here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from omni_loop import registry
from omni_loop.errors import ConfigError
from omni_loop.training.demos import Demos
from omni_loop_bench import held_out as held_out_
from omni_loop_bench import picture, process
from omni_loop_bench.held_out import held_out
from omni_loop_bench.kv import Dense, Paged, Recompute
from omni_loop_bench.rows import Settings, find
from omni_loop_bench.world import CONTEXT
from omni_loop_envs.pusht.demos import KINDS, PUSHT_DEMOS, PushTDemos


@pytest.fixture(autouse=True)
def same_threads() -> object:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before, "a bench left torch with other threads"


@pytest.mark.parametrize("name", ["world", "tick", "context", "serve"])
def test_every_row_runs(name: str, settings: Settings) -> None:
    bench = find(name)
    results = bench.run(settings=settings)
    assert [result.row.name for result in results] == list(bench.rows)
    assert all(result.passed is None for result in results)
    # Drawn weights call nothing done and may find no T: those figures need not be numbers, but they are floats.
    assert all(isinstance(result.value.ours, float | int) for result in results)
    assert sum(math.isfinite(result.value.ours) for result in results) > len(results) / 2
    if name == "tick":
        assert {r.row.name: r.value.ratio for r in results}["kv_blocks"] == 1


def test_a_policy_without_a_part_plays_an_episode(settings: Settings) -> None:
    (result,) = find("policy").run(["image_without_context"], settings)
    assert result.value.ours in (0, 1)


def test_every_cache_gives_the_same_frames(small_checkpoints: Path) -> None:
    stage = registry.build(registry.STAGES, "frames", {"checkpoints": str(small_checkpoints)})
    c, g = stage.model.config, torch.Generator().manual_seed(3)
    first = torch.randn(1, c.tokens, c.token_dim, generator=g)
    paged = Paged(stage, first)
    dense, recompute = Dense(stage.model, stage.steps, first), Recompute(stage.model, stage.steps, first)
    with torch.no_grad():
        for tick, count in enumerate((c.window - 2, 1, 8, 8)):
            actions = torch.rand(count, c.action_dim, generator=g) * 2 - 1
            ours = paged.frames(tick, actions)
            assert ours.std() > 0.1
            torch.testing.assert_close(ours, dense.frames(tick, actions), atol=1e-4, rtol=1e-4)
            if tick < 2:  # beyond the window it is another function
                torch.testing.assert_close(ours, recompute.frames(tick, actions), atol=1e-4, rtol=1e-4)


def test_the_picture_shows_real_frames_above_imagined_ones(settings: Settings, data: Path, tmp_path: Path) -> None:
    bench, file = find("world"), tmp_path / "deep" / "strip.png"
    bench.run(["readout"], settings, file)
    drawn = np.asarray(Image.open(file).convert("RGB")).astype(int)
    windows, names = picture.choose(Demos(data / "test", KINDS), CONTEXT + max(picture.STEPS))
    assert names == ["expert", "perturbed", "random"]
    side = 2 * 96
    for column, step in enumerate(picture.STEPS):
        x = drawn.shape[1] - (len(picture.STEPS) - column) * (side + 4)
        y = drawn.shape[0] - 2 * (side + 4)  # the last episode
        real = np.asarray(
            Image.fromarray(windows.frames[-1, CONTEXT + step - 1].numpy()).resize((side, side), 3)
        ).astype(int)
        np.testing.assert_array_equal(drawn[y : y + side, x : x + side], real)
        assert np.abs(drawn[y + side + 4 : y + 2 * side + 4, x : x + side] - real).mean() > 5  # drawn weights


def test_training_episodes_are_no_held_out_ones(data: Path, tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    for file in (data / "test").glob("*.npy"):
        (tmp_path / "test" / file.name).symlink_to(file)
    (tmp_path / "test" / "seed.npy").unlink()
    np.save(tmp_path / "test" / "seed.npy", [900_000, 10_007, 1, 2])
    with pytest.raises(ConfigError, match="seed 10007 is one of training"):
        held_out(Settings(data=tmp_path))
    with pytest.raises(ConfigError, match="give --data a folder with a split 'test'"):
        held_out(Settings(data=tmp_path / "nothing"))


def test_missing_demonstrations_are_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(held_out_, "_SMALL", {"expert": 0, "perturbed": 0, "random": 1, "poses": 1})
    said: list[str] = []
    demos = held_out(Settings(say=said.append))
    assert said[-1] == "held-out episode 2 of 2"
    assert set(map(int, demos.column("seed"))) <= PUSHT_DEMOS.split("test").seeds()
    assert len(demos.frames) == int(demos.length.sum())
    monkeypatch.setattr(PushTDemos, "generate", _never)
    assert held_out(Settings()).folder == demos.folder


def _never(*arguments: object, **options: object) -> Callable[..., object]:
    raise AssertionError("made again")


def test_cpu_time_counts_descendants(monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import subprocess
    import sys

    script = "import subprocess, sys\nsubprocess.run([sys.executable, '-c', sys.argv[1]])"
    burn = "import sys\nsum(range(3_000_000))\nprint('burnt', flush=True)\nsys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script, burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"burnt\n"
        tree, alone = process.cpu_seconds(child.pid), process._ticks(child.pid) / os.sysconf("SC_CLK_TCK")
        child.communicate(b"")
    assert tree > alone
