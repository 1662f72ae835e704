"""``python -m omni_loop.testing.toy_server``: what ``python -m omni_loop.serve`` is, over a :class:`ToyCore`.

The first of the deployment's pipelines chooses how it starts: ``broken`` raises, ``endless`` never ends loading.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

from ..errors import CheckpointError
from ..serve.__main__ import main
from .toy_core import ToyCore

if TYPE_CHECKING:
    from ..config import Deployment


async def start(deployment: Deployment) -> Any:
    if deployment.names[0] == "broken":
        raise CheckpointError("act: model.safetensors is corrupt")
    if deployment.names[0] == "endless":
        await asyncio.Event().wait()
    return ToyCore()


if __name__ == "__main__":
    sys.exit(main(start=start))
