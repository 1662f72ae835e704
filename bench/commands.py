"""``omni-loop bench``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from omni_loop.cli import output
from omni_loop.errors import ConfigError, InvalidInput

from . import rows as rows_
from .rows import BENCHES, Result, Settings

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
_VERDICT = {True: "[green]pass[/]", False: "[bold red]fail[/]", None: ""}


@app.command()
def bench(
    name: Annotated[
        str | None,
        typer.Argument(help=f"{', '.join(BENCHES)}. None: list all rows with their bars.", show_default=False),
    ] = None,
    rows: Annotated[str, typer.Option(help="Rows or groups to run, separated by commas; none: all.")] = "",
    json: Annotated[Path | None, typer.Option(help="File for the rows as a JSON list.", show_default=False)] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="PNG: bars of the rows (**state**, **world** of rows kv), or imagined frames (**world**).",
            show_default=False,
        ),
    ] = None,
    checkpoints: Annotated[
        Path | None, typer.Option(help="Folder with codec, world, context and act, instead of the shipped ones.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Demonstrations with a split `test`.  [default: data/pusht, else a small set is made]"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="See that the rows run: too few repetitions to measure or judge anything.")
    ] = False,
    no_fail: Annotated[bool, typer.Option("--no-fail", help="End with 0 although a row missed its bar.")] = False,
) -> None:
    """Measure what the project claims, row by row, each against a baseline or a bar.

    Ends with 1 when a row missed its bar. Timing rows want an otherwise idle machine.

    omni-loop bench world --rows quality --json out/quality.json
    """
    console = Console()
    if name is None:
        console.print(_listing())
        return
    chosen, wanted = rows_.find(name), [part.strip() for part in rows.split(",") if part.strip()]
    chosen.select(wanted)  # a wrong name is said before anything is loaded
    if picture is not None and chosen.picture is None:
        raise InvalidInput(f"bench {name!r} makes no picture; 'state' and 'world' do")
    _check(json, picture, checkpoints)
    with console.status(f"bench {name}") as status:

        def say(text: str) -> None:
            status.update(f"bench {name}: {text}")

        settings = Settings(str(checkpoints or ""), data, quick, say)
        results = chosen.run(wanted, settings, picture)
    console.print(_table(name, results, quick))
    if json is not None:
        rows_.write(json, results)
    if picture is not None:
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)
    if not no_fail and any(result.passed is False for result in results):
        raise typer.Exit(1)


def _check(json: Path | None, picture: Path | None, checkpoints: Path | None) -> None:
    """Raises :class:`ConfigError` for a path that cannot do, before anything is measured."""
    if checkpoints is not None and not checkpoints.is_dir():
        raise ConfigError(f"--checkpoints: no folder at {checkpoints}")
    if picture is not None and picture.suffix.lower() != ".png":
        raise ConfigError(f"--picture: {picture} does not end in .png")
    for option, path in (("--json", json), ("--picture", picture)):
        if path is not None:
            output.file(path, option)


def _listing() -> Table:
    """Every row of every bench, with its bar."""
    out = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("row", "bar", "what"):
        out.add_column(column, no_wrap=column != "what")
    for name, about in BENCHES.items():
        out.add_row(f"[bold]{name}[/]", "", f"[bold]{about}[/]")
        for row in rows_.find(name).rows.values():
            group = "" if row.group == name else f"{row.group}: "
            out.add_row(f"  {row.name}", str(row.bar or ""), f"{group}{row.what}")
    return out


def _table(name: str, results: Sequence[Result], quick: bool) -> Table:
    caption = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    if quick:
        caption += "; quick: figures mean nothing and are not judged"
    # Without lines it fits a terminal of 80 columns.
    look: dict[str, Any] = {"box": None, "padding": (0, 2, 0, 0), "pad_edge": False}
    out = Table(title=f"bench {name}", title_justify="left", caption=caption, caption_justify="left", **look)
    for column in ("row", "ours", "baseline", "unit", "ratio", "bar", ""):
        folds = column in ("row", "bar")  # in a narrow terminal; figures and the verdict stay whole
        justify: Any = "right" if column in ("ours", "baseline", "ratio") else "left"
        out.add_column(column, justify=justify, no_wrap=not folds, overflow="fold" if folds else "ellipsis")
    for result in results:
        shown = result.as_json()
        numbers = [_number(shown[key]) for key in ("ours", "baseline", "ratio")]
        out.add_row(
            result.row.name, *numbers[:2], result.row.unit, numbers[2], shown["bar"] or "", _VERDICT[result.passed]
        )
    return out


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"
