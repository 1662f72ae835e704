"""The commands of the core, and those that plug-ins add through the entry points ``omni_loop.commands``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command

from .. import config, registry
from ..errors import OmniLoopError
from . import output, recordings

_ORDER = ("serve", "demo", "eval", "train", "demos", "replay", "export", "view", "bench", "check")


class _Commands(TyperGroup):
    """Plug-ins' commands are imported when they are called or listed, not before."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = {*super().list_commands(ctx), *registry.names(registry.COMMANDS)}
        return sorted(names, key=lambda name: (_ORDER.index(name) if name in _ORDER else len(_ORDER), name))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None or cmd_name not in registry.names(registry.COMMANDS):
            return own
        return _mounted(cmd_name)


def _mounted(name: str) -> Any:
    try:
        target = registry.load(registry.COMMANDS, name)
    except OmniLoopError as e:  # listing the others must still work
        target = _refusing(e)
    if not isinstance(target, typer.Typer):
        single = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown")
        single.command(name)(target)
        target = single
    command = get_command(target)
    command.name = name
    return command


def _refusing(error: OmniLoopError) -> Any:
    def command() -> NoReturn:
        raise error

    command.__doc__ = f"Not available: {error.text}."
    return command


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"omni-loop {metadata.version('omni-loop')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A closed-loop world-model and robotics-policy service.

    A robot client opens a session, streams observations and receives action chunks; a world-model client predicts
    frames; an evaluator drives simulators through the same API and reports success rates.

    Start with **omni-loop demo**: 20 episodes in a simulator, a success rate, a report to look at.
    """


@app.command()
def serve(
    deployment: Annotated[
        str, typer.Argument(help="Name of a shipped deployment (see **check**) or path of a YAML file.")
    ] = "pusht",
    port: Annotated[
        int | None, typer.Option(help="Instead of the deployment's port; 0 takes any free one.", show_default=False)
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Instead of the deployment's host; others than loopback need access.", show_default=False),
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the server does.")] = False,
) -> None:
    """Serve a deployment over gRPC until interrupted.

    The address is printed once every stage is loaded and has run. Ctrl-C or SIGTERM drains: ticks in flight finish,
    then the server ends.
    """
    chosen = config.load_deployment(deployment)
    listen = {
        "host": chosen.listen.host if host is None else host,
        "port": chosen.listen.port if port is None else port,
    }
    chosen = chosen.model_copy(update={"listen": config.validate(config.Listen, listen, "the command line")})
    level = logging.INFO if verbose else logging.WARNING
    logging.basicConfig(level=level, format="%(levelname)s %(name)s: %(message)s")

    from ..serve import event_loop
    from ..serve.app import run

    console = Console()
    console.print(f"loading {', '.join(chosen.names)} ...", highlight=False)

    def ready(address: str) -> None:
        console.print(f"serving {', '.join(chosen.names)} on [bold]{address}[/bold]", highlight=False)

    def others(addresses: Mapping[str, str]) -> None:
        for name, address in addresses.items():
            console.print(f"{name} on [bold]{address}[/bold]", highlight=False)

    event_loop.run(run(chosen, ready, on_endpoints=others))


@app.command()
def train(
    part: Annotated[
        str,
        typer.Argument(
            help="Which part: codec, world, context, policy; **all** of these, in that order; or another that is "
            "registered, such as metaworld."
        ),
    ],
    recipe: Annotated[
        Path | None, typer.Option(help="YAML recipe instead of the shipped one.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder with demonstrations, made when it does not exist.  [default: data/DEMOS]"),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where checkpoints go, one folder per part.")] = Path("checkpoints"),
    seed: Annotated[int | None, typer.Option(help="Instead of the recipe's seed.", show_default=False)] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that make demonstrations.")] = 2,
    rollouts: Annotated[
        Path | None,
        typer.Option("--from", help="LeRobotDataset v3 to train a LeRobot **policy** on.", show_default=False),
    ] = None,
    type: Annotated[str | None, typer.Option(help="With --from: act or diffusion.  [default: act]")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="With --from: instead of the recipe's.")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="With --from: of torch.  [default: 1]")] = None,
    keys: Annotated[
        str | None, typer.Option(help="With --from: observations to read, by commas.  [default: all there are]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="With --from: what the checkpoint is called.  [default: lerobot-TYPE]")
    ] = None,
) -> None:
    """Train a model part from a recipe and write its checkpoint with a card.

    Demonstrations are generated by the repository's own experts when there are none. A later part reads the earlier
    ones from --out. The card says data, recipe, seed, minutes, metrics, and which observation they belong to.

    With --from the policy is LeRobot's own, trained on recorded rollouts (see **export**) or written demonstrations
    (see **demos**), and is served by the template lerobot.
    """
    from ..training import command
    from ..training.rollouts import Wanted, train_from

    wanted = Wanted(type, recipe, name, steps, seed, threads, tuple(k.strip() for k in keys.split(",")) if keys else ())
    if rollouts is not None:
        if part != "policy" or data is not None:
            raise typer.BadParameter(
                "--from takes the place of --data, and is for a policy: train policy --from FOLDER"
            )
        output.folder(out, "--out")
        train_from(rollouts, out, wanted, Console())
        return
    if given := wanted.only_with_rollouts():
        raise typer.BadParameter(f"--{given} goes with --from")
    parts = command.parts(part)
    if recipe is not None and len(parts) > 1:
        raise typer.BadParameter("--recipe belongs to one part, not to 'all'")
    command.check(parts, recipe, data)
    if data is not None and not data.exists():  # it is made beside and renamed
        output.folder(data.parent, "--data")
    output.folder(out, "--out")
    for name in parts:
        command.train(name, recipe=recipe, data=data, out=out, seed=seed, workers=workers, console=Console())


@app.command()
def demos(
    name: Annotated[str, typer.Argument(help="A registered set, such as **fetch-pick-place**.")],
    out: Annotated[Path, typer.Option(help="Folder of the LeRobotDataset; it must not exist.")],
    data: Annotated[
        Path | None, typer.Option(help="Folder with the set, made when it does not exist.  [default: data/NAME]")
    ] = None,
    split: Annotated[str, typer.Option(help="Which part of the set.")] = "train",
    workers: Annotated[int, typer.Option(min=1, help="Processes that make demonstrations.")] = 2,
) -> None:
    """Write the demonstrations of an expert as a LeRobotDataset v3, to train LeRobot's policies on."""
    from ..training.rollouts import write_demos

    output.folder(out.parent, "--out")
    write_demos(name, data, split, out, workers, Console())


class _Check(TyperGroup):
    """``check`` names deployments; ``check config`` and ``check board`` are commands of their own."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        own = args[0] in ("config", "board", "deployments")
        return super().resolve_command(ctx, args if own else ["deployments", *args])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            args = ["deployments"]
        return super().parse_args(ctx, args)


checks = typer.Typer(
    cls=_Check,
    rich_markup_mode="markdown",
    subcommand_metavar="[DEPLOYMENTS]... | config [DEPLOYMENTS]... | board [OPTIONS]",
)


@checks.callback()
def check() -> None:
    """Check deployments before a robot depends on them: configuration, pipelines, checkpoints, placement, port.

    Builds and warms up every stage as the server would, with the memory of its sessions, so a corrupt checkpoint or
    too small a budget is found here. Without deployments, by name or path, it is everything shipped, and what this
    machine lacks, weights of others or an extra, is said and is not wrong. Exit code 2 when anything is wrong.
    """


@checks.command("deployments", hidden=True)
def check_deployments(
    deployments: Annotated[
        list[str] | None,
        typer.Argument(help="Deployments by name or path; none: everything shipped.", show_default=False),
    ] = None,
) -> None:
    """Check deployments before a robot depends on them."""
    from .check import check_all

    if not check_all(deployments or [], Console(soft_wrap=True)):
        raise typer.Exit(2)


@checks.command("config")
def check_config(
    deployments: Annotated[
        list[str] | None,
        typer.Argument(help="Deployments by name or path; none: everything shipped.", show_default=False),
    ] = None,
) -> None:
    """Check what deployments say, without building a stage or loading weights: seconds, on any machine.

    Keys and values, pipelines and templates, the options of every stage, and which runner takes it. Weights that are
    not on this machine are said and are not wrong; everything else is, with exit code 2.
    """
    from .check_config import check_config as check_all

    if not check_all(deployments or [], Console(soft_wrap=True)):
        raise typer.Exit(2)


@checks.command("board")
def check_board(
    rows: Annotated[str, typer.Option(help="Names of rows, such as L3,F6.  [default: every row that is built]")] = "",
    seed: Annotated[int | None, typer.Option(min=0, help="Of everything drawn.  [default: drawn, printed]")] = None,
    scale: Annotated[
        Literal["ci", "full"], typer.Option(help="What CI runs, or the whole rows with 50 seeds: hours.")
    ] = "ci",
    json: Annotated[Path | None, typer.Option(help="A file for a line of JSON per row.", show_default=False)] = None,
    table: Annotated[
        list[Path] | None,
        typer.Option(
            help="Run nothing: make the table of these files of JSON lines. Once per file.", show_default=False
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="With --table: the file to write.", show_default=False)] = None,
) -> None:
    """Run the reliability board: load held, faults survived, bad inputs refused, over the real runtime.

    Prints a line per row, as JSON: row, seed, number, pass (true, false, or null: it did not run), unit, scale, commit,
    seconds and why. Exit code 1 when a row failed, or one asked for by name did not run. Rows may be run one by one:
    --table takes the lines of several files, the later one of a row that ran twice.
    """
    from .check import run_board, write_table

    if table:
        write_table(table, out)
    elif not run_board(rows.split(","), seed, scale, json):
        raise typer.Exit(1)


app.command()(recordings.replay)
app.command()(recordings.export)
app.add_typer(checks, name="check")
