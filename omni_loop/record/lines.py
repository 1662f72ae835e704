"""The open episode of every session: what happens to it as the recorder's thread is told, and what becomes of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import layout
from .files import Files
from .part import Part, Vanished, describe
from .room import Room

if TYPE_CHECKING:
    from ..config import RecordConfig
    from ..loop.tap import Failed, Opened, Ticked, Turned
    from .recorder import Item, Why

_MAX_UNSEALED = 256  # parts that wait for the disk; the oldest is given up first


@dataclass(slots=True)
class Line:
    """One session. ``begin`` says how its present episode began."""

    opened: Opened
    begin: dict[str, Any]
    part: Part
    episode: int = 0
    number: int = 0
    needed: bool = False  # somebody was forked from it: it is kept even without a tick


class Lines:
    """All open episodes, and the parts that are only to be sealed. ``trouble``: why the last write failed, until one
    succeeds."""

    def __init__(
        self,
        run: Path,
        config: RecordConfig,
        room: Room,
        files: Files,
        on_lost: Callable[[int, Why], None],
        on_written: Callable[[int], None],
    ) -> None:
        self._run, self._config, self._room, self._files = run, config, room, files
        self._on_lost, self._on_written = on_lost, on_written
        self._lines: dict[str, Line] = {}
        self.unsealed: deque[Part] = deque()
        self.trouble = ""

    def take(self, item: Item) -> None:
        """What happened to one session."""
        if item.kind == "opened":
            self._open(item, item.event)
            return
        line = self._lines.get(item.session)
        if line is None:  # its opening was dropped: nothing of it can be understood
            self._on_lost(int(item.kind == "ticked"), "queue")
            return
        if item.gap:
            line.part.events.append(_event("gap", item, ticks=item.gap))
        match item.kind:
            case "ticked":
                self._tick(line, item, item.event)
            case "turned":
                self._turn(line, item, item.event)
            case "failed":
                self._fail(line, item, item.event)
            case _:
                line.part.events.append(_event("ended", item, why=item.event))
                del self._lines[item.session]
                self._close(line)

    def retry(self) -> None:
        """Seal what could not be sealed."""
        for _ in range(len(self.unsealed)):
            if not self._seal(self.unsealed.popleft()):
                return
            self.trouble = ""  # not so when a part is sealed whose ticks have just been lost

    def finish(self) -> None:
        """Seal everything, once more what could not be."""
        for line in self._lines.values():
            line.part.events.append({"event": "cut"})
            self._close(line)
        self._lines = {}
        self.retry()
        for part in self.unsealed:
            self._give_up(part, "disk")
        self.unsealed.clear()

    # Events ------------------------------------------------------------------------------------------------

    def _open(self, item: Item, event: Opened) -> None:
        at = {name: getattr(event, name) for name in ("epoch", "tick", "seq", "step", "seed", "prompt")}
        begin = {**_event(event.origin, item), "source": event.source, **at}
        self._lines[item.session] = Line(event, begin, self._part(event, begin, 0, 0, item.order))
        if event.origin == "fork" and event.source in self._lines:
            self._lines[event.source].needed = True

    def _tick(self, line: Line, item: Item, event: Ticked) -> None:
        try:
            line.part.tick(item.order, item.at_ns, event)
        except Exception:  # a bug: it is logged, and the session goes on without this tick
            line.part.events.append(_event("gap", item, ticks=1))
            self._on_lost(1, "error")
            raise
        if not self._write(line.part):
            self._next_part(line, item.order, lost=line.part.ticks)
        elif line.part.ticks >= self._config.part_ticks:
            self._close(line)
            self._next_part(line, item.order)

    def _turn(self, line: Line, item: Item, event: Turned) -> None:
        if event.kind != "reset":
            said = {"epoch": event.epoch, "step": event.step, "name": event.name}
            line.part.events.append({**_event(event.kind, item), **said})
            return
        line.part.events.append(_event("ended", item, why="reset"))
        kept = self._close(line)
        at = {name: getattr(event, name) for name in ("epoch", "step", "seed", "prompt")}
        line.begin = {**_event("reset", item), "source": "", **at, "tick": 0, "seq": 0}
        # One that left nothing has no number: a reader takes a hole for an episode that went missing.
        line.episode += kept
        line.number, line.needed = 0, False
        line.part = self._part(line.opened, line.begin, line.episode, 0, item.order)

    def _fail(self, line: Line, item: Item, event: Failed) -> None:
        said = _event("failed", item, seq=event.seq, op=event.op, epoch=event.epoch, **describe(event.error))
        line.part.events.append(said)
        if len(line.part.events) >= 4 * self._config.part_ticks:
            self._close(line)
            self._next_part(line, item.order)

    # Parts -------------------------------------------------------------------------------------------------

    def _part(self, o: Opened, begin: dict[str, Any], episode: int, number: int, order: int) -> Part:
        about = {
            "version": layout.VERSION,
            "session": o.session,
            "episode": episode,
            "part": number,
            "spec": layout.encode_spec(o.spec),
            "keys": list(o.keys),
            "kept": [key for key in o.keys if self._config.keys is None or key in self._config.keys],
            "options": dict(o.options),
            "begin": begin,
        }
        name = f"{order:010d}-{o.session}-{episode:04d}-{number:04d}"
        return Part(self._run, name, o.spec, about, self._config.keys, self._config.frames, self._files)

    def _next_part(self, line: Line, order: int, lost: int = 0) -> None:
        line.number += 1
        line.part = self._part(line.opened, line.begin, line.episode, line.number, order)
        if lost:
            line.part.events.append({"event": "gap", "ticks": lost, "order": order})

    def _close(self, line: Line) -> bool:
        """Write what is left of the part at hand and seal it. False: nothing happened in the whole episode, and it is
        forgotten. A later part is kept for the end it carries: without one the episode is not complete."""
        part, kept = line.part, line.number > 0 or line.needed
        if not kept and not part.ticks and not any(e["event"] in ("failed", "gap") for e in part.events):
            part.discard()
            return False
        if self._write(part, everything=True):
            self._seal(part)
        return True

    def _write(self, part: Part, everything: bool = False) -> bool:
        """False: the folder of the part is gone, and the part with it."""
        before, gone = len(part.lost), False
        try:
            if nbytes := part.write(self._room.reserve, everything):
                self._room.add(nbytes)
                self.trouble = ""
        except Exception as error:
            self.trouble, gone = _why(error), isinstance(error, Vanished)
        if lost := len(part.lost) - before:
            part.events.append({"event": "lost", "ticks": lost, "why": self.trouble})
            self._on_lost(lost, "disk")
        if gone:
            self._give_up(part, "gone")
        return not gone

    def _seal(self, part: Part) -> bool:
        try:
            nbytes = part.seal()
        except Vanished as error:
            self.trouble = _why(error)
            self._give_up(part, "gone")
            return False
        except Exception as error:
            self.trouble = _why(error)
            self.unsealed.append(part)
            if len(self.unsealed) > _MAX_UNSEALED:
                self._give_up(self.unsealed.popleft(), "disk")
            return False
        self._room.add(max(0, nbytes - part.nbytes))
        self._on_written(part.ticks - len(part.lost))
        return True

    def _give_up(self, part: Part, why: Why) -> None:
        self._on_lost(part.ticks - len(part.lost), why)


def _event(name: str, item: Item, **more: Any) -> dict[str, Any]:
    return {"event": name, "order": item.order, "at_ns": item.at_ns, **more}


def _why(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else None
    return text or f"{type(error).__name__}: {error}"
