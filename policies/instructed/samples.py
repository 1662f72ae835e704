"""What the trainer draws: rows of demonstrations with the actions to come, and instructions, right ones and others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_loop.errors import ConfigError
from omni_loop.training.demos import Demos

from .phrases import OTHER, TASKS, task, texts
from .words import BEGIN, END, MOST_WORDS, TOKENS, UNKNOWN, Vocabulary, words_of

TASKS_FILE = "tasks.json"
_COMMON = 3  # tasks that say a word make it one that can be missed


def tasks_of(demos: Demos) -> tuple[str, ...]:
    """Names of the values of the column ``task``.

    Raises:
        ConfigError: the set does not say them. UnknownName: a task nobody has words for.
    """
    try:
        names = json.loads((demos.folder / TASKS_FILE).read_text())
    except FileNotFoundError:
        raise ConfigError(
            f"{demos.folder.name} has no {TASKS_FILE}: an instructed policy learns from demonstrations that say which "
            "task each one is of"
        ) from None
    for name in names:
        task(name)
    return tuple(names)


def vocabulary() -> tuple[str, ...]:
    """All words of the texts that are learned from, in order."""
    patterns = [pattern for t in TASKS.values() for pattern in t.patterns]
    return tuple(sorted({word for text in texts([*patterns, *OTHER]) for word in words_of(text)}))


@dataclass(frozen=True, slots=True)
class Lesson:
    """What one step learns from: instructions ``tokens int64[texts, 32]``, and rows ``at int64[texts * n]`` of the
    samples, n for each instruction, one instruction's behind another's. Where ``holds``, the instruction asks for what
    is not there."""

    tokens: Tensor
    at: NDArray[np.int64]
    holds: NDArray[np.bool_]


class Lessons:
    """Draws ``texts`` instructions a step, the part ``hold_share`` of them wrong ones, and for each of them rows whose
    tasks ``task int64[rows]`` (indices of ``tasks``) are right or wrong for it. Few instructions for many rows: reading
    an instruction costs as much as several rows.

    Raises:
        ConfigError: of a task there is no row.
    """

    def __init__(self, tasks: Sequence[str], task: NDArray[np.int64], texts_per_step: int, hold_share: float) -> None:
        words = Vocabulary(vocabulary())

        def pool(patterns: Sequence[str]) -> NDArray[np.int64]:
            return np.stack([words.tokens(text).numpy() for text in texts(patterns)])

        self._pools = [pool(TASKS[name].patterns) for name in tasks]
        self._others = pool(OTHER)
        self._rows = [np.flatnonzero(task == i) for i in range(len(tasks))]
        if empty := [name for name, rows in zip(tasks, self._rows, strict=True) if not len(rows)]:
            raise ConfigError(f"no demonstration of {', '.join(empty)} succeeded: there is nothing to learn it from")
        known = [TASKS[name] for name in tasks]
        self._elsewhere = [[j for j, there in enumerate(known) if there.scene != told.scene] for told in known]
        here = {(i, j) for i, told in enumerate(known) for j, there in enumerate(known) if told.scene == there.scene}
        self._impossible = sorted((i, j) for i, j in here if not known[i].possible(known[j]))
        self._holding = round(texts_per_step * hold_share)
        self._working = texts_per_step - self._holding
        said = Counter(int(word) for pool in self._pools for word in np.unique(pool))
        common = [word for word, k in said.items() if k >= min(_COMMON, len(tasks)) and word > UNKNOWN]
        self._common = np.array(common)

    def draw(self, batch: int, rng: np.random.Generator) -> Lesson:
        """Of ``batch`` rows, or as many fewer as it takes to give each instruction equally many."""
        n = batch // (self._working + self._holding)
        lessons = [self._right(i, rng) for i in self._in_turn(rng)]
        lessons += [self._wrong(rng) for _ in range(self._holding)]
        tokens = np.stack([self._spoken(text, rng) for text, _ in lessons])
        at = np.concatenate([self._of(among, n, rng) for _, among in lessons])
        return Lesson(torch.from_numpy(tokens), at, np.arange(len(at)) >= self._working * n)

    def _in_turn(self, rng: np.random.Generator) -> list[int]:
        """Tasks, each as often as any other but for one."""
        rounds = -(-self._working // len(self._pools))
        return [int(i) for _ in range(rounds) for i in rng.permutation(len(self._pools))][: self._working]

    def _right(self, i: int, rng: np.random.Generator) -> tuple[NDArray[np.int64], list[int]]:
        return self._pools[i][rng.integers(0, len(self._pools[i]))], [i]

    def _wrong(self, rng: np.random.Generator) -> tuple[NDArray[np.int64], list[int]]:
        """A third, where there is such a thing: what a task of the same scene asks for and cannot be done there, which
        the goal's place alone says. Of the rest as often what none of the tasks is as what another scene's is."""
        if self._impossible and rng.random() < 1 / 3:
            told, there = self._impossible[rng.integers(0, len(self._impossible))]
            return self._right(told, rng)[0], [there]
        i = int(rng.integers(0, len(self._pools)))
        if self._elsewhere[i] and rng.random() < 0.5:
            return self._right(i, rng)[0], self._elsewhere[i]
        return self._others[rng.integers(0, len(self._others))], list(range(len(self._pools)))

    def _of(self, tasks: Sequence[int], n: int, rng: np.random.Generator) -> NDArray[np.int64]:
        """``n`` rows, each of any of ``tasks``."""
        chosen = [self._rows[tasks[j]] for j in rng.integers(0, len(tasks), n)]
        return np.array([rows[rng.integers(0, len(rows))] for rows in chosen])

    def _spoken(self, tokens: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
        """With words nobody knows in between, and without some that many tasks share."""
        words = tokens[1 : 1 + int((tokens[1:] != END).sum())]
        if rng.random() < 0.3:
            words = np.where(np.isin(words, self._common) & (rng.random(len(words)) < 0.4), UNKNOWN, words)
        if rng.random() < 0.3:
            at = rng.integers(0, len(words) + 1, rng.integers(1, 4))
            words = np.insert(words, at, UNKNOWN)[:MOST_WORDS]
        made = np.full(TOKENS, END)
        made[0] = BEGIN
        made[1 : 1 + len(words)] = words
        return made


class Samples:
    """Rows of successful episodes that have an action, each with the labels of its chunk."""

    def __init__(self, demos: Demos, horizon: int, features: int, images: bool) -> None:
        episodes = demos.episodes(successful=True)
        if not len(episodes):
            raise ConfigError(f"no demonstration in {demos.folder} succeeded: there is nothing to learn")
        rows, length = demos.rows(episodes), demos.length[episodes]
        end = np.repeat(demos.start[episodes] + length - 1, length)  # an episode's last row has no action of its own
        task = np.repeat(demos.column("task")[episodes], length)
        self.rows, end, self.task = rows[rows < end], end[rows < end], task[rows < end]
        ahead = self.rows[:, None] + np.arange(horizon)
        self._ahead = torch.from_numpy(np.minimum(ahead, end[:, None] - 1))
        self.mask = torch.from_numpy(ahead < end[:, None]).float()
        self.state = torch.from_numpy(demos.state[:, :features]).float()
        self.label = torch.from_numpy(demos.label).float()
        if images and len(demos.frames) < len(demos.state):
            raise ConfigError(f"{demos.folder} has frames of {len(demos.frames)} of its {len(demos.state)} rows")
        # Drawn from in random order at every step: in memory, once.
        self._frames = torch.from_numpy(np.array(demos.frames)) if images else None

    def states(self, at: NDArray[np.int64]) -> Tensor:
        return self.state[self.rows[at]]

    def images(self, at: NDArray[np.int64]) -> Tensor | None:
        return None if self._frames is None else self._frames[self.rows[at]]

    def chunk(self, at: NDArray[np.int64]) -> Tensor:
        """Labels ``[b, horizon, action_dim]``; beyond the episode the last one again, which the mask leaves out."""
        return self.label[self._ahead[at]]
