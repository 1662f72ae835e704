"""Chooses the episodes worth looking at, replays them, and makes videos and comparisons of them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from omni_loop.env import Env
from omni_loop.errors import ConfigError, MissingExtra, OmniLoopError

from .imagined import Imagined, video_frames
from .predictions import Comparison, by_horizon, compare, select, side_by_side
from .replay import Replay, ReplayMismatch, replay
from .results import EpisodeResult, Prediction
from .runner import Run
from .suite import EvalSuite
from .video import ACCENT, BAD, GOOD, Frame, caption, write_mp4

log = logging.getLogger(__name__)

_SAID = 5  # episodes that a sentence names


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
    of them ``horizon`` (see :func:`predictions.by_horizon`).

    What there is less to see for: ``unseen``, by why what could not be shown; ``without``, why nothing more was tried;
    ``strayed``, what is said of those of the ``replayed`` episodes that went another way than in the run.
    """

    videos: list[Video] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    compared: int = 0
    horizon: list[dict[str, float]] = field(default_factory=list)
    unseen: dict[str, list[str]] = field(default_factory=dict)
    without: str = ""
    strayed: list[str] = field(default_factory=list)
    replayed: int = 0

    @property
    def missing(self) -> list[str]:
        """A sentence for each reason why there is less to see."""
        said = [f"No videos: {self.without}"] if self.without else []
        return said + [f"Not shown: {_some(what, ', ')}: {why}" for why, what in self.unseen.items()]

    @property
    def finding(self) -> str:
        """What replays say against the env; empty: nothing."""
        if not self.strayed:
            return ""
        return (
            f"The env does not repeat itself: of {self.replayed} episodes replayed from seed and actions, "
            f"{len(self.strayed)} went another way than in the run. Its outcomes stand; the same seeds again may come "
            f"out otherwise, and pairs of them show less. {_some(self.strayed, '; ')}"
        )

    def lacks(self, what: str, error: Exception) -> None:
        """``what`` cannot be shown, because of ``error``."""
        why = f"{type(error).__name__}: {error}"
        if isinstance(error, OmniLoopError):
            why = f"{error.reason}: {error.text}"
        else:  # perhaps no more than an env that is made without pictures: no traceback for everybody
            log.debug("%s cannot be shown", what, exc_info=error)
        self.unseen.setdefault(why, []).append(what)


def _some(said: Sequence[str], between: str) -> str:
    rest = len(said) - _SAID
    return between.join(said[:_SAID]) + (f" and {rest} more" if rest > 0 else "")


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
    """Replay what is needed and write the videos to ``folder``. What cannot be shown, for whatever reason, is said in
    the answer: the numbers stand."""
    suite, media = run.suite, Media()
    folder.mkdir(parents=True, exist_ok=True)
    filmed = choose(run.results, suite.videos)
    compared = [r for r in run.results if r.predictions]
    wanted = {(r.task, r.episode): r for r in (*filmed, *compared)}
    viewer = _Viewer(suite, folder, media, {(r.task, r.episode) for r in filmed})
    try:
        for task in dict.fromkeys(r.task for r in wanted.values()):
            viewer.see(task, [r for r in wanted.values() if r.task == task])
    except MissingExtra as e:  # of this machine: the next one would lack it too
        media.without = e.text
    every = viewer.compared
    media.comparisons, media.horizon = select(every, suite.predictions.keep), by_horizon(every)
    media.compared = len(every)
    if media.comparisons:
        try:
            media.videos.append(_comparison_video(media.comparisons, folder))
        except Exception as e:
            media.lacks("frames predicted beside real ones", e)
    return media


class _Viewer:
    """Replays episodes for ``media``: those ``filmed`` become videos in ``folder``, predictions are ``compared``."""

    def __init__(self, suite: EvalSuite, folder: Path, media: Media, filmed: Collection[tuple[str, int]]) -> None:
        self._suite, self._folder, self._media, self._filmed = suite, folder, media, filmed
        self.compared: list[Comparison] = []

    def see(self, task: str, results: Iterable[EpisodeResult]) -> None:
        """All ``results`` of ``task``.

        Raises:
            MissingExtra: this machine cannot draw.
        """
        env: Env | None = None
        try:
            for result in results:
                try:
                    env = env or self._suite.make_env(task)
                    self._look(env, result)
                except MissingExtra:
                    raise
                except Exception as e:
                    self._media.lacks(_name(result), e)
                    broken, env = env, None  # nobody knows in which state it is left
                    self._close(broken, task)
        finally:
            self._close(env, task)

    def _look(self, env: Env, result: EpisodeResult) -> None:
        suite, media = self._suite, self._media
        try:
            shown = replay(env, result, suite.frame_key)
        except ReplayMismatch as e:
            media.strayed.append(f"{result.task}: {e.text}" if result.task else e.text)
            media.replayed += 1
            return
        media.replayed += 1
        self.compared += [_compared(p, shown, suite) for p in result.predictions]
        if (result.task, result.episode) in self._filmed:
            media.videos.append(_episode_video(shown, suite, env.score, env.control_hz, self._folder))

    def _close(self, env: Env | None, task: str) -> None:
        try:
            if env is not None:
                env.close()
        except Exception as e:
            self._media.lacks(f"the end of the env{f' of {task}' if task else ''}", e)


def _name(result: EpisodeResult) -> str:
    return f"{result.task} seed {result.seed}" if result.task else f"seed {result.seed}"


def _compared(prediction: Prediction, shown: Replay, suite: EvalSuite) -> Comparison:
    """Raises :class:`ConfigError`: the suite's frame key is not what the world model predicts."""
    made = compare(prediction, shown)
    if (made.predicted.shape, made.predicted.dtype) != (made.real.shape, made.real.dtype):
        raise ConfigError(
            f"frame_key {suite.frame_key!r} is {made.real.dtype}{list(made.real.shape[1:])}, "
            f"predicted frames are {made.predicted.dtype}{list(made.predicted.shape[1:])}"
        )
    return made


def _comparison_video(comparisons: Sequence[Comparison], folder: Path) -> Video:
    path = write_mp4(folder / "predicted-beside-real.mp4", side_by_side(comparisons), fps=4)
    note = "left: what happened; right: what the world model predicted for the same actions"
    return Video(path, "Predicted beside real", note)


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
