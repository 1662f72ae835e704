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
_PHRASES, _OTHERS = 4, 8  # texts a step: of each task, and of what is none of them
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
class Told:
    """Instructions of one step: ``tokens int64[n, 32]`` and which of them each row is told, ``text int64[b]``."""

    tokens: Tensor
    text: Tensor


class Phrasings:
    """Draws instructions for rows of ``tasks``."""

    def __init__(self, tasks: Sequence[str]) -> None:
        self._vocabulary = Vocabulary(vocabulary())
        self._pools = [self._tokens(texts(task(name).patterns)) for name in tasks]
        self._others = self._tokens(texts(OTHER))
        n = len(tasks)
        # Slots of a step's texts: those of each task, then the others.
        of_others = np.arange(n * _PHRASES, n * _PHRASES + _OTHERS)
        scenes = [task(name).scene for name in tasks]
        self._wrong = []
        for i in range(n):
            elsewhere = [j for j in range(n) if scenes[j] != scenes[i]]
            slots = [np.arange(j * _PHRASES, (j + 1) * _PHRASES) for j in elsewhere]
            # As many others as wrong tasks, whatever their numbers.
            wrong = np.concatenate(slots) if slots else of_others
            self._wrong.append((wrong, of_others))
        said = Counter(int(word) for pool in self._pools for word in np.unique(pool))
        self._common = np.array([word for word, k in said.items() if k >= min(_COMMON, n) and word > UNKNOWN])

    def _tokens(self, pool: Sequence[str]) -> NDArray[np.int64]:
        return np.stack([self._vocabulary.tokens(text).numpy() for text in pool])

    def draw(self, rows: NDArray[np.int64], holding: NDArray[np.bool_], rng: np.random.Generator) -> Told:
        """For rows of the tasks ``rows [b]``: their own instruction, or where ``holding`` one that asks for what is not
        there."""
        tokens = [pool[rng.integers(0, len(pool), _PHRASES)] for pool in self._pools]
        tokens.append(self._others[rng.integers(0, len(self._others), _OTHERS)])
        text = rows * _PHRASES + rng.integers(0, _PHRASES, len(rows))
        for i in np.flatnonzero(holding):
            wrong = self._wrong[rows[i]][int(rng.random() < 0.5)]
            text[i] = wrong[rng.integers(0, len(wrong))]
        spoken = np.stack([self._spoken(t, rng) for t in np.concatenate(tokens)])
        return Told(torch.from_numpy(spoken), torch.from_numpy(text))

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
