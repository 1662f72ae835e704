"""What a simulator's adapter offers to the worker, and the errors it may answer with.

Specs are dicts here, with the fields of ``omni_loop.types.ArraySpec``; codes and reasons are texts, those of
``omni_loop.errors``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from .wire import Array


class WorkerError(Exception):
    """A refusal that the other side raises again as the error it stands for."""

    def __init__(self, text: str, code: str = "invalid_argument", reason: str = "bad_config") -> None:
        super().__init__(text)
        self.text, self.code, self.reason, self.retryable = text, code, reason, False


def unknown(what: str, name: str, known: Collection[str]) -> WorkerError:
    """``name`` is not one of ``known``."""
    from difflib import get_close_matches

    close = get_close_matches(name[:64], sorted(known), n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(known)[:40])}."
    return WorkerError(f"no {what} is called {name[:64]!r}. {hint}", "not_found", "unknown_name")


@dataclass(frozen=True)
class Outcome:
    """Of one step, as ``omni_loop.env.EnvStep`` without its arrays."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool
    info: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Spec:
    """What the env is, as ``omni_loop.env.Env`` says it. ``instruction``: the task in words, where the simulator has
    them. ``versions``: of the packages that decide what happens, by name."""

    name: str
    observations: list[dict[str, Any]]
    action: dict[str, Any]
    control_hz: float
    max_steps: int
    score: str | None = None
    instruction: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)


class Adapter(Protocol):
    """One env. Keys are known ones and actions within the spec: the other side has looked."""

    spec: Spec

    def reset(self, seed: int, keys: tuple[str, ...]) -> dict[str, Array]: ...

    def step(self, action: Array, keys: tuple[str, ...]) -> tuple[Outcome, dict[str, Array]]: ...

    def observe(self, keys: tuple[str, ...]) -> dict[str, Array]: ...

    def render(self) -> Array: ...

    def hold(self) -> Array:
        """The action that does least in the present state."""

    def close(self) -> None: ...


def array_spec(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    unit: str = "",
    low: float | None = None,
    high: float | None = None,
    description: str = "",
) -> dict[str, Any]:
    """A spec as it travels."""
    return {
        "name": name,
        "dtype": dtype,
        "shape": list(shape),
        "unit": unit,
        "low": low,
        "high": high,
        "description": description,
    }
