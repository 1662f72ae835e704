"""The page and the numbers of a twin experiment: what agrees, how far ahead, how well calibrated."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from markupsafe import Markup

from . import measures, pages
from .calibration import Bin, Reliability, Tracking
from .correlation import Agreement
from .horizon import Step
from .measures import PAIRS, Measure, Strength
from .plays import Plays
from .plots import Axis, Points, plot
from .twin import BRANCH, IMAGINED, IMAGINED_WHOLE, WHOLE
from .twin_config import TwinConfig

BAR = 0.8  # r that a stand-in for the simulator should reach
COLOURS = (
    "#2f6fd6", "#d9822b", "#17834f", "#c0392b", "#8e5bd0", "#0f9aa8", "#a86400", "#7d8794", "#d45a9a", "#5a8f00",
)  # fmt: skip


@dataclass(frozen=True)
class Findings:
    """Everything the page shows. ``lpips``: why it was not measured, or empty."""

    config: TwinConfig
    strengths: tuple[Strength, ...]
    agreements: Mapping[str, Agreement]
    horizon: tuple[Step, ...]
    calibration: tuple[Reliability, Tracking] | None
    lpips: str = ""

    def numbers(self) -> dict[str, Any]:
        """For ``twin.json``."""
        made = {
            "name": self.config.name,
            "config": self.config.model_dump(mode="json"),
            "measure": words(self.config.measure),
            "policies": [s.row() for s in self.strengths],
            "agreement": {name: {"title": PAIRS[name][0], **measures.plain(a)} for name, a in self.agreements.items()},
            "horizon": [step.row() for step in self.horizon],
            "lpips": self.lpips or "measured",
            "calibration": None,
            "version": metadata.version("omni-loop"),
        }
        if self.calibration is not None:
            done, progress = self.calibration
            made["calibration"] = {"done": measures.plain(done), "progress": measures.plain(progress)}
        return made


def findings(config: TwinConfig, plays: Plays, steps: Iterable[Step], lpips: str = "") -> Findings:
    """What the plays say of the config's policies."""
    strengths = tuple(
        measures.strength(
            p.name,
            config.measure,
            *(_of(config, plays, p.name, place) for place in (WHOLE, IMAGINED_WHOLE, BRANCH, IMAGINED)),
        )
        for p in config.policies
    )
    heard = [play for p in config.policies for play in _of(config, plays, p.name, WHOLE)]
    calibration = measures.calibrated(heard, config.success)
    return Findings(config, strengths, measures.agreements(strengths), tuple(steps), calibration, lpips)


def _of(config: TwinConfig, plays: Plays, policy: str, place: str) -> list[Any]:
    """Of the config's seeds: a folder may hold plays of more."""
    count = {WHOLE: config.episodes, IMAGINED_WHOLE: config.imagined_episodes}.get(place, config.runs)
    seeds = range(config.first_seed, config.first_seed + count)
    return [p for p in plays.of(policy, place) if p.seed in seeds]


def write(found: Findings, folder: Path) -> Path:
    """``twin.json`` and ``twin.html`` in ``folder``; returns the page."""
    numbers = found.numbers()
    (folder / "twin.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    return pages.write(folder / "twin.html", render(found, numbers))


def render(found: Findings, numbers: Mapping[str, Any]) -> str:
    """The page as text."""
    return pages.render(
        "twin.html",
        config=found.config,
        colours=COLOURS,
        measure=words(found.config.measure),
        verdict=verdict(found.agreements),
        agreements=[row(name, a) for name, a in found.agreements.items()],
        strengths=numbers["policies"],
        plots=_scatter(found.strengths),
        horizon=numbers["horizon"],
        curves=_curves(found.horizon),
        lpips=numbers["lpips"],
        calibration=numbers["calibration"],
        reliability=_reliability(found.calibration),
        version=numbers["version"],
    )


def words(measure: Measure) -> str:
    """The measure in words."""
    ahead = f"{measure.steps} steps from a branch"
    return {
        "gain": f"score after {ahead}, minus the score there, mean over branches",
        "best": f"highest score within {ahead}, minus the score there, mean over branches",
        "rise": f"share of branches whose score rises by {measure.least:g} or more within {ahead}",
    }[measure.kind]


def verdict(agreements: Mapping[str, Agreement]) -> str:
    """One sentence a reader can act on."""
    whole, told = agreements.get("whole"), agreements.get("success")
    parts = []
    if whole is not None and math.isnan(whole.r):
        parts.append("Not from whole imagined episodes: they end the same for every policy.")
    if told is not None and not math.isnan(told.r):
        good = "orders and spaces" if told.r >= BAR else "does not order well enough"
        parts.append(
            f"What is imagined over a few steps from branches {good} {told.n} policies by real success: "
            f"r = {told.r:.2f} ({'at least' if told.r >= BAR else 'below'} {BAR}), MMRV {told.mmrv:.3f}."
        )
    same = agreements.get("branches")
    if same is not None and not math.isnan(same.r):
        parts.append(f"From the same branches both places give r = {same.r:.2f}, MMRV {same.mmrv:.3f}.")
    return " ".join(parts) or "There are too few plays to say."


def row(name: str, a: Agreement) -> dict[str, Any]:
    def span(low: float, high: float) -> str:
        return "–" if math.isnan(low) else f"{low:.2f} to {high:.2f}"

    known = not math.isnan(a.r)
    return {
        "title": PAIRS[name][0],
        "n": a.n,
        "r": f"{a.r:.3f}" if known else "–",
        "fisher": span(a.low, a.high) if known else "–",
        "sampled": span(a.sampled_low, a.sampled_high) if known else "–",
        "mmrv": f"{a.mmrv:.3f}",
    }


def _scatter(strengths: Sequence[Strength]) -> list[dict[str, Any]]:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    played = [s for s in strengths if s.real and s.imagined and s.whole]
    if not played:
        return []
    imagined = {s.name: mean(s.imagined) for s in played}
    x = Axis.around("measure, imagined", list(imagined.values()), 0.005)
    made = []
    for title, label, values, y in (
        ("Success of whole real episodes over the imagined measure", "success, real", "whole", Axis("", -0.04, 1.04)),
        ("The measure from the same branches: real over imagined", "measure, real", "real", None),
    ):
        found = {s.name: mean(getattr(s, values)) for s in played}
        axis = Axis(label, y.low, y.high) if y else Axis.around(label, list(found.values()), 0.005)
        dots = {name: [(imagined[name], found[name])] for name in found}
        made.append({"title": title, "svg": plot(dots, x, axis, lines=False, diagonal=y is None)})
    return made


def _curves(steps: Sequence[Step]) -> list[dict[str, Any]]:
    if not steps:
        return []
    groups: list[tuple[str, dict[str, str]]] = [
        ("PSNR, dB", {"predicted": "psnr", "last real frame": "copy_psnr"}),
        ("SSIM", {"predicted": "ssim", "last real frame": "copy_ssim"}),
        (
            "Agent in the predicted frame, px from the real one",
            {"imagined": "agent", "under other actions": "agent_other", "if it stayed": "agent_still"},
        ),
        ("Agent, px from the commanded place", {"imagined": "to_command", "real": "real_to_command"}),
    ]
    if steps[0].lpips is not None:
        groups.append(("LPIPS", {"predicted": "lpips", "last real frame": "copy_lpips"}))
    x, made = Axis("steps ahead", 0.5, steps[-1].ahead + 0.5), []
    for title, lines in groups:
        series: dict[str, Points] = {n: [(s.ahead, float(getattr(s, key))) for s in steps] for n, key in lines.items()}
        y = Axis.around(title, [v for points in series.values() for _, v in points], 0.01)
        made.append({"title": title, "svg": plot(series, x, y), "names": list(series)})
    return made


def _reliability(found: tuple[Reliability, Tracking] | None) -> list[dict[str, Any]]:
    if found is None:
        return []

    def curve(title: str, said: str, bins: Sequence[Bin]) -> dict[str, Any]:
        points = {said: [(b.said, b.true) for b in bins]}
        svg: Markup = plot(points, Axis(said, -0.03, 1.03), Axis("true", -0.03, 1.03), diagonal=True)
        counts = ", ".join(f"{b.n} at {b.said:.2f}" for b in bins)
        return {"title": f"{title} Ticks: {counts}.", "svg": svg}

    done, progress = found
    return [
        curve("How often it was done, over the probability that was said.", "probability of done", done.bins),
        curve("True score over the progress that was said.", "progress", progress.bins),
    ]
