"""World-side stages: factories the runner calls by their registered names."""

from __future__ import annotations

from .choose import ChooseStage, choose
from .context import ContextStage, context
from .decode import DecodeStage, decode
from .frames import FramesStage, frames

__all__ = [
    "ChooseStage",
    "ContextStage",
    "DecodeStage",
    "FramesStage",
    "choose",
    "context",
    "decode",
    "frames",
]
