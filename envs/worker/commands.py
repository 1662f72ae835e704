"""``omni-loop envs``: the Python environments of simulators that cannot live in this one."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import environments
from .environments import ENVIRONMENTS, State

app = typer.Typer(rich_markup_mode="markdown", no_args_is_help=True)


@app.callback()
def envs() -> None:
    """Python environments of simulators whose pins conflict with this one's.

    An env such as robosuite runs in a worker process, with a Python environment of its own in the user's cache
    (or in $OMNI_LOOP_ENVS).
    """


@app.command("list")
def list_command() -> None:
    """List them: what they are, and whether they are installed."""
    table = Table("env", "state", "what", box=None, pad_edge=False)
    for name, entry in ENVIRONMENTS.items():
        state = entry.state
        colour = {State.INSTALLED: "green", State.MISSING: "dim"}.get(state, "yellow")
        table.add_row(name, f"[{colour}]{state}[/]", escape(entry.about))
    console = Console()
    console.print(table)
    console.print(f"in {environments.cache()}", markup=False, highlight=False, soft_wrap=True)


@app.command()
def install(
    name: Annotated[str, typer.Argument(help=f"Which: {', '.join(ENVIRONMENTS)}.")],
    python: Annotated[
        str | None, typer.Option(help="Interpreter instead of this one: path or version.", show_default=False)
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Make it anew, although it is there.")] = False,
) -> None:
    """Make the Python environment of an env, with uv where there is one, else with venv and pip."""
    console = Console(soft_wrap=True)

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    made = environments.install(name, again=again, python=python, say=say)
    say(f"env {name!r} is {'installed' if made else 'installed already (--again makes it anew)'}")
