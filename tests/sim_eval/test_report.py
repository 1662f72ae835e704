from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest

from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import ConfigError, InvalidInput, StageFailed
from omni_loop_sim_eval import chart, media, report, stored, summary
from omni_loop_sim_eval.imagined import imagine
from omni_loop_sim_eval.predictions import Comparison, by_horizon, psnr, select, strip
from omni_loop_sim_eval.rows import row_of, successes
from omni_loop_sim_eval.runner import Run, run_suite
from omni_loop_sim_eval.stats import interval, paired
from omni_loop_sim_eval.video import beside, caption, resize, write_mp4

from .pages import read
from .toy import ToyEnv, ToyServer, toy_suite

S = EVALUATION_SEED


def broken(seed: int, tick: int) -> None:
    if seed == S + 2:
        raise StageFailed("<script>alert('act & co')</script>")


@pytest.fixture(scope="module")
def run() -> Run:
    from omni_loop import registry

    with registry.registered(registry.ENVS, "toy", ToyEnv):
        server = ToyServer(lost=frozenset({S + 1}), broken=broken)
        return run_suite(toy_suite(episodes=5, max_steps=20), server.connect)


def test_summary_says_what_it_promises(run: Run) -> None:
    s = json.loads(json.dumps(summary.summarise(run)))
    assert (s["episodes"], s["successes"], s["success_rate"], s["errors"], s["timeouts"]) == (5, 3, 0.6, 1, 0)
    bounds = interval(3, 5)
    assert s["ci95"] == [bounds.low, bounds.high]
    for key in ("tick_ms", "overhead_ms"):
        assert s[key]["p50"] <= s[key]["p99"]
    assert list(s["stages_ms"]) == ["context", "act"], "stages in the order they run"
    plain = [t for r in run.results for t in r.ticks if not t.frames]
    assert s["tick_ms"]["p50"] == pytest.approx(np.median([t.round_trip_ms for t in plain]), abs=1e-3)
    assert s["overhead_ms"]["p50"] == pytest.approx(np.median([t.round_trip_ms - 1.5 for t in plain]), abs=1e-3)
    assert s["ticks"] == sum(len(r.ticks) for r in run.results)
    assert (s["first_seed"], s["seeds_unseen"], s["state_given"]) == (S, True, False)


def test_a_film_is_made_without_a_fork(tmp_path: Path) -> None:
    forks: list[str] = []
    os.register_at_fork(before=lambda: forks.append("fork"))
    write_mp4(tmp_path / "a.mp4", [np.zeros((16, 16, 3), np.uint8)], fps=4)
    assert not forks


def test_written_files_hold_every_episode_and_can_be_paired(run: Run, tmp_path: Path) -> None:
    summary.write(tmp_path, summary.summarise(run), run.results)
    rows = json.loads((tmp_path / "episodes.json").read_text())
    assert [row["seed"] for row in rows] == list(range(S, S + 5))
    assert [row["outcome"] for row in rows] == ["success", "failure", "error", "success", "success"]
    assert rows[2]["reason"].startswith("stage_failed: ")
    pairs = summary.against(run.results, successes(stored.load(tmp_path).rows))
    assert (pairs.both, pairs.neither, pairs.only_a, pairs.only_b) == (3, 2, 0, 0)
    (tmp_path / "episodes.json").write_text('{"seed": 1}')
    with pytest.raises(ConfigError, match=r"episodes.json is no table"):
        stored.load(tmp_path)
    with pytest.raises(ConfigError, match=r"holds no episodes.json"):
        stored.load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"holds no episodes.json"):
        stored.load(tmp_path / "episodes.json")


def test_page_is_well_formed_self_contained_and_complete(run: Run, tmp_path: Path) -> None:
    seen, numbers = media.collect(run, tmp_path), summary.summarise(run)
    numbers["predictions"] = {"n": seen.compared, "psnr_by_horizon": seen.horizon}
    html = report.render(run, numbers, seen, comparison=("before", paired({1: True}, {1: False})))
    page = read(html)
    sources = [a.get("src") or "" for _, a in page.tags if "src" in a]
    assert sources
    assert all(src.startswith(("data:video/mp4;base64,", "data:image/png;base64,")) for src in sources)
    links = [a["href"] for t, a in page.tags if t == "a"]
    assert links[:5] == [f"#e{i}" for i in range(5)]
    assert links[5:] == ["#e1", "#e2"], "what did not succeed"
    assert {f"e{i}" for i in range(5)} == {a["id"] for t, a in page.tags if t == "tr" and "id" in a}
    assert any(a.get("name") == "viewport" for t, a in page.tags if t == "meta")
    said = page.said()
    for text in ("60 %", "3 of 5", "Success", "Failure", "Predicted beside real", "McNemar", "context", "transport"):
        assert text in said, text
    assert str(S + 4) in said
    assert "<script>alert('act & co')</script>" in said, "reasons are shown, escaped"
    videos = [t for t, _ in page.tags if t == "video"]
    assert len(videos) == 3, "success, failure, predicted beside real; the error had no step to show"


def test_page_of_several_tasks_shows_each(tmp_path: Path) -> None:
    tasks = [{"name": "one", "prompt": "do <one>"}, {"name": "two"}]
    server = ToyServer(lost=frozenset({S + 1}), broken=broken)
    run = run_suite(toy_suite(tasks=tasks, episodes=3, max_steps=20), server.connect)
    seen, numbers = media.collect(run, tmp_path), summary.summarise(run)
    assert {name: (t["successes"], t["episodes"]) for name, t in numbers["tasks"].items()} == {
        "one": (1, 3),
        "two": (1, 3),
    }
    assert numbers["interval"] == "wilson", "three episodes of a task are too few to narrow it"
    assert {(v.task, v.title) for v in seen.videos if v.task} == {
        (task, title) for task in ("one", "two") for title in ("Success", "Failure")
    }
    assert len({v.path for v in seen.videos}) == len(seen.videos), "no film overwrites another task's"
    numbers["predictions"] = {"n": seen.compared, "psnr_by_horizon": seen.horizon}
    page = read(report.render(run, numbers, seen))
    said = page.said()
    for text in (
        "Every task",
        "“do <one>”",
        "Of 2 tasks together",
        "one: Success",
        "two: Failure",
        "What did not succeed",
    ):
        assert text in said, text
    assert "one 2000002 , two 2000002" in said, "both that broke, under their reason"
    anchors = [a["id"] for t, a in page.tags if t == "tr" and "id" in a]
    assert len(anchors) == len(set(anchors)) == 6
    assert {a["href"] for t, a in page.tags if t == "a"} <= {f"#{anchor}" for anchor in anchors}


def test_what_goes_with_success_is_drawn_once_for_each_episode(run: Run) -> None:
    rows = [row_of(r) for r in run.results]
    drawn = dict(report.beside_success(rows))
    assert list(drawn) == ["Steps of an episode", "Median tick of an episode"]
    missed = [replace(row, deadline_misses=i) for i, row in enumerate(rows)]
    assert "Deadline misses of an episode" in dict(report.beside_success(missed))
    picture = chart.stacked([1, 1, 2, 9], [True, False, True, True], "steps")
    assert picture is not None
    assert (picture.low, picture.high, picture.most) == (1, 9, 2)
    assert (picture.svg.count('class="k"'), picture.svg.count('class="f"')) == (3, 1)
    assert chart.stacked([], [], "ms") is None


def test_reasons_count_what_did_not_succeed(run: Run) -> None:
    found = report.reasons([row_of(r) for r in run.results])
    assert [(g.outcome, len(g.rows)) for g in found] == [("failure", 1), ("error", 1)]
    assert found[0].text == "ended without success"
    assert found[1].text.startswith("stage_failed: <script>")


def test_page_without_videos_predictions_or_ticks_still_renders() -> None:
    server = ToyServer(broken=lambda seed, tick: broken(S + 2, tick))
    run = run_suite(toy_suite(episodes=2, first_seed=5), server.connect)
    page = read(report.render(run, summary.summarise(run), media.Media()))
    assert "2 ended with an error of 2 episodes" in page.said()
    assert "may belong to demonstrations" in page.said()


def test_segments_add_up_to_the_mean_tick(run: Run) -> None:
    numbers = summary.summarise(run)
    parts = report.segments(numbers)
    assert [p.name for p in parts] == ["context", "act", "server", "transport"]
    numbers |= {"tick_ms": {"mean": 10.0}, "transport_ms": {"mean": 4.0}}
    parts = report.segments(numbers)
    assert sum(p.ms for p in parts) == pytest.approx(10)
    assert [round(p.share) for p in parts] == [10, 5, 45, 40]


def test_histogram_counts_every_value_once_and_marks_percentiles() -> None:
    values = [*range(100), 10_000.0]
    drawn = chart.histogram(values, bins=10)
    assert (drawn.low, drawn.above) == (0, 1)
    assert drawn.svg.count("<rect") == 10
    assert 0 < drawn.p50_at < drawn.p99_at <= 100
    assert chart.histogram([3.0]).svg.count("<rect") == 1


def test_choose_films_one_of_every_outcome(run: Run) -> None:
    assert [r.episode for r in media.choose(run.results, "outcome")] == [0, 1]
    assert [r.episode for r in media.choose(run.results, "all")] == [0, 1, 3, 4]
    assert media.choose(run.results, "none") == []


def test_predictions_are_compared_with_the_frames_of_the_same_steps(run: Run, tmp_path: Path) -> None:
    """The toy's world model is exact, so any shift by a step would show."""
    seen = media.collect(run, tmp_path)
    assert seen.compared
    for c in seen.comparisons:
        assert (c.predicted == c.real).all()
    assert max(c.moved for c in seen.comparisons) > 0
    assert all(row["psnr"] == 99 > row["copy_psnr"] for row in seen.horizon)


def test_select_keeps_the_longest_and_liveliest() -> None:
    def made(seed: int, n: int, change: int) -> Comparison:
        before = np.zeros((4, 4, 3), np.uint8)
        return Comparison(
            seed, 1, before, np.full((n, 4, 4, 3), change, np.uint8), np.full((n, 4, 4, 3), change, np.uint8)
        )

    given = [made(1, 8, 5), made(2, 8, 50), made(3, 2, 200), made(4, 8, 20)]
    assert [c.seed for c in select(given, 2)] == [2, 4]
    assert strip(given[0]).shape == (2 * 4 + 3, 9 * 7 - 3, 3)
    assert [row["n"] for row in by_horizon(given)] == [4, 4, 3, 3, 3, 3, 3, 3]
    assert by_horizon([]) == []


def test_psnr() -> None:
    a = np.full((4, 4, 3), 100, np.uint8)
    assert psnr(a, a) == 99
    assert psnr(a, a + 10) == pytest.approx(20 * np.log10(255 / 10))


def test_video_can_be_read_back(tmp_path: Path) -> None:
    frames = [np.full((63, 65, 3), v, np.uint8) for v in (20, 120, 220)]
    path = write_mp4(tmp_path / "x.mp4", frames, fps=10, hold_s=0.2)
    reader, got = cv2.VideoCapture(str(path)), []
    while (frame := reader.read()[1]) is not None:
        got.append(frame)
    reader.release()
    assert [round(float(f.mean()), -1) for f in got] == [20, 120, 220, 220, 220]
    assert got[0].shape == (64, 66, 3), "odd sides are padded: H.264 wants them even"
    with pytest.raises(InvalidInput, match="no frames"):
        write_mp4(tmp_path / "y.mp4", [], fps=10)


def test_captions_leave_the_frame_alone() -> None:
    frame = np.random.default_rng(0).integers(0, 255, (96, 96, 3), dtype=np.uint8)
    for bar in (None, -1.0, 0.0, 0.5, 2.0):
        shown = caption(frame, "text", "right", bar)
        assert (shown[-96:] == frame).all()
        assert shown.shape == (144, 96, 3)
    assert resize(frame, 48).shape == (48, 48, 3)
    assert beside([frame, frame], gap=4).shape == (96, 196, 3)


def test_imagine_needs_one_real_observation_and_stops_when_done_or_at_the_limit(tmp_path: Path) -> None:
    server, env = ToyServer(), ToyEnv()
    common = {"pipeline": "toy", "keys": ("position",), "seed": S}
    made = imagine(server.connect(), env, steps=30, **common)  # type: ignore[arg-type]
    assert (made.frames[0] == env.reset(S)["image"]).all()
    assert made.done_at == made.steps == 8, "7 steps to the goal, judged where the third tick of 4 begins"
    told: list[int] = []
    made = imagine(server.connect(), env, steps=10, stop_when_done=False, on_steps=told.append, **common)  # type: ignore[arg-type]
    assert (made.steps, told) == (10, [4, 8, 10])
    assert [step for _, step, _, _ in server.heard] == [0, 0], "one observation each: no simulator after it"
    assert server.closed == 2
    video = media.imagined_video(made, tmp_path / "imagined.mp4", hz=10)
    assert video.path.stat().st_size > 1000
    assert "10 steps inside the world model" in video.note
