"""``omni-loop bench adapters``: what models, engines and stores of others, and the edges between stages, cost."""

from __future__ import annotations

from .gather import Parts, gathered
from .rows import Bench

PARTS = ("edges", "imagined", "lerobot", "record", "vllm")

BENCH: Bench[Parts] = gathered("adapters", {part: f"adapters_{part}" for part in PARTS})
