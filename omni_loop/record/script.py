"""From recorded episodes to what has to be done, in order, to live through them again."""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .reader import Episode, Recording
from .table import Tick

Do = Literal["begin", "tick", "rewind", "snapshot", "lost", "end"]


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that happened in ``episode``: a ``tick``, or an ``event`` of it. That of its end says whether the
    session ``goes_on`` with another episode that is wanted."""

    do: Do
    order: int
    episode: Episode
    tick: Tick | None = None
    event: dict[str, Any] | None = None


def script(recording: Recording, wanted: Sequence[Episode]) -> Iterator[Act]:
    """What happened in ``wanted`` and in the episodes they continue, in the order in which it did."""
    chosen = _with_ancestors(recording, wanted)
    restored = {e.begin["source"] for e in chosen if e.begin["event"] == "restore"}
    numbers = {(_run(e), e.session, e.number) for e in chosen}
    runs: dict[str, list[Iterator[Act]]] = {}
    for episode in chosen:
        goes_on = (_run(episode), episode.session, episode.number + 1) in numbers
        runs.setdefault(_run(episode), []).append(_acts(episode, restored, goes_on))
    for run in sorted(runs):
        yield from heapq.merge(*runs[run], key=lambda act: act.order)


def _acts(episode: Episode, restored: Container[str], goes_on: bool) -> Iterator[Act]:
    """One part at a time is in memory, and none before the episode begins."""
    last = int(episode.begin["order"])
    yield Act("begin", last, episode, event=dict(episode.begin))
    for i, (ticks, events) in enumerate(episode.parts()):
        if episode.numbers and episode.numbers[i] != i:
            yield Act("lost", last, episode)
        acts = [Act("tick" if tick.kept else "lost", tick.order, episode, tick) for tick in ticks]
        for event in events:
            order = int(event.get("order", acts[-1].order if acts else last))
            if event["event"] == "rewind" or (event["event"] == "snapshot" and event["name"] in restored):
                acts.append(Act(event["event"], order, episode, event=event))
            elif event["event"] == "gap":
                acts.append(Act("lost", order, episode, event=event))
        acts.sort(key=lambda act: act.order)
        yield from acts
        # The end has an order of its own: forks came before it.
        last = max((last, *(act.order for act in acts), *(int(e.get("order", 0)) for e in events)))
    yield Act("end", last, episode, event={"goes_on": goes_on})


def _with_ancestors(recording: Recording, wanted: Sequence[Episode]) -> list[Episode]:
    chosen = {episode.name: episode for episode in wanted}
    todo = list(wanted)
    while todo:
        source = _source(recording, todo.pop())
        if source is not None and source.name not in chosen:
            chosen[source.name] = source
            todo.append(source)
    return [episode for episode in recording if episode.name in chosen]


def _source(recording: Recording, episode: Episode) -> Episode | None:
    """The episode that ``episode`` continues: the one its session's parent, or its snapshot, was in at that time."""
    begin = episode.begin
    if begin["event"] == "fork":
        before = [e for e in recording if e.session == begin["source"] and _same_run(e, episode)]
    elif begin["event"] == "restore":
        before = [e for e in recording if _same_run(e, episode) and _saved(e, begin["source"], begin["order"])]
    else:
        return None
    return max((e for e in before if e.begin["order"] < begin["order"]), key=lambda e: e.begin["order"], default=None)


def _saved(episode: Episode, name: str, before: int) -> bool:
    return any(e["event"] == "snapshot" and e["name"] == name and e["order"] < before for e in episode.events)


def _run(episode: Episode) -> str:
    return episode.folders[0].parent.name


def _same_run(a: Episode, b: Episode) -> bool:
    return _run(a) == _run(b)
