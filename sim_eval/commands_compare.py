"""``omni-loop eval compare`` and ``leaderboard``: finished runs beside each other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omni_loop.cli import output
from omni_loop.errors import InvalidInput

from . import compare, compare_page, leaderboard, leaderboard_page, pages, stored


def compare_command(
    a: Annotated[Path, typer.Argument(help="Folder of a run.")],
    b: Annotated[Path, typer.Argument(help="Folder of another run of the same episodes.")],
    level: Annotated[float, typer.Option(help="Of the intervals; p is judged at 1 - level.")] = 0.95,
    interval: Annotated[str, typer.Option(help="Of the rates: wilson, clopper-pearson or jeffreys.")] = "wilson",
    out: Annotated[Path, typer.Option(help="Folder for index.html and comparison.json.")] = Path("runs/compare"),
) -> None:
    """Compare two runs on the same seeds: rates, their difference with an interval, exact McNemar.

    Per task and over all tasks, and on which seeds they differ. Runs of other envs or seeds are refused.

    omni-loop eval compare runs/small runs/image --out runs/compare
    """
    console = Console()
    one, other = stored.load(a, "A"), stored.load(b, "B")
    found = compare.compare(one, other, level, interval)
    output.folder(out, "--out", "index.html", "comparison.json")
    data = compare.to_json(found, one, other)
    (out / "comparison.json").write_text(json.dumps(data, indent=1) + "\n")
    page = pages.write(out / "index.html", compare_page.render(found, one, other, out / "index.html"))
    console.print(compare_page.table(found, one, other))
    console.print(compare.verdict(found.pooled, compare_page.names(one, other), level), markup=False, highlight=False)
    for note in compare_page.notes(found, one, other):
        console.print(f"[yellow]{note}[/]")
    console.print(f"page: {page}", markup=False, soft_wrap=True)


def leaderboard_command(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or folders of such folders.")],
    level: Annotated[float, typer.Option(help="Of the intervals; differences are judged at 1 - level.")] = 0.95,
    interval: Annotated[str, typer.Option(help="wilson, clopper-pearson or jeffreys.")] = "wilson",
    title: Annotated[str, typer.Option(help="Of the page.")] = "Success rates",
    out: Annotated[Path, typer.Option(help="The page; a .json of the same name is written beside it.")] = Path(
        "runs/leaderboard.html"
    ),
) -> None:
    """One page over runs: sorted, with intervals, ties marked by paired tests on the same seeds, latency too.

    omni-loop eval leaderboard runs/shipped --out runs/leaderboard.html
    """
    console = Console()
    if out.suffix == ".json":
        raise InvalidInput(f"--out: {out} is the name of the JSON beside the page: name the page, such as board.html")
    found = leaderboard.boards(leaderboard.read(runs), level, interval)
    data = out.with_suffix(".json")
    output.file(out, "--out")
    output.file(data, "--out")
    data.write_text(json.dumps(leaderboard.to_json(found), indent=1) + "\n")
    pages.write(out, leaderboard_page.render(found, out, title, level=level))
    for table in leaderboard_page.tables(found):
        console.print(table)
    console.print(f"page: {out}", markup=False, soft_wrap=True)
