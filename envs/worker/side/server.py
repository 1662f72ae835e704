"""The worker's loop: one request, one answer, in order, until the socket ends.

Requests are ``hello`` (which makes the env, and is answered with its spec), ``reset``, ``step``, ``observe``,
``render``, ``hold`` and ``close``. An answer repeats the request's ``id``; one with ``error`` says code, reason and
text.
"""

from __future__ import annotations

import io
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from platform import python_version
from typing import Any, NoReturn

import numpy as np

from .adapter import Adapter, WorkerError, unknown
from .wire import Message, WireError, pack, read

FAILED = "env_failed"  # the reason of whatever the simulator raised by itself


def main(fd: int) -> None:
    """Serve over the socket ``fd``; returns when the other side asks to, and ends the process when that is gone."""
    link = socket.socket(fileno=fd)
    link.setblocking(True)
    os.set_inheritable(fd, False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what was printed last shall be seen when this process dies
    threading.Thread(target=_end_with, args=(fd,), name="lifeline", daemon=True).start()
    try:
        Server(link, ADAPTERS).run()
    except (EOFError, ConnectionError):
        _end()
    finally:
        link.close()


def _end_with(fd: int) -> None:
    """End this process when the other side is gone, whatever the simulator is at: nobody would end it otherwise."""
    watch = select.poll()
    watch.register(fd, select.POLLRDHUP)
    while not watch.poll():
        pass
    _end()


def _end() -> NoReturn:
    """End this process and what it has started."""
    if os.getpgrp() == os.getpid():  # as it is started: the group is its own
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _project(options: Mapping[str, Any]) -> Adapter:
    from .project import Project

    return Project(**options)


def _robosuite(options: Mapping[str, Any]) -> Adapter:
    from .robosuite_task import RobosuiteTask

    return RobosuiteTask(**options)


def _libero(options: Mapping[str, Any]) -> Adapter:
    from .libero_task import LiberoTask

    return LiberoTask(**options)


Make = Callable[[Mapping[str, Any]], Adapter]
ADAPTERS: dict[str, Make] = {"project": _project, "robosuite": _robosuite, "libero": _libero}


class Server:
    """Answers what arrives on ``link`` with the env that ``hello`` makes from one of ``adapters``."""

    def __init__(self, link: socket.socket, adapters: Mapping[str, Make]) -> None:
        self._link, self._adapters = link, adapters
        self._env: Adapter | None = None

    def run(self) -> None:
        """Returns when it was asked to close. EOFError, ConnectionError: the other side is gone."""
        while True:
            try:
                request = read(self._take)
            except WireError as e:  # where the next message begins is not known any more
                self._answer({"id": -1, "error": _described(WorkerError(f"the request is no message: {e}"))})
                return
            last = request.fields.get("request") == "close"
            number = request.fields.get("id")
            try:
                fields, arrays = self._handle(request)
                self._answer({"id": number, **fields}, arrays)
            except Exception as e:
                self._answer({"id": number, "error": _described(e)})
            if last:
                return

    def _handle(self, request: Message) -> tuple[dict[str, Any], Mapping[str, Any]]:
        fields = request.fields
        kind, keys = str(fields.get("request")), tuple(fields.get("keys") or ())
        if kind == "hello":
            return self._hello(str(fields["adapter"]), fields["options"]), {}
        if kind == "close":
            if self._env is not None:
                self._env.close()
            return {}, {}
        if self._env is None:
            raise WorkerError("say hello first", "failed_precondition", "bad_request")
        if kind == "reset":
            return {}, self._env.reset(int(fields["seed"]), keys)
        if kind == "step":
            outcome, arrays = self._env.step(request.arrays["action"], keys)
            return {"outcome": asdict(outcome)}, arrays
        if kind == "observe":
            return {}, self._env.observe(keys)
        if kind == "render":
            return {}, {"frame": self._env.render()}
        if kind == "hold":
            return {}, {"action": self._env.hold()}
        raise unknown("request", kind, ("hello", "reset", "step", "observe", "render", "hold", "close"))

    def _hello(self, adapter: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if self._env is not None:
            raise WorkerError("there is an env already", "failed_precondition", "bad_request")
        if adapter not in self._adapters:
            raise unknown("adapter", adapter, self._adapters)
        self._env = self._adapters[adapter](options)
        spec = asdict(self._env.spec)
        spec["versions"] = {"python": python_version(), "numpy": np.__version__, **spec["versions"]}
        return {"spec": spec}

    def _answer(self, fields: Mapping[str, Any], arrays: Mapping[str, Any] | None = None) -> None:
        self._link.sendall(pack(Message(fields, arrays or {})))

    def _take(self, count: int) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            got = self._link.recv_into(view[at:])
            if not got:
                raise EOFError
            at += got
        return data


def _described(error: Exception) -> dict[str, Any]:
    """Errors of this project, and those of adapters, as they are; of any other only what it is and says."""
    code, reason, text = (getattr(error, name, None) for name in ("code", "reason", "text"))
    if isinstance(code, str) and isinstance(reason, str) and isinstance(text, str):
        retryable = bool(getattr(error, "retryable", False))
        return {"code": str(code), "reason": str(reason), "text": text, "retryable": retryable}
    traceback.print_exc(file=sys.stderr)
    text = f"the simulator raised {type(error).__name__}: {error}"
    return {"code": "unavailable", "reason": FAILED, "text": text, "retryable": True}
