"""``omni-loop bench serve``: what the server costs besides the models, beside LeRobot's own server, and for openpi's
client."""

from __future__ import annotations

from .gather import Parts, gathered
from .rows import Bench

BENCH: Bench[Parts] = gathered(
    "serve", {"own": "serve_own", "beside_lerobot": "serve_lerobot", "openpi": "serve_openpi"}
)
