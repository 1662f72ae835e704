"""Reading recordings: runs, their episodes, and the ticks of each as the loop told them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInput, MissingExtra, OmniLoopError, Reason, UnknownName
from ..types import Op, SessionSpec
from . import layout, sealed
from .about import About
from .about import read as read_about
from .table import Table, Tick

if TYPE_CHECKING:
    import zarr


class RecordingError(OmniLoopError):
    """A recording is missing, of another version, or not as it was written."""

    reason = Reason.BAD_SNAPSHOT


@dataclass(frozen=True)
class Episode:
    """One session from its opening, fork, restore or reset to its end. ``name`` is unique in the recording.

    ``begin``: how it began (``event`` open, fork, restore or reset; ``source``; epoch, tick, seq, step, seed, prompt).
    ``length`` in ticks, of which ``lost`` are without arrays; ``gaps``: how often some are missing; ``ended``: its end
    is here. ``complete``: every tick of it is here with its arrays, to its end.
    """

    name: str
    session: str
    number: int
    spec: SessionSpec
    keys: tuple[str, ...]
    kept: tuple[str, ...]
    options: Mapping[str, Any]
    begin: Mapping[str, Any]
    folders: tuple[Path, ...] = field(repr=False)
    length: int = 0
    lost: int = 0
    gaps: int = 0
    ended: bool = True
    numbers: tuple[int, ...] = field(default=(), repr=False)  # of the parts in ``folders``

    def parts(self) -> Iterator[tuple[list[Tick], list[dict[str, Any]]]]:
        """Ticks and events, part by part, read from disk each time. Raises :class:`RecordingError` when a file is not
        as it was written."""
        return (_read_part(folder) for folder in self.folders)

    @property
    def ticks(self) -> list[Tick]:
        """In the order in which they committed. Read from disk, as :meth:`parts` says."""
        return [tick for ticks, _ in self.parts() for tick in ticks]

    @property
    def events(self) -> list[dict[str, Any]]:
        """What happened besides ticks: failed, gap, lost, rewind, snapshot, ended. Read from disk."""
        return [event for _, events in self.parts() for event in events]

    @property
    def complete(self) -> bool:
        return not self.incomplete

    @property
    def incomplete(self) -> str:
        """Why it is not complete; empty: it is."""
        if self.lost or self.gaps:
            return "ticks were lost when it was recorded, or parts of it are missing; it has gaps"
        if not self.ended:
            return "its end is missing: the server was killed, lost its last part, or still records it"
        return ""

    @property
    def line(self) -> list[Tick]:
        """The ticks that count in the end: what a rewind or a recondition of the past took back is left out."""
        ticks, events = [], []
        for some, happened in self.parts():
            ticks += some
            events += happened
        rewinds = sorted((e["order"], e["step"]) for e in events if e["event"] == "rewind")
        line: list[Tick] = []
        for tick in ticks:
            while rewinds and rewinds[0][0] < tick.order:
                _back_to(line, rewinds.pop(0)[1])
            if tick.op is Op.RECONDITION and tick.result.epoch > tick.epoch:
                while line and line[-1].stands >= tick.step:
                    line.pop()
            if tick.op is not Op.PLAN:
                line.append(tick)
        for _, step in rewinds:
            _back_to(line, step)
        return line


def _back_to(line: list[Tick], step: int) -> None:
    """Take back what came after the last tick that stood at ``step``."""
    while line and line[-1].stands != step:
        line.pop()


class Recording:
    """A run, or a folder of runs.

    ``unfinished``: parts that are open: a server is recording them, or was killed. ``broken``: what cannot be read, and
    why. ``missing``: by session, episodes that lie between others and are not here.

    Raises:
        RecordingError: there is none, or one of a version that is not known.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        runs = [path] if (path / layout.RUN).is_file() else sorted(p.parent for p in path.glob(f"*/{layout.RUN}"))
        if not runs:
            raise RecordingError(f"there is no recording in {path}")
        self.runs = {run.name: _read_run(run) for run in runs}
        self.unfinished: list[str] = []
        self.broken: dict[str, str] = {}
        self.missing: dict[str, list[int]] = {}
        self.episodes: list[Episode] = []
        for run in runs:
            self._read(run, f"{run.name}/" if len(runs) > 1 else "")

    def __len__(self) -> int:
        return len(self.episodes)

    def __iter__(self) -> Iterator[Episode]:
        return iter(self.episodes)

    @property
    def deployment(self) -> dict[str, Any]:
        """What the last run served."""
        deployment: dict[str, Any] = self.runs[max(self.runs)]["deployment"]
        return deployment

    def select(self, wanted: Sequence[str]) -> list[Episode]:
        """Episodes by number ("3"), range ("3-7") or name; none named: all.

        Raises:
            UnknownName: no such episode. InvalidInput: what says none.
        """
        if not wanted:
            return list(self.episodes)
        chosen: dict[str, Episode] = {}
        names = {episode.name: episode for episode in self.episodes}
        for text in wanted:
            found = [names[text]] if text in names else [self.episodes[i] for i in self._indices(text)]
            chosen |= {episode.name: episode for episode in found}
        return [episode for episode in self.episodes if episode.name in chosen]

    def _indices(self, text: str) -> range:
        said = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
        if said is None:
            raise InvalidInput(f"{text!r} names no episode; say a number such as 3, a range such as 3-7, or a name")
        first, last = int(said[1]), int(said[2] or said[1])
        if last < first:
            raise InvalidInput(f"the range {text} runs backwards; say {last}-{first}")
        indices = range(first, last + 1)
        if indices.stop > len(self):
            raise UnknownName(f"there is no episode {text}; the recording has {len(self)}, from 0 on")
        return indices

    def _read(self, run: Path, prefix: str) -> None:
        groups: dict[tuple[str, int], list[tuple[Path, About]]] = {}
        for folder in sorted(p for p in run.iterdir() if p.is_dir()):
            if folder.name.startswith("."):
                self.unfinished.append(prefix + folder.name.removeprefix(layout.OPEN))
                continue
            try:
                about = read_about(folder)  # its files are checked when its ticks are read
            except (OSError, ValueError) as error:
                self.broken[prefix + folder.name] = f"the episode {folder.name} is corrupt: {error}"
                continue
            groups.setdefault((about.session, about.episode), []).append((folder, about))
        for parts in groups.values():
            parts.sort(key=lambda part: part[1].part)
            self.episodes.append(_episode(prefix, parts))
        for session in dict.fromkeys(session for session, _ in groups):
            here = {number for of, number in groups if of == session}
            if holes := sorted(set(range(max(here))) - here):
                self.missing[session] = holes


def _episode(prefix: str, parts: Sequence[tuple[Path, About]]) -> Episode:
    first, numbers = parts[0][1], tuple(about.part for _, about in parts)
    return Episode(
        name=prefix + parts[0][0].name,
        session=first.session,
        number=first.episode,
        spec=first.spec,
        keys=first.keys,
        kept=first.kept,
        options=first.options,
        begin=first.begin.model_dump(),
        folders=tuple(folder for folder, _ in parts),
        length=sum(about.ticks for _, about in parts),
        lost=sum(about.lost for _, about in parts),
        gaps=sum(about.gaps for _, about in parts) + (numbers != tuple(range(len(parts)))),
        ended=parts[-1][1].ended,
        numbers=numbers,
    )


def _read_run(run: Path) -> dict[str, Any]:
    try:
        about: dict[str, Any] = json.loads((run / layout.RUN).read_text(encoding="utf-8"))
        version, served = about["version"], about["deployment"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordingError(f"{run.name}: {layout.RUN} cannot be read: {type(error).__name__}") from error
    if version != layout.VERSION:
        raise RecordingError(f"{run.name} is of version {version}; this program reads version {layout.VERSION}")
    if not isinstance(served, dict):
        raise RecordingError(f"{run.name}: {layout.RUN} says no deployment: it is a {type(served).__name__}")
    return about


def _read_part(folder: Path) -> tuple[list[Tick], list[dict[str, Any]]]:
    try:
        content, _ = sealed.checked(folder, layout.VERSION)
    except sealed.OtherVersion as error:
        raise RecordingError(f"the episode {folder.name} {error}") from error
    except (sealed.Corrupt, OSError, ValueError) as error:
        raise RecordingError(f"the episode {folder.name} is corrupt: {error}") from error
    try:
        return Table(_group(content)).read()
    except Exception as error:  # the bytes are as they were written, and yet no episode of ours
        raise RecordingError(f"the episode {folder.name} cannot be read: {type(error).__name__}: {error}") from error


def _group(content: Mapping[str, bytes]) -> zarr.Group:
    try:
        import zarr
        from zarr.core.buffer import default_buffer_prototype
    except ImportError as error:
        raise MissingExtra("recordings need zarr: install omni-loop[serve]") from error
    buffer = default_buffer_prototype().buffer
    store = zarr.storage.MemoryStore({name: buffer.from_bytes(b) for name, b in content.items()}, read_only=True)
    return zarr.open_group(store, mode="r")
