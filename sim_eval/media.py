"""Chooses the episodes worth looking at, replays them, and makes videos and comparisons of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omni_loop.errors import MissingExtra

from .imagined import Imagined, video_frames
from .predictions import Comparison, by_horizon, compare, select, side_by_side
from .replay import Replay, replay
from .results import EpisodeResult
from .runner import Run
from .suite import EvalSuite
from .video import ACCENT, BAD, GOOD, Frame, caption, write_mp4


@dataclass(frozen=True, slots=True)
class Video:
    """A video file and what it shows."""

    path: Path
    title: str
    note: str
    task: str = ""


@dataclass
class Media:
    """All there is to see of a run: of ``compared`` predictions the ``comparisons`` worth showing, and over all
    of them ``horizon`` (see :func:`predictions.by_horizon`). ``missing``: why there is nothing to see, if so."""

    videos: list[Video] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    compared: int = 0
    horizon: list[dict[str, float]] = field(default_factory=list)
    missing: str = ""


def choose(results: Sequence[EpisodeResult], videos: str) -> list[EpisodeResult]:
    """Episodes to film: of every task the first of every outcome; all; or none. Those without a step show nothing."""
    shown = [r for r in results if r.steps]
    if videos == "all":
        return shown
    if videos == "none":
        return []
    first: dict[tuple[str, str], EpisodeResult] = {}
    for r in shown:
        first.setdefault((r.task, str(r.outcome)), r)
    return list(first.values())


def collect(run: Run, folder: Path) -> Media:
    """Replay what is needed and write the videos to ``folder``. A machine that cannot draw the env makes no videos; its
    numbers stand."""
    suite, media = run.suite, Media()
    folder.mkdir(parents=True, exist_ok=True)
    filmed = choose(run.results, suite.videos)
    compared = [r for r in run.results if r.predictions]
    every: list[Comparison] = []
    wanted = {(r.task, r.episode): r for r in (*filmed, *compared)}
    shown_of = {(r.task, r.episode) for r in filmed}
    for task in dict.fromkeys(r.task for r in wanted.values()):
        env = suite.make_env(task)
        try:
            for result in (r for r in wanted.values() if r.task == task):
                shown = replay(env, result, suite.frame_key)
                every += [compare(p, shown) for p in result.predictions]
                if (task, result.episode) in shown_of:
                    media.videos.append(_episode_video(shown, suite, env.score, env.control_hz, folder))
        except MissingExtra as e:
            media.missing = e.text
            break
        finally:
            env.close()
    media.comparisons, media.horizon = select(every, suite.predictions.keep), by_horizon(every)
    media.compared = len(every)
    if media.comparisons:
        path = write_mp4(folder / "predicted-beside-real.mp4", side_by_side(media.comparisons), fps=4)
        note = "left: what happened; right: what the world model predicted for the same actions"
        media.videos.append(Video(path, "Predicted beside real", note))
    return media


def _episode_video(shown: Replay, suite: EvalSuite, score: str | None, hz: float, folder: Path) -> Video:
    r = shown.result
    path = folder / f"{f'{r.task}-' if r.task else ''}{r.outcome}-seed-{r.seed}.mp4"
    write_mp4(path, _captioned(shown, score), fps=2 * hz)
    note = f"seed {r.seed}, {r.steps} steps" + (f", best {score} {r.score:.3f}" if score else "")
    return Video(
        path, str(r.outcome).capitalize(), f"{note}; twice real time" + (f". {r.reason}" if r.reason else ""), r.task
    )


def _captioned(shown: Replay, score: str | None) -> Iterator[Frame]:
    last = len(shown.views) - 1
    for step, (view, value) in enumerate(zip(shown.views, shown.scores, strict=True)):
        colour = ACCENT if step < last else GOOD if shown.result.success else BAD
        text = str(shown.result.outcome) if step == last else f"seed {shown.result.seed}"
        right = f"step {step}" + (f"   {score} {value:.2f}" if score and step else "")
        yield caption(view, text, right, float(value) if score else step / max(last, 1), colour)


def imagined_video(imagined: Imagined, path: Path, hz: float) -> Video:
    """The imagined episode as a video."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mp4(path, video_frames(imagined), fps=hz)
    end = f"done at step {imagined.done_at}" if imagined.done_at is not None else "not done"
    note = f"seed {imagined.seed}: one real frame, then {imagined.steps} steps inside the world model; {end}"
    return Video(path, "Imagined", note)
