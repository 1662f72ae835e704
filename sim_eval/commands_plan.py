"""``omni-loop eval --plan``: how many episodes a comparison takes."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from omni_loop.cli import output
from omni_loop.errors import InvalidInput

from . import power as power_
from .power import Pairing

_CORRELATIONS = (0.0, 0.3, 0.6)  # shown when nothing is known of how the two go together
_LEAST = 1e-6  # of an option that is a probability: nearer to 0 or 1 nobody plans
_SHOWN = (50, 100, 200, 500)  # episodes whose power is shown


def plan_command(
    low: Annotated[float, typer.Option("--from", help="Success rate of one policy, 0 to 1.")] = 0.6,
    high: Annotated[float, typer.Option("--to", help="Success rate of the other.")] = 0.7,
    power: Annotated[float, typer.Option(help="Probability with which the difference shall be seen.")] = 0.8,
    alpha: Annotated[float, typer.Option(help="Probability of seeing one where there is none.")] = 0.05,
    paired: Annotated[bool, typer.Option("--paired", help="Only runs on the same seeds.")] = False,
    correlation: Annotated[
        float | None,
        typer.Option(help="Of the two outcomes of a seed (phi).  [default: several]", show_default=False),
    ] = None,
    discordant: Annotated[
        float | None, typer.Option(help="Instead: share of seeds on which only one succeeds.", show_default=False)
    ] = None,
    json: Annotated[Path | None, typer.Option(help="A file for the same as JSON.", show_default=False)] = None,
) -> None:
    """How many episodes does it take to see a difference of two success rates?

    For runs on other seeds (Fisher's exact test), on the same seeds (exact McNemar), and for a comparison that stops
    when it is decided (`omni-loop eval ab`): the most pairs it must be allowed, and how many it takes on average.

    omni-loop eval --plan --from 0.6 --to 0.7 --power 0.8
    """
    for option, value in (("--power", power), ("--alpha", alpha)):
        if not _LEAST <= value <= 1 - _LEAST:
            raise InvalidInput(f"{option}: {value:g} is no probability between {_LEAST:g} and 1 - {_LEAST:g}")
    if json is not None:
        output.file(json, "--json")
    pairs = _pairings(low, high, correlation, discordant)
    lines = [] if paired else [_independent(low, high, power, alpha)]
    lines += [line for pair in pairs for line in _paired(pair, power, alpha)]
    console = Console()
    console.print(_table(lines, low, high, power, alpha))
    if any(line["approximated"] for line in lines):
        console.print("~ approximated: too many episodes to sum over all outcomes", highlight=False)
    if json is not None:
        wanted = {"from": low, "to": high, "power": power, "alpha": alpha}
        json.write_text(json_.dumps({**wanted, "designs": lines}, indent=1) + "\n")


def _pairings(a: float, b: float, correlation: float | None, discordant: float | None) -> list[Pairing]:
    """What was asked for, or of several correlations those that rates ``a`` and ``b`` allow."""
    if correlation is not None or discordant is not None:
        return [power_.pairing(a, b, correlation=correlation, differing=discordant)]
    found = [power_.pairing(a, b)]
    for phi in _CORRELATIONS[1:]:
        try:
            found.append(power_.pairing(a, b, correlation=phi))
        except InvalidInput:
            break  # nor a higher one
    return found


def _independent(a: float, b: float, power: float, alpha: float) -> dict[str, Any]:
    guess = power_.fisher_approximated(a, b, power, alpha)
    exact = guess <= power_.EXACT
    episodes = power_.least(lambda n: power_.fisher_power(a, b, n, alpha) >= power, guess) if exact else guess
    seen = {n: power_.fisher_power(a, b, n, alpha) for n in _SHOWN}
    return _line("Fisher exact", None, episodes, None, seen, approximated=not exact)


def _paired(pair: Pairing, power: float, alpha: float) -> list[dict[str, Any]]:
    fixed = power_.least(lambda n: power_.mcnemar_power(pair, n, alpha) >= power)
    seen = {n: power_.mcnemar_power(pair, n, alpha) for n in _SHOWN}
    lines = [_line("McNemar exact", pair, fixed, None, seen)]
    if fixed is None or fixed > 4000:  # summing over all paths takes minutes then
        return lines
    alive = power_.survival(pair, max(3 * fixed, _SHOWN[-1]), alpha)
    enough = np.flatnonzero(1 - alive >= power)
    most = int(enough[0]) if len(enough) else None
    mean = None if most is None else float(alive[:most].sum())
    return [*lines, _line("sequential", pair, most, mean, {n: float(1 - alive[n]) for n in _SHOWN})]


def _line(
    test: str,
    pair: Pairing | None,
    episodes: int | None,
    mean: float | None,
    power: dict[int, float],
    approximated: bool = False,
) -> dict[str, Any]:
    """``pair``: None for runs on other seeds. ``episodes``: that a run must be allowed; ``mean``: that it takes."""
    return {
        "seeds": "other" if pair is None else "same",
        "correlation": None if pair is None else pair.correlation,
        "discordant": None if pair is None else pair.differing,
        "test": test,
        "episodes": episodes,
        "mean": mean,
        "power": power,
        "approximated": approximated,
    }


def _table(lines: list[dict[str, Any]], a: float, b: float, power: float, alpha: float) -> Table:
    out = Table(
        title=f"{a:g} against {b:g}: episodes of each policy, for power {power:g} at alpha {alpha:g}",
        title_justify="left",
        caption=f"right: power with {', '.join(map(str, _SHOWN))} episodes; differ: seeds on which only one succeeds",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for column in ("seeds", "phi", "differ", "test", "episodes", "mean", *map(str, _SHOWN)):
        left = column in ("seeds", "test")
        out.add_column(column, justify="left" if left else "right", no_wrap=True)
    for line in lines:
        most = "–" if line["episodes"] is None else f"{'~' if line['approximated'] else ''}{line['episodes']}"
        mean = "" if line["mean"] is None else f"{line['mean']:.0f}"
        pairs = ("", "") if line["seeds"] == "other" else (f"{line['correlation']:.2f}", f"{line['discordant']:.0%}")
        out.add_row(line["seeds"], *pairs, line["test"], most, mean, *(f"{p:.0%}" for p in line["power"].values()))
    return out
