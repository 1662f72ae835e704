"""One HTML page of a recorded episode: what was seen, done, predicted and judged, how long it took, what happened."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console

from omni_loop.cli import output
from omni_loop.errors import InvalidInput
from omni_loop.record.features import is_image
from omni_loop.record.outcomes import Outcomes
from omni_loop.record.reader import Episode, Recording
from omni_loop.record.table import Tick

from . import chart, pages
from .pages import data_uri, png_uri
from .series import MOST, Series, series
from .video import Frame, beside, caption, resize, write_mp4

_COLOURS = ("#2f6fd6", "#d9822b", "#17834f", "#c0392b", "#8e5bd0", "#0f9aa8", "#a86400", "#7d8794")
_STRIPS, _WIDTH = 8, 384  # predictions shown, spread over the episode; px of a video


def view_command(
    recording: Annotated[Path, typer.Argument(help="Folder of a recording.")],
    episode: Annotated[str, typer.Option(help="Which: a number from 0 on, or a name.")] = "0",
    out: Annotated[Path, typer.Option(help="File for the page.")] = Path("runs/episode.html"),
) -> None:
    """Show a recorded episode: one self-contained HTML page.

    Videos of the observed images, actions and progress over time, predicted frames, timings and events.

    omni-loop view runs/recorded --episode 3
    """
    read, console = Recording(recording), Console()
    chosen = read.select([episode])
    if len(chosen) != 1:
        raise InvalidInput(f"--episode: {episode!r} names {len(chosen)} episodes; one page shows one")
    output.file(out, "--out")
    with console.status("drawing"):
        page = render(chosen[0], Outcomes.read(read), read.episodes.index(chosen[0]))
    out.write_text(page, encoding="utf-8")
    console.print(f"page: {out}", markup=False, soft_wrap=True)


def render(episode: Episode, outcomes: Outcomes, index: int = 0) -> str:
    """The page as text; ``index``: the episode's number in its recording."""
    ticks, events = [], []
    for some, happened in episode.parts():
        ticks += some
        events += happened
    spec, begin = episode.spec, episode.begin
    times = [tick.result.timings.total_ms for tick in ticks]
    about = [spec.description or spec.pipeline, f"“{begin['prompt']}”" if begin["prompt"] else ""]
    videos, (charts, plotted) = _videos(episode, ticks), _charts(episode, ticks, events)
    shown = {*plotted, *(video["name"] for video in videos)}
    return pages.render(
        "recorded.html",
        title=f"{spec.pipeline}, episode {index}",
        about=", ".join(text for text in about if text),
        colours=_COLOURS,
        incomplete=episode.incomplete,
        tiles=[_outcome(outcomes.success(episode)), *_tiles(episode, ticks)],
        videos=videos,
        charts=charts,
        left_out=_left_out(episode, shown),
        strips=_strips(ticks),
        histogram=chart.histogram(times) if times else None,
        stages=_stages(ticks),
        events=_events(events, ticks),
        footer=f"{episode.name}; episode {episode.number} of session {episode.session}, began as {begin['event']} of "
        f"epoch {begin['epoch']}, spec {spec.digest[:12]}",
    )


def _outcome(success: bool | None) -> tuple[str, str, str]:
    said = {True: "succeeded", False: "did not succeed", None: "–"}[success]
    return "Outcome", said, "nobody said how it ended" if success is None else "as its driver said"


def _left_out(episode: Episode, shown: Collection[str]) -> list[str]:
    """Observation arrays that are not drawn, and why."""
    why = []
    for spec in episode.spec.observations:
        if spec.name in episode.keys and spec.name not in shown:
            shape = "×".join(str(n) if n >= 0 else "any" for n in spec.shape) or "scalar"
            reason = f"{spec.dtype} {shape}" if spec.name in episode.kept else "not recorded"
            why.append(f"{spec.name} ({reason})")
    return why


def _tiles(episode: Episode, ticks: Sequence[Tick]) -> list[tuple[str, str, str]]:
    seconds = (ticks[-1].at_ns - ticks[0].at_ns) / 1e9 if ticks else 0.0
    ops = {op: sum(tick.op == op for tick in ticks) for op in dict.fromkeys(tick.op for tick in ticks)}
    revisions = sorted({tick.result.chunk.policy_revision for tick in ticks if tick.result.chunk})
    return [
        ("Ticks", str(len(ticks)), ", ".join(f"{n} {op}" for op, n in ops.items())),
        ("Seed", str(episode.begin["seed"]), f"control at {episode.spec.control_hz:g} Hz"),
        ("Wall time", f"{seconds:.1f} s", f"{episode.lost} ticks lost" if episode.lost else "nothing lost"),
        ("Policy revision", ", ".join(revisions)[:24] or "–", f"chunks of {episode.spec.horizon} steps"),
    ]


def _observed(tick: Tick, key: str) -> Iterator[tuple[int, Any]]:
    """Steps and values of a key in one tick; a recondition has several."""
    if key in tick.arrays:
        array = tick.arrays[key]
        rows = array if tick.op == "recondition" else array[None]
        yield from ((tick.step + i, row) for i, row in enumerate(rows))


def _videos(episode: Episode, ticks: Sequence[Tick]) -> list[dict[str, str]]:
    videos = []
    for spec in episode.spec.observations:
        seen = [
            (step, row, tick)
            for tick in ticks
            for step, row in _observed(tick, spec.name)
            if is_image(row.dtype.name, row.shape)
        ]
        if not seen:
            continue
        steps = np.diff([step for step, _, _ in seen])
        apart = int(np.median(steps)) if len(steps) else 1
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "video.mp4"
            write_mp4(path, (_shown(*one) for one in seen), fps=max(1.0, episode.spec.control_hz / max(apart, 1)))
            note = f"{len(seen)} images of {seen[0][1].shape[1]}×{seen[0][1].shape[0]}, real time"
            videos.append({"name": spec.name, "note": note, "src": data_uri(path.read_bytes(), "video/mp4")})
    return videos


def _shown(step: int, image: Frame, tick: Tick) -> Frame:
    progress = tick.result.progress
    return caption(resize(image, _WIDTH), f"step {step}", f"seq {tick.seq}", progress.progress if progress else None)


def _charts(
    episode: Episode, ticks: Sequence[Tick], events: Sequence[Mapping[str, Any]]
) -> tuple[list[tuple[str, str, Series]], set[str]]:
    """What is drawn, and the observation arrays among it."""
    marks = [event["step"] for event in events if event["event"] == "rewind"]
    steps, rows = _executed(ticks)
    actions = {f"{episode.spec.action.name} {i}": (steps, rows[:, i]) for i in range(min(rows.shape[1], MOST))}
    judged = [p for tick in ticks if (p := tick.result.progress) is not None]
    at = [p.step for p in judged]
    progress = {"progress": (at, [p.progress for p in judged]), "done": (at, [p.done for p in judged])}
    found = [("Executed actions", episode.spec.action.unit, actions), ("Progress", "", progress)]
    plotted = set()
    for spec in episode.spec.observations:
        flat = [(s, v.reshape(-1)) for tick in ticks for s, v in _observed(tick, spec.name) if v.size <= MOST]
        if flat and len({len(v) for _, v in flat}) == 1:
            values = np.stack([v for _, v in flat])
            lines = {f"{spec.name} {i}": ([s for s, _ in flat], values[:, i]) for i in range(values.shape[1])}
            found.append((spec.name, spec.unit, lines))
            plotted.add(spec.name)
    drawn = [(name, unit, made) for name, unit, lines in found if (made := series(lines, marks)) is not None]
    return drawn, plotted & {name for name, _, _ in drawn}


def _executed(ticks: Sequence[Tick]) -> tuple[list[int], Any]:
    """Steps and ``float32[n, action_dim]`` of what was really executed."""
    steps: list[int] = []
    rows: list[Any] = []
    for tick in ticks:
        if tick.executed is not None and len(tick.executed):
            last = tick.step + max(0, len(next(iter(tick.arrays.values()), ())) - 1 if tick.op == "recondition" else 0)
            steps += range(last - len(tick.executed), last)
            rows.append(tick.executed)
    return steps, np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)


def _strips(ticks: Sequence[Tick]) -> list[dict[str, Any]]:
    predicted = [f for tick in ticks if (f := tick.result.frames) is not None and len(f.frames)]
    chosen = predicted[:: -(-len(predicted) // _STRIPS)] if predicted else []
    return [
        {
            "seq": frames.seq,
            "first": frames.first_step,
            "last": frames.first_step + len(frames.frames) - 1,
            "src": png_uri(beside(list(frames.frames[:16]), gap=2)),
        }
        for frames in chosen
    ]


def _stages(ticks: Sequence[Tick]) -> list[tuple[str, float, float]]:
    """Median and 99th percentile of the total, the queue and each stage."""
    times: dict[str, list[float]] = {}
    for tick in ticks:
        t = tick.result.timings
        for name, ms in (("total", t.total_ms), ("queue", t.queue_ms), *t.stages_ms.items()):
            times.setdefault(name, []).append(ms)
    return [(name, float(np.median(ms)), float(np.percentile(ms, 99))) for name, ms in times.items()]


def _events(events: Sequence[Mapping[str, Any]], ticks: Sequence[Tick]) -> list[dict[str, str]]:
    began = min([t.at_ns for t in ticks] + [e["at_ns"] for e in events if "at_ns" in e], default=0)
    told = []
    for event in events:
        rest = {k: v for k, v in event.items() if k not in ("event", "order", "at_ns", "code", "retryable")}
        after = f"{(event['at_ns'] - began) / 1e9:.2f}" if "at_ns" in event else ""
        name = event["event"]
        if name == "ended":  # why it did is its name: closed, reset
            name = rest.pop("why")
        text = ", ".join(f"{key} {value}" for key, value in rest.items() if value != "")
        told.append({"after": after, "name": name, "text": text})
    return told
