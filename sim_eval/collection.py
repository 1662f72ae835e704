"""Collections: suites run one after the other and shown on one page (``suites`` of a file in ``configs/eval``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field, field_validator

from omni_loop.config import Section, load, parse, shipped
from omni_loop.errors import ConfigError, OmniLoopError, nearest

from . import leaderboard, leaderboard_page, pages, stored
from .suite import EvalSuite, load_suite


class Collection(Section):
    """Suites by name, or by path. Each is run into a folder of its name."""

    name: str
    description: str = ""
    suites: tuple[str, ...] = Field(min_length=1)

    @field_validator("suites")
    @classmethod
    def _stand_once(cls, suites: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(suites)) != len(suites):
            raise ValueError(f"one stands twice in {list(suites)}")
        return suites


def is_collection(path_or_name: str) -> bool:
    """Whether it is a file, or a shipped name, that lists suites. What cannot be read is none."""
    try:
        if "/" in path_or_name or path_or_name.endswith((".yaml", ".yml")):
            return "suites" in parse(Path(path_or_name).read_text(encoding="utf-8"), path_or_name)
        if path_or_name not in shipped("eval"):
            return False
        load(Collection, path_or_name, "eval")
    except (OmniLoopError, OSError, ValueError):
        return False
    return True


def load_collection(path_or_name: str) -> tuple[Collection, list[EvalSuite]]:
    """A collection and its suites.

    Raises:
        UnknownName: no shipped collection, or no shipped suite, has that name.
        ConfigError: it, or one of its suites, does not validate; two suites have one name.
    """
    collection = load(Collection, path_or_name, "eval")
    suites = [load_suite(name) for name in collection.suites]
    names = [suite.name for suite in suites]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"{collection.name}: two suites are called {twice!r}, and would be run into one folder")
    return collection, suites


def chosen(suites: Sequence[EvalSuite], only: Sequence[str]) -> list[EvalSuite]:
    """Those named in ``only``; without names all."""
    known = [suite.name for suite in suites]
    for name in only:
        if name not in known:
            raise ConfigError(f"--only: the collection has no suite {name!r}.{nearest(name, known)}")
    return [suite for suite in suites if not only or suite.name in only]


def run(
    collection: Collection,
    suites: Sequence[EvalSuite],
    out: Path,
    evaluate: Callable[[EvalSuite, Path], int],
) -> dict[str, str]:
    """Run ``suites`` into folders of ``out`` and write its page after each.

    Args:
        evaluate: runs one into its folder, going on with what is there; returns how many episodes broke.

    Returns:
        What did not run, broke, or lies in ``out`` and cannot be read, by suite or folder: why. None of it keeps the
        others from running.
    """
    why: dict[str, str] = {}
    for suite in suites:
        try:
            if broken := evaluate(suite, out / suite.name):
                why[suite.name] = f"{broken} episodes broke"
        except OmniLoopError as e:
            why[suite.name] = e.text
        write_page(collection, out, why)
    return found_in(out)[1] | why


def found_in(out: Path) -> tuple[list[stored.StoredRun], dict[str, str]]:
    """The runs in folders of ``out``, and why those that cannot be read cannot, by name."""
    runs: list[stored.StoredRun] = []
    unread: dict[str, str] = {}
    for path in sorted(out.glob("*/episodes.json")):
        try:
            runs.append(stored.load(path.parent))
        except ConfigError as e:
            unread[path.parent.name] = e.text
    return runs, unread


def write_page(collection: Collection, out: Path, why: dict[str, str]) -> list[leaderboard.Board]:
    """``index.html`` over the runs in ``out``; returns what it shows."""
    runs, unread = found_in(out)
    boards = leaderboard.boards(runs)
    warnings = [f"{name}: {reason}" for name, reason in (unread | why).items()]
    page = out / "index.html"
    pages.write(page, leaderboard_page.render(boards, page, collection.name, collection.description, warnings))
    return boards
