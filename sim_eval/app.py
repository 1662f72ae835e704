"""``omni-loop eval``: a suite by name, or one of the commands that are about finished runs."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from .commands import eval_command
from .commands_compare import compare_command, leaderboard_command
from .commands_plan import plan_command
from .commands_twin import twin_command

_RUN = "run"
_OPTIONS = {"--plan": "plan"}  # options that are commands: `eval --plan ...` is `eval plan ...`


class _Eval(TyperGroup):
    """``eval SUITE``, ``eval compare A B``, ``eval --plan``: what names no command is a suite's run."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for option, command in _OPTIONS.items():
            if option in args:
                args = [command, *(a for a in args if a != option)]
        if not args or args[0] not in self.commands:
            args = [_RUN, *args]
        return super().parse_args(ctx, args)


eval_app = typer.Typer(
    cls=_Eval,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
eval_app.command(_RUN)(eval_command)
eval_app.command("twin")(twin_command)
eval_app.command("compare")(compare_command)
eval_app.command("leaderboard")(leaderboard_command)
eval_app.command("plan")(plan_command)


@eval_app.callback()
def root() -> None:
    """Measure success rates, and compare runs that were measured."""
