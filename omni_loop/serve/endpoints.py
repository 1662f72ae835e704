"""The server's other ports: each protocol's module is imported only where a deployment turns it on."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..loop.tick import all_of

if TYPE_CHECKING:
    from ..config import Deployment
    from .app import Endpoint
    from .auth import Gate
    from .service import LoopService

log = logging.getLogger(__name__)
# By section of the deployment's ``endpoints``: what has its ``start``, and the extra that its libraries come with.
STARTS = {
    "openpi": (".compat.openpi", "serve"),
    "lerobot": (".compat.lerobot", "serve"),
    "admin": (".admin", "serve"),
}


async def start_endpoints(deployment: Deployment, service: LoopService, gate: Gate) -> list[Endpoint]:
    """Those that the deployment names, listening, in the order of :data:`STARTS`. All or none: when one does not start,
    the others are stopped.

    Raises:
        ConfigError: a library is missing, or a pipeline or key that an endpoint names is not there.
        ServerUnavailable: a port is busy.
    """
    started: list[Endpoint] = []
    try:
        for name, (module, extra) in STARTS.items():
            config = getattr(deployment.endpoints, name)
            if config is None:
                continue
            try:
                start = importlib.import_module(module, __package__).start
            except ModuleNotFoundError as error:
                raise ConfigError(
                    f"endpoints.{name} needs {error.name}, which is not installed; pip install 'omni-loop[{extra}]'"
                ) from error
            started.append(await start(config, service, gate))
            log.info("%s on %s", name, started[-1].address)
    except BaseException:
        await all_of([endpoint.stop(0.0) for endpoint in started])
        raise
    return started
