"""``omni-loop bench eval``: what the evaluator's numbers are worth, what they cost, and what was shipped."""

from __future__ import annotations

from .gather import Parts, gathered
from .rows import Bench

BENCH: Bench[Parts] = gathered(
    "eval", {"shipped": "eval_shipped", "same": "eval_same", "lerobot": "eval_lerobot", "imagined": "eval_imagined"}
)
