"""``omni-loop replay`` and ``omni-loop export``: what becomes of recordings."""

from __future__ import annotations

import contextlib
import itertools
import json as json_
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import config
from ..errors import InvalidInput
from ..record.differences import Report
from ..record.reader import Recording
from . import connection, output

Source = Annotated[Path, typer.Argument(help="Folder of a recording: a run, or the folder that a deployment names.")]
Episodes = Annotated[
    str, typer.Option(help="Episodes by number, range or name, separated by commas; none: all.", show_default=False)
]


def replay(
    recording: Source,
    server: Annotated[
        str, typer.Option(help="Server to replay on, host:port. Left out: one is started and stopped again.")
    ] = "",
    deployment: Annotated[
        str, typer.Option(help="What to serve, by name or path, instead of what was served when it was recorded.")
    ] = "",
    episodes: Episodes = "",
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference of a chunk (units of the action) and of progress.")
    ] = 0.0,
    pixels: Annotated[float, typer.Option(min=0.0, help="Largest difference of frames, in grey levels.")] = 0.0,
    json: Annotated[Path | None, typer.Option(help="File for the whole report as JSON.", show_default=False)] = None,
    token_file: connection.TokenFile = None,
    tls_ca: connection.Ca = None,
    tls_cert: connection.Certificate = None,
    tls_key: connection.Key = None,
) -> None:
    """Live through recorded sessions again and say what comes out otherwise.

    The exit code is 0 when all that was recorded is here, was repeated, and differs by no more than --tolerance and
    --pixels; else it is 1. Noise is a function of the recorded seeds: a session that was served alone comes out to the
    bit on the same deployment, and one that shared batches may differ in the last bits.

    omni-loop replay runs/recorded --deployment pusht
    """
    from ..client import connect
    from ..record.replay import replay as run

    if server and deployment:
        raise InvalidInput("--server and --deployment exclude each other: a server runs its own deployment")
    token, tls = None, None  # the server that is started here is open, to this machine alone
    if server:
        token, tls = connection.read_token(token_file), connection.tls_of(tls_ca, tls_cert, tls_key)
    read, console = Recording(recording), Console()
    wanted = read.select(_parts(episodes))
    if json is not None:
        output.file(json, "--json")
    _say_unreadable(read, console)
    total = sum(episode.length for episode in wanted)
    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_server(server, deployment, read.deployment, console))
        client = stack.enter_context(connect(address, token=token, tls=tls))
        status = stack.enter_context(console.status("replaying"))
        ticks = itertools.count(1)

        def on_tick(_: object) -> None:
            status.update(f"replaying: tick {next(ticks)} of {total}")

        report = run(client, read, wanted, tolerance=tolerance, pixels=pixels, on_tick=on_tick)
    if json is not None:
        json.write_text(json_.dumps(report.as_json(), indent=1) + "\n", encoding="utf-8")
    say_report(report, console)
    if not report.exact or read.broken:
        raise typer.Exit(1)


def export(
    recording: Source,
    out: Annotated[Path, typer.Option(help="Folder for the dataset; it must not exist.")],
    episodes: Episodes = "",
    names: Annotated[
        list[str] | None,
        typer.Option("--map", help="KEY=NAME: the observation KEY becomes observation.NAME.", show_default=False),
    ] = None,
    fps: Annotated[int | None, typer.Option(min=1, help="Instead of the control rate / --stride.")] = None,
    stride: Annotated[int, typer.Option(min=1, help="Every how many-th control step was observed.")] = 1,
    task: Annotated[str | None, typer.Option(help="Instead of each episode's prompt.", show_default=False)] = None,
    pipeline: Annotated[str | None, typer.Option(help="Which, when several were recorded.", show_default=False)] = None,
    successes: Annotated[bool, typer.Option("--successes", help="Only episodes known to have succeeded.")] = False,
    videos: Annotated[bool, typer.Option("--videos", help="Images as video instead of PNG.")] = False,
) -> None:
    """Write recorded episodes as a LeRobotDataset v3, which LeRobot loads and trains on.

    A row is a control step: its observation, and as action what was really executed there. Needs every step observed;
    when every k-th was, say --stride k: the rate is the control rate / k, and an action is k steps long.

    omni-loop export runs/recorded --out data/recorded --map agent_pos=state
    """
    from ..record.export import Export, told
    from ..record.export import export as run

    read, console = Recording(recording), Console()
    _say_unreadable(read, console)
    output.folder(out.parent, "--out")
    how = Export(_names(names or ()), fps, stride, task, videos, successes, pipeline)
    with console.status("exporting") as status:
        made = run(
            read,
            out,
            read.select(_parts(episodes)),
            how,
            lambda episode: status.update(f"exporting: {episode.name}"),
        )
    for text in told(made.skipped):
        console.print(f"[yellow]left out[/] {text}", highlight=False, soft_wrap=True)
    text = f"{made.folder}: {made.episodes} episodes, {made.rows} rows at {made.fps} Hz"
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _names(given: Any) -> dict[str, str]:
    names = {}
    for text in given:
        key, equals, name = text.partition("=")
        if not (key and equals and name):
            raise InvalidInput(f"--map: {text!r} is no KEY=NAME, such as agent_pos=state")
        names[key] = name
    return names


def _say_unreadable(read: Recording, console: Console) -> None:
    if read.unfinished:
        text = f"{len(read.unfinished)} parts are open (a server records them, or was killed) and left out"
        console.print(f"[yellow]{text}[/]", highlight=False)
    for session, numbers in read.missing.items():
        text = f"episode {', '.join(map(str, numbers))} of it is missing from the recording"
        console.print(f"[red]session {session}[/]: {text}", highlight=False, soft_wrap=True)
    for name, why in read.broken.items():
        console.print(f"[red]{name}[/]: {why}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def _server(address: str, named: str, recorded: dict[str, Any], console: Console) -> Iterator[str]:
    """The address of the server to replay on; one that is started lives as long as the context, and records nothing."""
    if address:
        yield address
        return
    from ..serve.background import BackgroundServer

    if named:
        chosen = config.load_deployment(named)
    else:
        chosen = config.validate(config.Deployment, recorded, "the recorded deployment")
    quiet = {"listen": config.Listen(port=0), "record": config.RecordConfig()}
    with console.status(f"starting a server for {', '.join(chosen.names)}"):
        server = BackgroundServer(chosen.model_copy(update=quiet))
        server.start()
    try:
        yield server.address
    finally:
        server.stop()


def say_report(report: Report, console: Console) -> None:
    """A table of the episodes, the verdict, and what would allow for a rounding."""
    console.print(_table(report))
    verdict = "[green]exact[/]" if report.exact else "[bold red]not exact[/]"
    tolerance, pixels = report.tolerance, report.pixels
    within = f" within {tolerance:g}, {pixels:g} grey levels" if tolerance or pixels else ""
    console.print(f"{report.ticks} ticks replayed, {report.differing} differ: {verdict}{within}", highlight=False)
    if not report.exact and replace(report, pixels=max(pixels, 1.0)).exact:
        text = "frames differ by one grey level at most, as those of shared batches may: --pixels 1 allows it"
        console.print(text, markup=False, highlight=False)


def _table(report: Report) -> Table:
    out = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    units = {episode.unit for episode in report.episodes}
    unit = next(iter(units)) if len(units) == 1 else ""
    chunk = f"chunk ({unit or 'units of the action'})"
    for column in ("no.", "episode", "ticks", "differ", chunk, "frames (grey levels)", "progress", "note"):
        right: Any = "left" if column in ("episode", "note") else "right"
        out.add_column(column, justify=right, overflow="fold")
    for episode in report.episodes:
        differing = episode.differing(report.tolerance, report.pixels)
        worst = [_number(episode.worst(of)) for of in ("chunk", "frames", "progress")]
        changed = next((f"revision {t.revision[0]} -> {t.revision[1]}" for t in episode.ticks if t.revision), "")
        failed = next((t.error for t in episode.ticks if t.error and t.error != episode.skipped), "")
        other = next((f"seq {t.seq} {t.other}" for t in episode.ticks if t.other), "")
        more = [f"{of} differs by {_number(d)}" for of in ("scene", "plan") if (d := episode.worst(of))]
        note = "; ".join(text for text in (episode.skipped, failed, changed, other, *more) if text)
        ticks = f"{len(episode.ticks)}/{episode.recorded}"
        out.add_row(str(episode.index), episode.name, ticks, str(len(differing)), *worst, note)
    return out


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return "missing" if value == float("inf") else f"{value:.3g}"
