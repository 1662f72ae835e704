"""``omni-loop bench eval``: what the evaluator's numbers are worth, what they cost, and what was shipped."""

from __future__ import annotations

from .gather import Parts, gathered
from .rows import Bench

_PARTS = ("shipped", "same", "lerobot", "imagined")

BENCH: Bench[Parts] = gathered("eval", {part: f"eval_{part}" for part in _PARTS})
