"""A leaderboard for people: a table in the terminal and one page with links to each run's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich import box
from rich.markup import escape
from rich.table import Table

from . import pages
from .compare_page import link
from .leaderboard import Board, Entry


def render(
    boards: Sequence[Board],
    page: Path,
    title: str = "Success rates",
    description: str = "",
    warnings: Sequence[str] = (),
    level: float = 0.95,
) -> str:
    """The page as text; ``page``: where it will lie. ``warnings``: what is not on it, and why."""
    entries = [entry for board in boards for entry in board.entries]
    return pages.render(
        "leaderboard.html",
        title=title,
        description=description,
        warnings=warnings,
        boards=boards,
        level=f"{100 * level:g}",
        links={entry.name: link(entry.run.folder / "report.html", page) for entry in entries},
    )


def tables(boards: Sequence[Board]) -> Iterator[Table]:
    """One for every board; columns that would be empty are left out."""
    for board in boards:
        misses, ties = any(e.deadline_misses for e in board.entries), any(e.alike for e in board.entries)
        broken, others = any(e.broken for e in board.entries), any(e.unpaired for e in board.entries)
        tasks = f", {len(board.tasks)} tasks" if len(board.tasks) > 1 else ""
        out = Table(
            title=escape(f"{board.env}{tasks}"), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
        )
        out.add_column("#", justify="right")
        out.add_column("run", overflow="fold")
        for column in ("success", "%", "interval", "steps", "tick ms", "p99"):
            out.add_column(column, justify="right", no_wrap=True)
        for column in (*(["misses"] if misses else []), *(["broke"] if broken else [])):
            out.add_column(column, justify="right", no_wrap=True)
        for column in (*(["not told from"] if ties else []), *(["other episodes than"] if others else [])):
            out.add_column(column, overflow="fold")
        for e in board.entries:
            counts = ([str(e.deadline_misses)] if misses else []) + ([str(e.broken)] if broken else [])
            told = ([", ".join(e.alike)] if ties else []) + ([", ".join(e.unpaired)] if others else [])
            shared = e.alike and sum(other.rank == e.rank for other in board.entries) > 1  # as on the page
            out.add_row(f"{'=' if shared else ''}{e.rank}", escape(e.name), *_cells(e), *counts, *map(escape, told))
        yield out


def _cells(e: Entry) -> tuple[str, ...]:
    return (
        f"{e.successes}/{e.episodes}",
        pages.percent(e.rate),
        escape(str(e.bounds)),
        f"{e.steps:.0f}",
        f"{e.tick_p50_ms:.1f}",
        f"{e.tick_p99_ms:.1f}",
    )
