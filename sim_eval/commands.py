"""``omni-loop eval SUITE`` and ``omni-loop demo``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from omni_loop.cli import connection, output
from omni_loop.client import Tls
from omni_loop.config import shipped

from . import bounds, live_sweep, rows, stored, summary
from . import media as media_
from .api import Connect
from .evaluate import Other, check, evaluate, finish, run_episodes, save
from .imagined import imagine
from .served import note_outcomes
from .serving import server as _server
from .stats import paired
from .store import fingerprint
from .suite import CHUNKS, EvalSuite, load_suite

_IMAGINED_STEPS = 100

Address = Annotated[str, typer.Option(help="Server to use, host:port. Left out: one is started and stopped again.")]
Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the journal, report.html, JSON, Parquet and videos.  [default: runs/SUITE]"),
]


def eval_command(
    suite: Annotated[
        str, typer.Argument(help=f"Shipped suite ({', '.join(shipped('eval'))}) or a path to one.")
    ] = "pusht-image",
    episodes: Annotated[int | None, typer.Option(min=1, help="How many, instead of the suite's number.")] = None,
    task: Annotated[
        list[str] | None, typer.Option(help="Only this task of the suite; once for each.", show_default=False)
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the first episode; the others follow.")] = None,
    policy: Annotated[
        str, typer.Option(help="random, hold or expert: a bound instead of the suite's pipeline.", show_default=False)
    ] = "",
    state: Annotated[
        bool | None, typer.Option("--state/--image", help="Give the true state, or only what a camera sees.")
    ] = None,
    keys: Annotated[str | None, typer.Option(help="Observation keys to send, separated by commas.")] = None,
    horizon: Annotated[
        int | None, typer.Option("--execution-horizon", min=1, help="Rows of a chunk before the next is asked for.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes that episodes are spread over.")] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds for one episode, by the wall clock.", show_default=False)
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Sessions in one forward pass: faster, and outcomes may differ in the last bits."),
    ] = None,
    interval: Annotated[str | None, typer.Option(help="wilson, clopper-pearson or jeffreys.")] = None,
    videos: Annotated[str | None, typer.Option(help="none, outcome (one for each) or all.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew instead of going on with what is there.")] = False,
    delay_steps: Annotated[
        int | None, typer.Option(min=0, help="The policy sees what was so many control steps ago (not with --live).")
    ] = None,
    live: Annotated[bool, typer.Option("--live", help="The simulated clock goes on while the policy thinks.")] = False,
    latency_ms: Annotated[
        str | None, typer.Option(help="With --live: of answers. Several by commas: one run each, and a plot.")
    ] = None,
    jitter_ms: Annotated[float | None, typer.Option(min=0, help="With --live: deviation of the latency.")] = None,
    measured: Annotated[
        bool, typer.Option("--measured", help="With --live: add what answers really take. Not reproducible.")
    ] = False,
    chunks: Annotated[
        str | None,
        typer.Option(
            help=f"With --live: how chunks take over: {', '.join(CHUNKS)}; several by commas. Left out: joined, "
            "and of several latencies joined, aligned and naive.",
        ),
    ] = None,
    join: Annotated[
        bool | None, typer.Option("--join/--no-join", help="With --live: --chunks joined, or aligned.")
    ] = None,
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
    out: Out = None,
) -> None:
    """Measure a success rate: N seeded episodes in closed loop through a server, with a 95 % interval.

    Writes one self-contained HTML page, JSON and Parquet for machines, and videos. A run that was ended goes on where
    it stopped when the same command is given again. Ends with 1 when episodes broke.

    omni-loop eval pusht-image --episodes 50 --out runs/image

    omni-loop eval pusht-state --live --latency-ms 0,100,200,400 --out runs/live
    """
    token, tls = _credentials(address, token_file, tls_ca, tls_cert, tls_key)
    chosen = load_suite(suite).changed(
        episodes=episodes,
        first_seed=seed,
        keys=[k.strip() for k in keys.split(",")] if keys else None,
        execution_horizon=horizon,
        delay_steps=delay_steps,
        workers=workers,
        batch=batch,
        time_limit_s=time_limit,
        interval=interval,
        videos=videos,
    )
    chosen = chosen.only(*(task or ()))
    if state is not None:
        chosen = chosen.with_state(state)
    usual = chosen.execution_horizon
    if record is not None:  # a row of a dataset is a step: each is observed
        chosen = chosen.changed(execution_horizon=1)
    if policy:
        _alone("--policy", policy, address=address, checkpoint=checkpoint, record=record)
        chosen = bounds.bounded(chosen, policy)
    folder = out or Path("runs") / chosen.name
    sweep = live_sweep.points(chosen, live, latency_ms, jitter_ms, measured, chunks, join)
    console = Console()
    if not chosen.unseen:
        console.print(
            f"[yellow]seeds from {chosen.first_seed} may be those of demonstrations: no measure of unseen episodes[/]"
        )
    other = _to_pair_with(against, chosen, console)
    if other is not None and len(sweep) > 1:
        raise typer.BadParameter("--against is of one run, not of several latencies")
    if address and (checkpoint or record):
        raise typer.BadParameter("--checkpoint and --record are of a server that is started, not of --address")
    if record is not None:
        output.folder(record, "--record")

    def serve(served: EvalSuite) -> AbstractContextManager[Connect]:
        if policy:
            return nullcontext(bounds.connect(policy, served))
        return _server(served, address, console, checkpoint, record, token, tls)

    if len(sweep) > 1:
        broken = live_sweep.run(sweep, folder, serve, console, fresh)
    else:
        done = evaluate(sweep[0], folder, serve, console, fresh=fresh, other=other)
        broken = done.broken
        if record is not None:
            note_outcomes(record, done.run)
            executed = usual or done.run.spec.execution_horizon
            if executed > 1:
                said = f"every step observed: 1 action of a chunk executed, not the suite's {executed}"
                console.print(said, markup=False, highlight=False)
    if broken:
        raise typer.Exit(1)


def _alone(option: str, value: str, **others: Any) -> None:
    for name, given in others.items():
        if given:
            raise typer.BadParameter(f"{option} {value} acts without a server: leave --{name} out")


def _to_pair_with(against: Path | None, suite: EvalSuite, console: Console) -> Other | None:
    """What ``--against`` names, if it can be paired with ``suite``: a matter of tasks and seeds alone, since imagined
    episodes are paired with real ones. Of another world it is said."""
    if against is None:
        return None
    run = stored.load(against, "--against")
    other = rows.successes(run.rows)
    paired(summary.expected(suite), other)
    ours = stored.world(suite.env, suite.task_names, fingerprint(suite))
    if differs := stored.difference(ours, run.world(), suite.name, against):
        said = f"--against: {differs}; paired by task and seed all the same"
        console.print(said, style="yellow", markup=False, highlight=False)
    return against.name, other


def demo_command(
    episodes: Annotated[int | None, typer.Option(min=1, help="How many PushT episodes.")] = None,
    steps: Annotated[int, typer.Option(min=0, help="Steps to imagine; 0 leaves that part out.")] = _IMAGINED_STEPS,
    address: Address = "",
    token_file: connection.TokenFile = None,
    tls_ca: connection.Ca = None,
    tls_cert: connection.Certificate = None,
    tls_key: connection.Key = None,
    out: Annotated[Path, typer.Option(help="Folder for report.html, JSON, Parquet and videos.")] = Path("runs/demo"),
) -> None:
    """PushT from camera images through gRPC, then the same policy inside the world model alone.

    20 episodes with success rate, interval and latency breakdown, 100 imagined steps without a simulator, and
    one HTML page with videos of both.
    """
    token, tls = _credentials(address, token_file, tls_ca, tls_cert, tls_key)
    suite, console = load_suite("demo").changed(episodes=episodes), Console()
    check(suite, out)
    with _server(suite, address, console, token=token, tls=tls) as connect:
        done = save(run_episodes(suite, connect, out, console, fresh=True), out)
        if steps:
            video, facts = _imagine(suite, connect, steps, out, console)
            done.seen.videos.append(video)
            done.numbers["imagined"] = facts
    finish(done, console)
    if done.broken:
        raise typer.Exit(1)


def _credentials(
    address: str, token_file: Path | None, ca: Path | None, certificate: Path | None, key: Path | None
) -> tuple[str | None, Tls | None]:
    """What the server at ``address`` is shown. One that is started here is open, to this machine alone."""
    return (connection.read_token(token_file), connection.tls_of(ca, certificate, key)) if address else (None, None)


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
