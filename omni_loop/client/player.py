"""A robot's control loop on one side, the server's chunks on the other::

    with ChunkPlayer("127.0.0.1:50051", "pusht", keys=("image", "agent_pos")) as player:
        while running:                                  # at the robot's own rate
            player.observe({"image": camera(), "agent_pos": position()})
            played = player.next_action()               # never waits
            if played.action is not None:
                robot.command(played.action)

Neither call waits for the network: a thread of the player's own sends observations when it is time, takes the chunks,
attaches again when the connection is lost, and never lets the loop know more than that actions have run dry: then
``played.source`` is "watchdog".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ..errors import OmniLoopError
from ..types import SessionSpec
from ..wire import codec
from . import arguments, channel, images
from .aio import AsyncClient
from .credentials import Tls
from .playback import Playback, Played, Watchdog
from .player_thread import PlayerThread


@dataclass(frozen=True, slots=True)
class PlayerStats:
    """Since the player began. ``jump``: mean length of the step from the last action of a chunk to the first of the
    next, ``stride``: of steps inside a chunk, both in the action's unit. ``delay``: control periods that an answer is
    expected to take."""

    played: int  # actions of chunks
    watchdog: int  # periods without one
    sent: int
    chunks: int  # that took over
    late: int  # chunks whose rows were all for steps that are over
    stale: int  # answers of an episode that is over
    skipped: int
    refused: int
    resets: int
    reconnects: int
    delay: int
    latency_ms: float  # median of the last ones
    latency_p99_ms: float
    seams: int
    jump: float
    jump_max: float
    stride: float


class ChunkPlayer:
    """See the module's text. For one control thread; its own thread ends with :meth:`close`.

    Args:
        address: ``host:port``. pipeline, keys, prompt, seed, options, image_encoding: as for
            :meth:`Client.open <omni_loop.client.sync.Client.open>`.
        watchdog: what to do when actions have run dry: ``hold`` the last one, ``stop`` (all zeros), ``home``, or an
            action ``float32[action_dim]``. Before the first action of an episode nothing can be held: then
            :meth:`next_action` gives None.
        home: the action of the watchdog ``home``.
        execution_horizon: actions of a chunk that are played before the next takes over; 0: as the pipeline says.
        join: ask for real-time chunking: chunks join without a jump. False: each chunk is made afresh.
        pad: images are resized in their own shape, between black bars; else stretched.
        deadline_ms: an answer that takes longer is not worth having; 0: none.
        timeout_s, token, tls: as for :func:`omni_loop.client.connect_async`.

    Raises:
        InvalidInput, TensorError: an argument that cannot be right. And what opening a session raises.
    """

    def __init__(
        self,
        address: str,
        pipeline: str,
        *,
        keys: Sequence[str] = (),
        prompt: str = "",
        seed: int | None = None,
        options: Mapping[str, Any] | None = None,
        image_encoding: str = "raw",
        watchdog: Watchdog = "hold",
        home: ArrayLike | None = None,
        execution_horizon: int = 0,
        join: bool = True,
        pad: bool = False,
        deadline_ms: float = 0.0,
        timeout_s: float = channel.TIMEOUT_S,
        token: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        arguments.address("address", address)
        arguments.duration("deadline_ms", deadline_ms)
        timeout_s = arguments.seconds("timeout_s", timeout_s)
        opening = {"keys": keys, "prompt": prompt, "seed": seed, "options": options, "image_encoding": image_encoding}

        def connection() -> AsyncClient:
            return AsyncClient(address, timeout_s, token, tls)

        def made(spec: SessionSpec) -> Playback:
            return Playback(spec, watchdog, home, execution_horizon, join)

        self._thread = PlayerThread(connection, pipeline, opening, made, deadline_ms)
        self._thread.fit = lambda arrays: images.fit(self.spec, arrays, pad)
        self._lock = self._thread.lock
        self._thread.start()

    def __enter__(self) -> ChunkPlayer:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def spec(self) -> SessionSpec:
        return self._thread.session.spec

    @property
    def session(self) -> str:
        """The session's id; another one when a reset had to open a new session."""
        return self._thread.session.id

    @property
    def step(self) -> int:
        """The control step whose action is next."""
        with self._lock:
            return self._thread.playback.step

    @property
    def error(self) -> OmniLoopError | None:
        """Why the session is lost, for good: from now on the watchdog acts, until a :meth:`reset` opens another one."""
        return self._thread.error

    @property
    def last_refusal(self) -> OmniLoopError | None:
        """Why the last refused observation was refused; the session goes on."""
        return self._thread.refusal

    def observe(self, arrays: Mapping[str, ArrayLike], captured_ns: int = 0) -> None:
        """What was sensed just now, before the action that :meth:`next_action` gives next. The newest one is sent when
        it is time; the others never are. Arrays are copied. Images may be of any size and of floats in 0..1.

        Raises:
            TensorError: names other than the session's keys; or what was found wrong with an observation before.
        """
        codec.check_keys(self._thread.session.keys, arrays)
        copies = {name: np.array(value) for name, value in arrays.items()}
        with self._lock:
            bad, self._thread.bad = self._thread.bad, None
            if bad is None:
                self._thread.playback.see(copies, captured_ns)
        if bad is not None:
            raise bad
        self._thread.wake()

    def next_action(self) -> Played:
        """The action of this control period. Never waits, never raises for what the network or the server do."""
        with self._lock:
            return self._thread.playback.next()

    def wait(self, timeout_s: float) -> bool:
        """Wait until an action of a chunk is there, or the session is lost; False when neither came in time. For before
        an episode's first action: after it, the control loop has no time to wait."""
        return self._thread.ready.wait(timeout_s)

    def reset(self, *, seed: int | None = None, prompt: str | None = None) -> None:
        """Begin a new episode, now: no action of the one before is given any more. Observe next. Does not wait; a
        session that is lost is replaced by a new one."""
        self._thread.reset(seed, prompt)

    def stats(self) -> PlayerStats:
        with self._lock:
            counts, delays = self._thread.playback.counts, self._thread.playback.delays
            seams = counts.seams
            return PlayerStats(
                played=counts.played,
                watchdog=counts.watchdog,
                sent=counts.sent,
                chunks=counts.chunks,
                late=counts.late,
                stale=counts.stale,
                skipped=counts.skipped,
                refused=counts.refused,
                resets=counts.resets,
                reconnects=self._thread.reconnects,
                delay=delays.periods,
                latency_ms=delays.latency_ms(0.5),
                latency_p99_ms=delays.latency_ms(0.99),
                seams=seams.count,
                jump=seams.jump,
                jump_max=seams.jump_max,
                stride=seams.stride,
            )

    def close(self) -> None:
        """End the session and the thread. Closing twice does nothing."""
        self._thread.close()
