"""``omni-loop eval ab``: two policies on the same seeds until it is decided which is better."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from omni_loop.cli import output

from . import ab, compare, compare_page, evaluate, pages, serving, stored
from .api import Connect
from .sequential import SequentialTest, State
from .suite import EvalSuite, load_suite


def ab_command(
    a: Annotated[str, typer.Argument(help="Suite: shipped, or a path to one.")],
    b: Annotated[str, typer.Argument(help="Suite with the same env, tasks and seeds; the same one with --checkpoint.")],
    most: Annotated[int, typer.Option("--max", min=1, help="Pairs to give up after.")] = 200,
    alpha: Annotated[float, typer.Option(help="Probability of a wrong verdict, however often it is looked at.")] = 0.05,
    margin: Annotated[
        float, typer.Option(help="Also stop when the rates surely differ by less than this; 0: never.")
    ] = 0.0,
    checkpoint_a: Annotated[str, typer.Option(help="Serve this one for A, where a template makes the pipeline.")] = "",
    checkpoint_b: Annotated[str, typer.Option(help="Serve this one for B.")] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the first episode of both.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Episodes at a time.")] = None,
    videos: Annotated[str | None, typer.Option(help="none, outcome (one for each) or all.")] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin anew instead of going on with what --out holds.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for index.html, comparison.json and the runs a and b.  [default: runs/A-against-B]"),
    ] = None,
) -> None:
    """Which of two policies is better? Pairs are run in order and it stops when that is decided.

    The test is valid at any time, so stopping early costs nothing; a clear difference takes few pairs (40 % against
    91 %: 17 of 200 on average). Ends with 0 also when it could not be decided, with 1 when episodes broke.

    omni-loop eval ab pusht-small pusht-image --max 200
    """
    console = Console()
    suites = [load_suite(name).changed(first_seed=seed, workers=workers, videos=videos) for name in (a, b)]
    out = out or Path("runs") / f"{suites[0].name}-against-{suites[1].name}"
    test = SequentialTest(alpha, margin)
    ab.check(suites[0], suites[1])
    folders = [out / "a", out / "b"]
    output.folder(out, "--out", "index.html", "comparison.json")
    for suite, folder in zip(suites, folders, strict=True):
        evaluate.check(suite, folder)
    with _connected(suites, (checkpoint_a, checkpoint_b), console) as connects:
        sides = [ab.Side(*of, fresh=fresh) for of in zip(suites, connects, folders, strict=True)]
        with console.status("the first pairs") as status:
            last: list[State] = []

            def on_batch(episodes: int) -> None:
                before = _state(last[-1]) if last else ""
                status.update(f"{before}running up to episode {episodes} of each task")

            found = ab.contest(sides[0], sides[1], most, test, on_batch, last.append)
    done = [evaluate.save(run, folder) for run, folder in zip((found.a, found.b), folders, strict=True)]
    for one in done:
        evaluate.finish(one, console)
    _report(found, most, test, folders, out, console)
    if sum(one.broken for one in done):
        raise typer.Exit(1)


@contextmanager
def _connected(suites: list[EvalSuite], checkpoints: tuple[str, str], console: Console) -> Iterator[list[Connect]]:
    """How to reach both policies: on one server where they are served by the same deployment."""
    with ExitStack() as stack:
        first = stack.enter_context(serving.server(suites[0], "", console, checkpoints[0]))
        if checkpoints[0] == checkpoints[1] and suites[0].deployment == suites[1].deployment:
            yield [first, first]
            return
        yield [first, stack.enter_context(serving.server(suites[1], "", console, checkpoints[1]))]


def _state(s: State) -> str:
    return f"{s.pairs} pairs: only a {s.only_a}, only b {s.only_b}, p = {pages.p_value(s.p)}; "


def _report(
    found: ab.Contest, most: int, test: SequentialTest, folders: list[Path], out: Path, console: Console
) -> None:
    """Page, JSON and table of the pairs that were played."""
    one, other = (stored.load(folder) for folder in folders)
    compared = compare.any_time(compare.compare(one, other, 1 - test.alpha))
    said = ab.said(found, compare_page.names(one, other), most)
    course = compare_page.sequence_of(found.states, said, test.alpha)
    page = out / "index.html"
    pages.write(page, compare_page.render(compared, one, other, page, course))
    data = compare.to_json(compared, one, other) | {"sequential": _json(found, most, test)}
    (out / "comparison.json").write_text(json.dumps(data, indent=1) + "\n")
    console.print(compare_page.table(compared, one, other))
    p = pages.p_value(found.last.p)
    console.print(f"{said} p valid at any time: {p}.", markup=False, highlight=False)
    console.print(f"page: {page}", markup=False, soft_wrap=True)


def _json(found: ab.Contest, most: int, test: SequentialTest) -> dict[str, Any]:
    bounds = test.interval
    return {
        **asdict(found.last),
        "max": most,
        "alpha": test.alpha,
        "margin": test.margin,
        "confidence": [bounds.low, bounds.high],
    }
