"""World-side stages: factories the runner calls by their registered names."""

from __future__ import annotations

from .context import ContextStage, context
from .decode import DecodeStage, decode
from .frames import FramesStage, frames

__all__ = ["ContextStage", "DecodeStage", "FramesStage", "context", "decode", "frames"]
