"""A worker process: started, asked, watched over, and ended by its process id.

Every wait has a limit. A worker that ends, hangs or answers nonsense is killed at once and reported as
:class:`~omni_loop.errors.EnvFailed`; what it printed last is logged. It leads a process group of its own, so that what
it started goes with it and Ctrl-C at a terminal stays with us.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from omni_loop.errors import ConfigError, EnvFailed, InvalidInput, OmniLoopError, Unsupported, rebuild
from omni_loop.types import Array

from .side.wire import Message, VersionError, WireError, pack, read

log = logging.getLogger(__name__)

_TAIL = 4096  # bytes kept of what a worker prints
_CLOSE_S, _ENDING_S = 10.0, 1.0  # for a process to end that was asked to, and for one whose socket has ended
_LONGEST_S = 86_400  # of a wait; the system's own ends at 24 days


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. ``start``: importing a simulator and making its first scene; ``answer``: any request after that."""

    start: float = 300.0
    answer: float = 120.0

    def __post_init__(self) -> None:
        for name, value in (("start_s", self.start), ("answer_s", self.answer)):
            if not 0 < value <= _LONGEST_S:
                raise ConfigError(f"{name} is {value:g}, wanted more than 0 and at most {_LONGEST_S} s")


class _Gone(Exception):
    """The other end of the socket is closed."""


class _Late(Exception):
    """Nothing came in time."""


class WorkerProcess:
    """Runs ``command`` with the number of an open socket as its last argument. ``name`` is for texts."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._number, self._heard, self._over = 0, b"", ""
        ours, theirs = socket.socketpair()
        try:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,  # neither is the protocol's: simulators print
                pass_fds=(theirs.fileno(),),
                env=None if environ is None else dict(environ),
                start_new_session=True,
            )
        except OSError as e:
            ours.close()
            raise EnvFailed(f"the worker of env {name!r} cannot be started: {e.strerror}") from None
        finally:
            theirs.close()
        assert self._process.stdout is not None
        ours.setblocking(False)
        os.set_blocking(self._process.stdout.fileno(), False)
        self._link, self._printed = ours, self._process.stdout
        # Also when nobody closes it, and at the end of this process.
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, ours, self._printed)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._end.alive

    def ask(
        self,
        request: str,
        limit_s: float,
        fields: Mapping[str, Any] | None = None,
        arrays: Mapping[str, Array] | None = None,
    ) -> Message:
        """The answer to ``request``.

        Raises:
            EnvFailed: the worker ended, did not answer within ``limit_s``, answered nonsense, or its simulator raised;
                or one of these was said before. It is dead then.
            Unsupported: it speaks another version of the protocol; it is dead then, too.
            OmniLoopError: what the worker refused, as the error it stands for; it goes on.
        """
        if not self.alive:
            raise EnvFailed(self._over or f"the worker of env {self.name!r} was ended")
        self._number += 1
        try:
            frame = pack(Message({"request": request, "id": self._number, **(fields or {})}, arrays or {}))
        except WireError as e:
            raise InvalidInput(f"env {self.name!r} cannot be asked to {request!r}: {e}") from None
        deadline = time.monotonic() + limit_s
        try:
            self._send(frame, deadline)
            answer = read(lambda count: self._take(count, deadline))
        except _Late:
            raise self.failed(f"did not answer {request!r} within {limit_s:g} s and was killed") from None
        except _Gone:
            raise self.failed(f"ended ({self._ending()}) when it was asked to {request!r}") from None
        except VersionError as e:
            self.kill()
            raise Unsupported(f"the worker of env {self.name!r} is of another version: {e}") from None
        except WireError as e:
            raise self.failed(f"answered {request!r} with what is no message: {e}") from None
        if (error := answer.fields.get("error")) is not None:
            self._raise(request, error)
        if answer.fields.get("id") != self._number:
            raise self.failed(f"answered another request than {request!r}")
        return answer

    def close(self) -> None:
        """Ask the worker to end, and kill it where it does not. Afterwards there is no such process."""
        if self.alive:
            with suppress(OmniLoopError):
                self.ask("close", _CLOSE_S)
                self._ended(_CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End it now, and all that it started."""
        self._end()

    def _raise(self, request: str, error: Any) -> None:
        said = error if isinstance(error, dict) else {}
        code, reason, text = said.get("code"), said.get("reason"), said.get("text")
        if not (isinstance(code, str) and isinstance(reason, str) and isinstance(text, str)):
            raise self.failed(f"answered {request!r} with an error that is none")
        raised = rebuild(code, reason, bool(said.get("retryable")), text)
        if isinstance(raised, EnvFailed):
            raise self.failed(f"failed at {request!r}: {text}")
        raise raised

    def failed(self, what: str) -> EnvFailed:
        """End the worker for what it did; returns the error to raise."""
        self._drain()
        self.kill()
        said = self._heard.decode(errors="replace").strip()
        if said:
            log.warning("what the worker of env %r printed last:\n%s", self.name, said)
        self._over = f"the worker of env {self.name!r} {what}"
        return EnvFailed(self._over)

    def _ending(self) -> str:
        """How the process ended whose socket has ended."""
        ended = self._ended(_ENDING_S)
        if ended is None:
            return "its connection was lost"
        by_signal = ended.si_code != os.CLD_EXITED
        return f"signal {signal.Signals(ended.si_status).name}" if by_signal else f"exit code {ended.si_status}"

    def _ended(self, limit_s: float) -> os.waitid_result | None:
        """How the process ended, which may take ``limit_s``; None: it has not. It is not reaped: until its group is
        killed the group's number must not become another's."""
        deadline = time.monotonic() + limit_s
        with suppress(ChildProcessError):  # where this program lets the system reap what it starts
            while (ended := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.005)
            return ended
        return None

    # The wire; what the worker prints is taken beside it, so that a full pipe never stops it.

    def _send(self, frame: bytes, deadline: float) -> None:
        view = memoryview(frame)
        while view:
            try:
                view = view[self._link.send(view) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline)
            except OSError:
                raise _Gone from None

    def _take(self, count: int, deadline: float) -> bytearray:
        data = bytearray(count)
        view, at = memoryview(data), 0
        while at < count:
            try:
                got = self._link.recv_into(view[at:])
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            except OSError:
                raise _Gone from None
            if not got:
                raise _Gone
            at += got
        return data

    def _wait(self, event: int, deadline: float) -> None:
        """Until the socket is ready. Raises :class:`_Late` at the deadline."""
        poll = select.poll()
        poll.register(self._link, event)
        if not self._printed.closed:
            poll.register(self._printed, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1e3))
            if self._link.fileno() in ready:
                return
            if left <= 0:
                raise _Late
            if ready and not self._drain():
                poll.unregister(self._printed)  # it has closed what it prints to

    def _drain(self) -> bool:
        """Keep the end of what was printed; False when no more can come."""
        while True:
            try:
                data = self._printed.read(1 << 16)
            except (OSError, ValueError):
                return False
            if not data:
                return data is None
            self._heard = (self._heard + data)[-_TAIL:]


def _end(owner: int, process: subprocess.Popen[bytes], link: socket.socket, printed: IO[bytes]) -> None:
    """Kill the process and its group, which may outlive it, and wait for it, so that no zombie is left."""
    if os.getpid() != owner:
        return  # a fork of who started it
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # before it is reaped: its number is the group's as long
    process.wait()
    link.close()
    printed.close()
