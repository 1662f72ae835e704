"""The routes. Those that tell of sessions and runners need a token where the deployment has tokens; then a principal
sees its own sessions."""

# No "from __future__ import annotations": FastAPI reads the annotations of functions inside build().

import asyncio
import base64
import binascii
import importlib.resources
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, HTTPException, Path, Request, Response
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from ...endpoints import is_loopback
from ...errors import Code, OmniLoopError
from ...telemetry import metrics
from ..auth import Gate
from .live import LiveView, Seen, Which, png
from .readiness import Readiness

if TYPE_CHECKING:
    from ..service import LoopService

_SCRAPE_S = 1.0  # a scrape waits so long for runners that are busy
_POLICY = (
    "default-src 'none'; connect-src 'self'; img-src 'self' data:; "
    "script-src 'unsafe-inline'; style-src 'unsafe-inline'"
)
Session = Annotated[str, Path(max_length=64)]


class Live(BaseModel):
    live: bool


class Ready(BaseModel):
    """``why``: what is in the way; "" when ready."""

    ready: bool
    why: str


class Listed(BaseModel):
    """A session, without what gives access to it. Latencies (inside the server) and steps of frames are those of ticks
    since somebody began to look; None before."""

    session: str
    pipeline: str
    phase: str
    epoch: int
    step: int
    last_seq: int
    p50_ms: float | None = None
    p99_ms: float | None = None
    observed_step: int | None = None
    predicted_step: int | None = None


class Refused(BaseModel):
    detail: str


def build(service: "LoopService", gate: Gate, readiness: Readiness, live: LiveView) -> FastAPI:
    """The application; requests need a loopback Host, against pages elsewhere that rebind their name."""
    closed: dict[int | str, dict[str, Any]] = {400: {"model": Refused}, 401: {"model": Refused}}
    app = FastAPI(title="omni_loop admin", docs_url=None, redoc_url=None, dependencies=[Depends(_of_this_machine)])

    def principal(request: Request) -> str:
        try:
            return gate.authenticate(_bearer(request.headers.get("authorization")))
        except OmniLoopError as error:
            status = 401 if error.code == Code.UNAUTHENTICATED else 400
            raise HTTPException(
                status, error.text, {"WWW-Authenticate": 'Basic realm="omni_loop: token as password"'}
            ) from error

    Principal = Annotated[str, Depends(principal)]

    def sessions(who: str, seen: dict[str, Seen]) -> list[Listed]:
        core = service.orchestrator
        there = [] if core is None else core.list_sessions()
        return [_listed(s, seen.get(s.id)) for s in there if gate.access.tokens is None or s.owner == who]

    @app.get("/health/live", responses={400: {"model": Refused}})
    async def is_live() -> Live:
        """The event loop runs."""
        return Live(live=True)

    @app.get("/health/ready", responses={**closed, 503: {"model": Ready}})
    async def is_ready(who: Principal, response: Response) -> Ready:
        """One pass through the work loop of every runner, with memory taken on its device. 503: not ready."""
        why = await readiness.why_not()
        response.status_code = 503 if why else 200
        return Ready(ready=not why, why=why)

    @app.get("/metrics", responses=closed, response_class=_Exposition)
    async def exposition(who: Principal) -> Response:
        """Prometheus' text format."""
        await readiness.refresh(_SCRAPE_S)
        return _Exposition(metrics.exposition())

    @app.get("/sessions", responses=closed)
    async def list_sessions(who: Principal) -> list[Listed]:
        """Every session there is."""
        return sessions(who, {})

    @app.get("/live", responses=closed)
    async def look(who: Principal) -> list[Listed]:
        """As /sessions, with what is seen of their ticks while somebody asks at least every few seconds."""
        return sessions(who, live.look())

    @app.get(
        "/live/{session}/{which}.png",
        responses={**closed, 404: {"model": Refused}, 200: {"content": {"image/png": {}}}},
        response_class=Response,
    )
    async def frame(who: Principal, session: Session, which: Which) -> Response:
        """The last frame observed, or the one predicted for that step."""
        mine = {s.session for s in sessions(who, {})}
        found = live.frame(session, which) if session in mine else None
        if found is None:
            raise HTTPException(404, f"no frame was {which} in such a session while somebody looked")
        headers = {"Cache-Control": "no-store", "X-Step": str(found[0])}
        return Response(await asyncio.to_thread(png, found[1]), media_type="image/png", headers=headers)

    @app.get("/", responses=closed, response_class=HTMLResponse)
    async def page(who: Principal) -> HTMLResponse:
        """The live page."""
        text = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY, "X-Frame-Options": "DENY"})

    return app


class _Exposition(Response):
    media_type = "text/plain; version=0.0.4; charset=utf-8"


def _of_this_machine(request: Request) -> None:
    if not is_loopback(request.url.hostname or ""):
        raise HTTPException(400, "the Host header names no loopback address")


def _bearer(header: str | None) -> str | None:
    """Browsers send ``Basic``: its password is the token."""
    scheme, _, value = (header or "").partition(" ")
    if scheme.lower() != "basic":
        return header
    try:
        _, _, token = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, UnicodeDecodeError):
        return None
    return f"Bearer {token}"


def _listed(summary: Any, seen: Seen | None) -> Listed:
    listed = Listed(
        session=summary.id,
        pipeline=summary.pipeline,
        phase=summary.phase,
        epoch=summary.epoch,
        step=summary.step,
        last_seq=summary.last_seq,
    )
    if seen is not None:
        listed.p50_ms, listed.p99_ms = seen.percentile(50), seen.percentile(99)
        listed.observed_step = None if seen.observed is None else seen.observed[0]
        listed.predicted_step = None if seen.predicted is None else seen.predicted[0]
    return listed
