"""``omni-loop eval``: a suite by name, or one of the commands that are about finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup

from .collection import is_collection
from .commands import eval_command
from .commands_ab import ab_command
from .commands_collection import collection_command
from .commands_compare import compare_command, leaderboard_command
from .commands_plan import plan_command
from .commands_twin import twin_command

_RUN, _COLLECTION = "run", "collection"
_OPTIONS = {"--plan": "plan"}  # options that are commands: `eval --plan ...` is `eval plan ...`
_OTHERS = (
    "Others, each with --help: **eval shipped** (a collection of suites on one page), **eval ab** A B (until it is "
    "decided which is better), **eval compare** A B, **eval leaderboard** RUNS, **eval --plan** (episodes needed), "
    "**eval twin** (simulator and world model)."
)


class _Eval(TyperGroup):
    """``eval SUITE``, ``eval compare A B``, ``eval --plan``: what names no command is a suite's run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option, command in _OPTIONS.items():
            if option in args:
                args = [command, *(a for a in args if a != option)]
        if not args or args[0] not in self.commands:
            args = [_COLLECTION if any(map(is_collection, _positional(args))) else _RUN, *args]
        return super().parse_args(ctx, args)


def _positional(args: Sequence[str]) -> list[str]:
    """What may be the suite: what is no option and does not follow one that takes a value."""
    pairs = zip(args, ["", *args], strict=False)
    return [arg for arg, last in pairs if not arg.startswith("-") and (last == "--fresh" or not last.startswith("-"))]


eval_app = typer.Typer(
    cls=_Eval,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
eval_app.command(_RUN, epilog=_OTHERS)(eval_command)
eval_app.command(_COLLECTION)(collection_command)
eval_app.command("twin")(twin_command)
eval_app.command("compare")(compare_command)
eval_app.command("leaderboard")(leaderboard_command)
eval_app.command("plan")(plan_command)
eval_app.command("ab")(ab_command)


@eval_app.callback()
def root() -> None:
    """Measure success rates, and compare runs that were measured."""
