"""A leaderboard for people: a table in the terminal and one page with links to each run's own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

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
    """One for every board."""
    for board in boards:
        tasks = f", {len(board.tasks)} tasks" if len(board.tasks) > 1 else ""
        out = Table(title=escape(f"{board.env}{tasks}"), title_justify="left")
        for column in ("#", "run", "success", "interval", "steps", "tick p50 ms", "p99", "misses", "not told from"):
            left = column in ("run", "not told from")
            out.add_column(column, justify="left" if left else "right", overflow="fold")
        for entry in board.entries:
            out.add_row(*_cells(entry))
        yield out


def _cells(e: Entry) -> tuple[str, ...]:
    return (
        str(e.rank),
        escape(e.name),
        f"{e.successes}/{e.episodes} = {pages.percent(e.rate)} %",
        escape(str(e.bounds)),
        f"{e.steps:.0f}",
        f"{e.tick_p50_ms:.1f}",
        f"{e.tick_p99_ms:.1f}",
        str(e.deadline_misses),
        escape(", ".join(e.alike)),
    )
