"""A LeRobotDataset's rows in memory.

LeRobot reads every sample of every batch from Arrow tables by itself, which takes longer than a step of a small policy
that sees no images. Such sets are small: their rows are read once, and a batch is a few look-ups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    """The same samples as ``dataset`` (a LeRobotDataset without images) gives, whole batches at a time.

    ``deltas``: for a feature, the rows around the present one that a sample holds, as LeRobot's
    ``delta_timestamps``; those beyond the episode repeat its first or last row, and ``<feature>_is_pad`` says which.
    """

    def __init__(self, dataset: Any, deltas: Mapping[str, Sequence[int]]) -> None:
        columns = {name: np.asarray(column) for name, column in dataset.hf_dataset.with_format("numpy")[:].items()}
        self._columns = {name: torch.from_numpy(column) for name, column in columns.items()}
        self._deltas = {name: torch.tensor(list(wanted)) for name, wanted in deltas.items()}
        self._tasks = list(dataset.meta.tasks.index)
        episode = columns["episode_index"]
        starts = np.flatnonzero(np.r_[True, episode[1:] != episode[:-1]])
        lengths = np.diff(np.r_[starts, len(episode)])
        self._first = torch.from_numpy(np.repeat(starts, lengths))
        self._last = torch.from_numpy(np.repeat(starts + lengths - 1, lengths))

    def __len__(self) -> int:
        return len(self._first)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {name: value[0] for name, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """The collated batch of these rows: what torch's loader asks for when it is there."""
        at = torch.as_tensor(indices)
        batch: dict[str, Any] = {}
        for name, column in self._columns.items():
            if name not in self._deltas:
                batch[name] = column[at]
                continue
            around = at[:, None] + self._deltas[name]
            first, last = self._first[at][:, None], self._last[at][:, None]
            batch[name] = column[around.clamp(first, last)]
            batch[f"{name}_is_pad"] = (around < first) | (around > last)
        batch["task"] = [self._tasks[int(task)] for task in self._columns["task_index"][at]]
        return batch


def whole(batch: Any) -> Any:
    """For loaders: the batch is collated already."""
    return batch
