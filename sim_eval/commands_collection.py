"""``omni-loop eval COLLECTION``: its suites one after the other, and one page of them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from omni_loop.cli import output

from . import collection as collection_
from . import leaderboard_page, serving
from .evaluate import evaluate
from .suite import EvalSuite


def collection_command(
    name: Annotated[str, typer.Argument(help="Shipped collection, such as **shipped**, or a path to one.")] = "shipped",
    only: Annotated[list[str] | None, typer.Option(help="Run this suite of it alone. Once per suite.")] = None,
    episodes: Annotated[int | None, typer.Option(min=1, help="Of each task, instead of each suite's number.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Episodes at a time.")] = None,
    videos: Annotated[str | None, typer.Option(help="none, outcome (one for each) or all.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew instead of going on with what --out holds.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="A folder per suite goes in here, and index.html.  [default: runs/NAME]")
    ] = None,
) -> None:
    """Run every suite of a collection and show them on one page.

    The same command again goes on where it was interrupted. A suite that cannot run here (an extra is not installed)
    is said on the page, and ends the command with 1; the others run.

    omni-loop eval shipped --out runs/shipped
    """
    console = Console()
    collection, suites = collection_.load_collection(name)
    wanted = [
        suite.changed(episodes=episodes, workers=workers, videos=videos)
        for suite in collection_.chosen(suites, only or [])
    ]
    folder = Path("runs") / collection.name if out is None else out
    output.folder(folder, "--out", "index.html")

    def one(suite: EvalSuite, into: Path) -> int:
        console.rule(suite.name)
        return evaluate(suite, into, lambda s: serving.server(s, "", console), console, fresh=fresh).broken

    why = collection_.run(collection, wanted, folder, one)
    for table in leaderboard_page.tables(collection_.write_page(collection, folder, why)):
        console.print(table)
    for suite, reason in why.items():
        console.print(f"{suite}: {reason}", style="red", markup=False)
    console.print(f"page: {folder / 'index.html'}", markup=False, soft_wrap=True)
    if why:
        raise typer.Exit(1)
