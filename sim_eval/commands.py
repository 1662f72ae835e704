"""``omni-loop eval`` and ``omni-loop demo``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from omni_loop.cli import connection, output
from omni_loop.client import Tls
from omni_loop.config import shipped

from . import media as media_
from . import report, rows, summary
from .api import Connect
from .console import progress, table
from .imagined import imagine
from .runner import Run, run_suite
from .served import deployment_of, note_outcomes
from .stats import Paired, paired
from .suite import EvalSuite, load_suite

_IMAGINED_STEPS = 100

Address = Annotated[str, typer.Option(help="Server to use, host:port. Left out: one is started and stopped again.")]
Out = Annotated[Path, typer.Option(help="Folder for report.html, summary.json, episodes.json and videos.")]


def eval_command(
    suite: Annotated[
        str, typer.Argument(help=f"Shipped suite ({', '.join(shipped('eval'))}) or a path to one.")
    ] = "pusht-image",
    episodes: Annotated[int | None, typer.Option(min=1, help="How many, instead of the suite's number.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the first episode; the others follow.")] = None,
    state: Annotated[
        bool | None, typer.Option("--state/--image", help="Give the true state, or only what a camera sees.")
    ] = None,
    keys: Annotated[str | None, typer.Option(help="Observation keys to send, separated by commas.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Episodes at a time.")] = None,
    interval: Annotated[str | None, typer.Option(help="wilson, clopper-pearson or jeffreys.")] = None,
    videos: Annotated[str | None, typer.Option(help="none, outcome (one for each) or all.")] = None,
    against: Annotated[Path | None, typer.Option(help="Folder of an earlier run to pair with, seed by seed.")] = None,
    checkpoint: Annotated[
        str, typer.Option(help="Serve this one instead of the deployment's, where a template makes the pipeline.")
    ] = "",
    record: Annotated[
        Path | None,
        typer.Option(help="Record what the server does in this folder, every step observed.", show_default=False),
    ] = None,
    address: Address = "",
    token_file: connection.TokenFile = None,
    tls_ca: connection.Ca = None,
    tls_cert: connection.Certificate = None,
    tls_key: connection.Key = None,
    out: Out = Path("runs/eval"),
) -> None:
    """Measure a success rate: N seeded episodes in closed loop through a server, with a 95 % interval.

    Writes one self-contained HTML page, JSON for machines, and videos. Ends with 1 when episodes broke.

    omni-loop eval pusht-image --episodes 50 --out runs/image
    """
    token, tls = _credentials(address, token_file, tls_ca, tls_cert, tls_key)
    chosen = load_suite(suite).changed(
        episodes=episodes,
        first_seed=seed,
        keys=[k.strip() for k in keys.split(",")] if keys else None,
        workers=workers,
        interval=interval,
        videos=videos,
    )
    if state is not None:
        chosen = chosen.with_state(state)
    usual = chosen.execution_horizon
    if record is not None:  # a row of a dataset is a step: each is observed
        chosen = chosen.changed(execution_horizon=1)
    console = Console()
    if not chosen.unseen:
        console.print(
            f"[yellow]seeds from {chosen.first_seed} may be those of demonstrations: no measure of unseen episodes[/]"
        )
    other = None if against is None else (against.name, summary.read(against))
    if other is not None:  # that they can be paired is a matter of seeds alone
        paired(summary.expected(chosen), other[1])
    _check(chosen, out)
    if address and (checkpoint or record):
        raise typer.BadParameter("--checkpoint and --record are of a server that is started, not of --address")
    if record is not None:
        output.folder(record, "--record")
    with _server(chosen, address, console, checkpoint, record, token, tls) as connect:
        run = _run(chosen, connect, console)
    if record is not None:
        note_outcomes(record, run)
    numbers, seen = _save(run, out)
    _finish(run, numbers, seen, out, console, other, None if record is None else usual or run.spec.execution_horizon)


def demo_command(
    episodes: Annotated[int | None, typer.Option(min=1, help="How many PushT episodes.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps to imagine; 0 leaves that part out.")] = _IMAGINED_STEPS,
    address: Address = "",
    token_file: connection.TokenFile = None,
    tls_ca: connection.Ca = None,
    tls_cert: connection.Certificate = None,
    tls_key: connection.Key = None,
    out: Out = Path("runs/demo"),
) -> None:
    """PushT from camera images through gRPC, then the same policy inside the world model alone.

    20 episodes with success rate, interval and latency breakdown, 100 imagined steps without a simulator, and
    one HTML page with videos of both.
    """
    token, tls = _credentials(address, token_file, tls_ca, tls_cert, tls_key)
    suite, console = load_suite("demo").changed(episodes=episodes), Console()
    _check(suite, out)
    with _server(suite, address, console, token=token, tls=tls) as connect:
        run = _run(suite, connect, console)
        numbers, seen = _save(run, out)
        if steps:
            video, facts = _imagine(suite, connect, steps, out, console)
            seen.videos.append(video)
            numbers["imagined"] = facts
    _finish(run, numbers, seen, out, console, None)


def _check(suite: EvalSuite, out: Path) -> None:
    """See that the env has the suite's keys and that ``out`` can be written, before a server is started."""
    suite.make_env().close()
    output.folder(out, "--out", "summary.json", "episodes.json", "report.html")
    output.folder(out / "videos", "--out")


def _credentials(
    address: str, token_file: Path | None, ca: Path | None, certificate: Path | None, key: Path | None
) -> tuple[str | None, Tls | None]:
    """What the server at ``address`` is shown. One that is started here is open, to this machine alone."""
    return (connection.read_token(token_file), connection.tls_of(ca, certificate, key)) if address else (None, None)


@contextmanager
def _server(
    suite: EvalSuite,
    address: str,
    console: Console,
    checkpoint: str = "",
    record: Path | None = None,
    token: str | None = None,
    tls: Tls | None = None,
) -> Iterator[Connect]:
    """How to connect: to ``address``, or to a server that lives as long as this context."""
    from omni_loop.client import connect

    if address:
        yield lambda: connect(address, timeout_s=suite.time_limit_s, token=token, tls=tls)
        return
    from omni_loop.serve.background import BackgroundServer

    with console.status(f"starting a server for {suite.deployment}"):
        server = BackgroundServer(deployment_of(suite, checkpoint, record))
        server.start()
    try:
        yield lambda: connect(server.address, timeout_s=suite.time_limit_s)
    finally:
        server.stop()


def _run(suite: EvalSuite, connect: Connect, console: Console) -> Run:
    with progress(console, suite) as on_result:
        return run_suite(suite, connect, on_result)


def _save(run: Run, out: Path) -> tuple[dict[str, Any], media_.Media]:
    """Write the numbers first: a film that cannot be made must not cost them."""
    numbers = summary.summarise(run)
    summary.write(out, numbers, run.results)
    seen = media_.collect(run, out / "videos")
    numbers["predictions"] = {"n": seen.compared, "psnr_by_horizon": seen.horizon}
    return numbers, seen


def _imagine(
    suite: EvalSuite, connect: Connect, steps: int, out: Path, console: Console
) -> tuple[media_.Video, dict[str, Any]]:
    env, client = suite.make_env(), connect()
    try:
        with console.status("imagining") as status:
            said: Callable[[int], None] = lambda n: status.update(f"imagining: step {n} of {steps}")  # noqa: E731
            made = imagine(
                client,
                env,
                prompt=suite.prompt,
                seed=suite.first_seed,
                steps=steps,
                stop_when_done=False,
                on_steps=said,
            )
        video = media_.imagined_video(made, out / "videos" / "imagined.mp4", env.control_hz)
    finally:
        client.close()
        env.close()
    facts = {"seed": made.seed, "steps": made.steps, "done_at": made.done_at, "wall_s": made.wall_s}
    console.print(f"imagined {made.steps} steps in {made.wall_s:.1f} s, without a simulator")
    return video, facts


def _finish(
    run: Run,
    numbers: dict[str, Any],
    seen: media_.Media,
    out: Path,
    console: Console,
    other: tuple[str, dict[rows.Key, bool]] | None,
    usual: int | None = None,
) -> None:
    """Table, JSON and page; the exit code tells whether episodes broke. ``other``: the run to pair with. ``usual``: of
    a recorded run, the actions of a chunk that are executed when it is not recorded."""
    comparison: tuple[str, Paired] | None = None
    if other is not None:
        name, pairs = other[0], summary.against(run.results, other[1])
        comparison = (name, pairs)
        numbers["paired"] = {"with": name, "only_this": pairs.only_a, "only_other": pairs.only_b, "p": pairs.p}
        console.print(f"paired with {name}: {pairs.only_a} only here, {pairs.only_b} only there, p = {pairs.p:.3f}")
    summary.write(out, numbers, run.results)
    page = report.write(out / "report.html", report.render(run, numbers, seen, comparison=comparison))
    console.print(table(numbers))
    if usual is not None and usual > 1:
        said = f"every step observed: 1 action of a chunk executed, not the suite's {usual}"
        console.print(said, markup=False, highlight=False)
    if seen.missing:
        console.print(f"no videos: {seen.missing}", markup=False)
    console.print(f"report: {page}", markup=False, soft_wrap=True)
    if broken := numbers["errors"] + numbers["timeouts"]:
        console.print(f"[red]{broken} of {numbers['episodes']} episodes broke; the report says why[/]")
        raise typer.Exit(1)
