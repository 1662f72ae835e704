"""Where a server can be reached besides its gRPC port, who may, and how much one of them may take."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field, field_validator

from .strict import Section
from .texts import Folder

Port = Annotated[int, Field(ge=0, le=65535)]
_LOOPBACK_NAMES = ("localhost",)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``; names other than localhost are taken for public."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host in _LOOPBACK_NAMES


class TlsConfig(Section):
    """PEM files. With ``client_ca`` every client must show a certificate of it (mTLS), whose common name is its
    principal where no token names one."""

    certificate: Folder
    key: Folder
    client_ca: Folder | None = None


class QuotaConfig(Section):
    """What one principal may take; without tokens all clients are one principal. None: no bound of its own."""

    sessions: Annotated[int, Field(ge=1)] | None = None
    streams: Annotated[int, Field(ge=1)] | None = None
    bytes_per_s: Annotated[int, Field(ge=1)] | None = None  # of requests, averaged over a second
    snapshots: Annotated[int, Field(ge=0)] | None = None  # kept in the store


class AccessConfig(Section):
    """Who may call. ``tokens``: a file of ``principal token`` lines (``#`` comments), readable by its owner only; with
    it every call needs one as a bearer token, health checks too."""

    tls: TlsConfig | None = None
    tokens: Folder | None = None
    quota: QuotaConfig = QuotaConfig()
    quotas: Mapping[str, QuotaConfig] = Field(default_factory=dict)  # by principal, in place of ``quota``

    @property
    def protected(self) -> bool:
        """Whether a bind that others can reach is allowed."""
        return self.tokens is not None or self.tls is not None


class OpenpiEndpoint(Section):
    """openpi's websocket protocol, and dialects of it, for one pipeline. ``keys`` maps names that clients send to the
    pipeline's observation names; without it they are the same, with ``/`` for ``.``."""

    host: str = "127.0.0.1"
    port: Port = 8000
    pipeline: str
    dialect: Literal["openpi", "roboarena", "realtime"] = "openpi"
    keys: Mapping[str, str] = Field(default_factory=dict)
    metadata: Mapping[str, str | int | float | bool] = Field(default_factory=dict)  # sent when a client connects
    # Control steps between two observations, which this protocol does not say; None: the pipeline's execution horizon.
    steps_per_infer: Annotated[int, Field(ge=1, le=1 << 16)] | None = None


class LerobotEndpoint(Section):
    """LeRobot's AsyncInference gRPC. ``models`` is the allow-list: what a client names, to the pipeline it gets.
    ``keys`` maps dataset features (``observation.state``, ``observation.images.top``) to the pipeline's observation
    names; without it they are the same, less ``observation.``."""

    host: str = "127.0.0.1"
    port: Port = 8080
    models: Annotated[Mapping[str, str], Field(min_length=1)]
    keys: Mapping[str, str] = Field(default_factory=dict)


class AdminEndpoint(Section):
    """Liveness, readiness, metrics, sessions and a live page over HTTP."""

    host: str = "127.0.0.1"
    port: Port = 9090

    @field_validator("host")
    @classmethod
    def _loopback_only(cls, host: str) -> str:
        if not is_loopback(host):
            raise ValueError(f"{host!r} is not a loopback address; put a proxy that checks who asks in front of it")
        return host


class Endpoints(Section):
    """All off unless they are named."""

    openpi: OpenpiEndpoint | None = None
    lerobot: LerobotEndpoint | None = None
    admin: AdminEndpoint | None = None
