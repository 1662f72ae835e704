"""What served frames attend to: a window of frames in place, and frames that take a pass together.

Shapes are those of :mod:`.dit`: ``b`` rollouts, ``p`` tokens a frame, ``s`` tokens of context, ``h`` heads of ``e``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Rope = tuple[Tensor, Tensor]
Rows = slice | Tensor


@dataclass(frozen=True, slots=True)
class Ahead:
    """What frames attend to that take a pass together with the ones before them, once these are ``kept``."""

    seen: Tensor  # [layers, 2, b, s, h, e]
    rows: Rows
    kept: list[tuple[Rows, slice]]  # rows and their places


def look(q: Tensor, k: Tensor, v: Tensor, room: Tensor, rows: Rows) -> Tensor:
    """What frames ``[n, p, h, e]`` read in their ``rows`` of ``room [2, b, s, h, e]``, at whose head they are left."""
    p = q.shape[1]
    room[0, rows, :p], room[1, rows, :p] = k, v
    q, k, v = (t.transpose(1, 2) for t in (q, room[0, rows], room[1, rows]))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


@dataclass(slots=True)
class Context:
    """What the present frame of ``b`` rollouts attends to, side by side in ``room [layers, 2, b, window * p, h, e]``.

    The first place of ``p`` tokens is the present frame's, which every pass writes; behind it stand the frames before,
    keys with their rotary position, in an order that does not matter::

        room    | present | past | past | past | past | past |      a full window of 6
                     └── keep ──► the oldest one's place

    Nothing is moved, roped or copied again while a rollout goes on. ``position[i]`` is row i's present frame, counted
    from the oldest it was given. A pass needs as many frames behind it in every row.
    """

    room: Tensor
    position: list[int]
    tokens: int
    turn: Rope | None = None  # of the present positions, once a pass has asked for it

    @property
    def window(self) -> int:
        """Frames there is room for, the present one included."""
        return self.room.shape[3] // self.tokens

    @property
    def seen(self) -> Tensor:
        """The present frame and those behind it, ``[layers, 2, b, s, h, e]``."""
        return self.room[:, :, :, : (1 + self.position[0]) * self.tokens]  # no more than there is room for

    def ahead(self, rows: Sequence[int]) -> Ahead:
        """The frames after the present ones of ``rows``, in order, which take the same pass."""
        seen = self.room[:, :, :, : (2 + self.position[rows[0]]) * self.tokens]
        return Ahead(seen, self.those(rows), self.places(rows))

    def keep(self, rows: Sequence[int]) -> None:
        """The present frame of ``rows`` takes its place among those before, over the oldest one when all are filled."""
        for here, place in self.places(rows):
            self.room[:, :, here, place] = self.room[:, :, here, : self.tokens]
        self.go_on(rows)

    def places(self, rows: Sequence[int]) -> list[tuple[Rows, slice]]:
        """Where :meth:`keep` puts which of ``rows``."""
        p, past = self.tokens, self.window - 1
        places: dict[int, list[int]] = {}
        for row in rows if past else ():
            places.setdefault((1 + self.position[row] % past) * p, []).append(row)
        return [(self.those(here), slice(at, at + p)) for at, here in places.items()]

    def those(self, rows: Sequence[int]) -> Rows:
        """Index of ``rows``, which are in order."""
        return slice(None) if len(rows) == len(self.position) else torch.tensor(rows, device=self.room.device)

    def go_on(self, rows: Sequence[int]) -> None:
        """The frame behind the present one is the present one now."""
        self.turn = None
        for row in rows:
            self.position[row] += 1
