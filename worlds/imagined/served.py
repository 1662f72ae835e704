"""The world model behind an imagined env: a pipeline of a server that runs, or of one that is started for it."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from omni_loop.client import Client, Session, connect
from omni_loop.config import Deployment, load_deployment
from omni_loop.errors import ConfigError, UnknownName, Unsupported, nearest
from omni_loop.messages import Scalar
from omni_loop.serve.background import BackgroundServer
from omni_loop.types import Op, SessionSpec

READY_S = 300.0  # to load and warm up, also on a busy machine


class ServedWorld:
    """``server`` is an address ``host:port``, a deployment, or the name of a shipped one. For a deployment a server is
    started with the first session; every world of this process with an equal deployment shares it, and it ends with the
    last of them. ``prompt`` and ``options`` go to every session.

    Usable from several threads. Whoever keeps it calls :meth:`hold`, and :meth:`release` once when done.
    """

    def __init__(
        self,
        server: str | Deployment,
        pipeline: str,
        *,
        prompt: str = "",
        options: Mapping[str, Scalar] | None = None,
        timeout_s: float = 120.0,
    ) -> None:
        self._server = load_deployment(server) if isinstance(server, str) and ":" not in server else server
        self.pipeline, self.prompt, self.options = pipeline, prompt, dict(options or {})
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._holders = 0
        self._client: Client | None = None
        self._spec: SessionSpec | None = None

    @property
    def spec(self) -> SessionSpec:
        """Of the pipeline; connects.

        Raises:
            UnknownName: the server has no such pipeline.
            Unsupported: it cannot be conditioned on real frames, or predicts none.
            OmniLoopError: whatever keeps the server from answering.
        """
        client = self._connected()
        with self._lock:
            if self._spec is None:
                self._spec = _checked(client.info().pipelines, self.pipeline)
            return self._spec

    def open(self, seed: int) -> Session:
        """A fresh session, which has seen nothing."""
        digest = self.spec.digest
        return self._connected().open(
            self.pipeline, prompt=self.prompt, seed=seed, options=self.options, spec_digest=digest
        )

    def hold(self) -> ServedWorld:
        """One more keeps it; returns itself."""
        with self._lock:
            self._holders += 1
        return self

    def release(self) -> None:
        """One less; with the last the connection ends, and a server that nobody else shares."""
        with self._lock:
            self._holders -= 1
            client, last = self._client, self._holders <= 0
            if last:
                self._client = None
        if last and client is not None:
            client.close()
            if isinstance(self._server, Deployment):
                _leave(self._server)

    def _connected(self) -> Client:
        with self._lock:
            if self._client is None:
                address = self._server if isinstance(self._server, str) else _join(self._server)
                self._client = connect(address, timeout_s=self._timeout_s)
            return self._client


def _checked(known: Mapping[str, SessionSpec], pipeline: str) -> SessionSpec:
    spec = known.get(pipeline)
    if spec is None:
        raise UnknownName(f"the server has no pipeline {pipeline!r}.{nearest(pipeline, known)}")
    for op in (Op.RECONDITION, Op.PREDICT):
        if op not in spec.ops:
            can = ", ".join(sorted(spec.ops))
            raise Unsupported(f"pipeline {pipeline!r} cannot {op}, so nothing can be imagined in it; it can {can}")
    if spec.frame is None:
        raise Unsupported(f"pipeline {pipeline!r} predicts no frames")
    return spec


def frame_key(spec: SessionSpec, key: str = "") -> str:
    """The observation that shows what predicted frames show: ``key``, or the only one of their shape.

    Raises:
        UnknownName: the pipeline has no observation ``key``.
        ConfigError: ``key`` is left out, and none or several fit.
    """
    known = [array.name for array in spec.observations]
    if key:
        if key not in known:
            raise UnknownName(f"pipeline {spec.pipeline!r} has no observation {key!r}.{nearest(key, known)}")
        return key
    frame = spec.frame
    fits = [a.name for a in spec.observations if frame and (a.shape, a.dtype) == (frame.shape, frame.dtype)]
    if len(fits) != 1:
        raise ConfigError(
            f"pipeline {spec.pipeline!r}: {len(fits)} of its observations have the shape of its frames; "
            f"name the one they continue, of {', '.join(known)}"
        )
    return fits[0]


class _Shared:
    """A server that was started here, and how many use it. The lock is held while it starts."""

    def __init__(self, deployment: Deployment) -> None:
        self.lock = threading.Lock()
        self.server = BackgroundServer(deployment, READY_S)
        self.users = 0


_shared: dict[str, _Shared] = {}
_shared_lock = threading.Lock()


def _join(deployment: Deployment) -> str:
    """The address of this process's server of ``deployment``, started when there is none."""
    key = deployment.model_dump_json()
    with _shared_lock:
        entry = _shared.setdefault(key, _Shared(deployment))
        entry.users += 1
    try:
        with entry.lock:
            if not entry.server.address:
                entry.server.start()
            return entry.server.address
    except BaseException:
        _leave(deployment)
        raise


def _leave(deployment: Deployment) -> None:
    key = deployment.model_dump_json()
    with _shared_lock:
        entry = _shared[key]
        entry.users -= 1
        if entry.users:
            return
        del _shared[key]
    entry.server.stop()
