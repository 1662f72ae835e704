"""Every shipped row runs, on drawn weights and a handful of episodes. Nothing is timed here."""

from __future__ import annotations

import io
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
from omni_loop_bench import caches, picture, plot, process
from omni_loop_bench import held_out as held_out_
from omni_loop_bench.held_out import held_out
from omni_loop_bench.kv import FRAMES, Hands, first_frames, rollouts
from omni_loop_bench.rows import Bar, Measured, Result, Row, Settings, find
from omni_loop_bench.sessions import one_thread
from omni_loop_bench.world import CONTEXT
from omni_loop_envs.pusht.demos import KINDS, PUSHT_DEMOS, PushTDemos


@pytest.fixture(autouse=True)
def same_threads() -> object:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before, "a bench left torch with other threads"


@pytest.mark.parametrize("name", ["world", "state", "tick", "context", "serve", "plan", "player"])
def test_every_row_runs(name: str, settings: Settings) -> None:
    bench = find(name)
    chosen = [row for row in bench.rows.values() if row.group != "beside_lerobot"]  # minutes: its server starts slowly
    results = bench.run([row.name for row in chosen], settings)
    assert [result.row for result in results] == chosen
    assert all(result.passed is None for result in results)
    # Drawn weights call nothing done and may find no T: those figures need not be numbers, but they are floats.
    assert all(isinstance(result.value.ours, float | int) for result in results)
    assert sum(math.isfinite(result.value.ours) for result in results) > len(results) / 2
    values = {result.row.name: result.value for result in results}
    if name == "tick":
        assert values["kv_blocks"].ratio == 1
    if name == "state":  # counts are no timings: they hold on any machine
        assert values["fork_blocks"].ours == 0
        assert values["fork_diverged"].ours == 1
        assert values["rollout_blocks"].ratio == 1


@pytest.mark.timeout(400)
def test_lerobot_s_own_server_commands_the_same(settings: Settings) -> None:
    pytest.importorskip("lerobot.async_inference.robot_client", reason="needs the extra lerobot")
    (result,) = find("serve").run(["one_camera_p50"], settings)  # raises where the two differ
    assert result.value.baseline is not None


def test_a_policy_without_a_part_plays_an_episode(settings: Settings) -> None:
    (result,) = find("policy").run(["image_without_context"], settings)
    assert result.value.ours in (0, 1)


@pytest.mark.parametrize("sessions", [1, 3])
def test_every_cache_gives_the_same_frames(small_checkpoints: Path, sessions: int) -> None:
    stage = registry.build(registry.STAGES, "frames", {"checkpoints": str(small_checkpoints)})
    window, hands = stage.model.config.window, Hands(sessions)
    with one_thread(), torch.no_grad():  # a runner sets the threads of its own thread
        caches = rollouts(stage, first_frames(stage, sessions))
        assert set(caches) == {"paged", "dense", "recompute", "cat", "ring"}
        for tick, count in enumerate((window - 2, 1, FRAMES, FRAMES)):
            actions = hands(count)
            made = {name: cache.frames(tick, actions) for name, cache in caches.items()}
            assert made["paged"].shape == (sessions, count, 16, 72)
            assert made["paged"].std() > 0.1
            if tick >= 2:  # beyond the window it is another function
                assert (made.pop("recompute") - made["paged"]).abs().max() > 1e-3
            for name, frames in made.items():
                torch.testing.assert_close(
                    frames, made["paged"], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}"
                )


def test_a_dense_cache_outlives_its_room(small_checkpoints: Path) -> None:
    stage = registry.build(registry.STAGES, "frames", {"checkpoints": str(small_checkpoints)})
    first, generator = first_frames(stage, 2), [torch.Generator().manual_seed(i) for i in range(2)]
    with torch.no_grad():
        dense = caches.Dense(stage.model, 1, first)
        rings = [caches.Ring(stage.model, 1, f) for f in first.split(1)]
        actions = Hands(2)(70)
        ours = dense.frames(generator, actions)
        generator = [torch.Generator().manual_seed(i) for i in range(2)]
        theirs = [r.frames([g], a) for r, g, a in zip(rings, generator, actions.split(1), strict=True)]
    torch.testing.assert_close(ours, torch.cat(theirs), atol=1e-2, rtol=1e-2)


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


def test_the_rollout_is_drawn_below_the_bars(settings: Settings, tmp_path: Path) -> None:
    find("state").run(["rollout"], settings, curved := tmp_path / "deep" / "rollout.png")
    row = find("world").rows["kv_ring_16"]
    plot.draw(bars := tmp_path / "bars.png", [Result(row, Measured(1.0, 2.0), False)])
    drawn = [np.asarray(Image.open(io.BytesIO(file.read_bytes())).convert("RGB")) for file in (curved, bars)]
    assert drawn[0].shape[0] > drawn[1].shape[0] > 100
    assert all(picture.std() > 10 for picture in drawn)


def test_a_bar_reaches_one_where_a_row_just_passes() -> None:
    def share(bar: Bar, *figures: float) -> float | None:
        row = Row("a", "a", "ms", bar, "", lambda subject: Measured(*figures))
        return plot.share(Result(row, Measured(*figures), None))

    assert share(Bar("ratio", "<=", 1.05), 2.1, 2.0) == pytest.approx(1)
    assert share(Bar("ours", "<=", 50), 25.0) == 0.5
    assert share(Bar("baseline / ours", ">=", 2.5), 1.0, 5.0) == 0.5
    assert share(Bar("baseline / ours", ">=", 2.5), 1.0) is None
    assert share(Bar("ours", "<=", 0), 0.0) is None


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
