"""One session's frames under way, pass by pass, and how jobs come to lie side by side in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor

from omni_loop.messages import PayloadKind, Scalar
from omni_loop.stage import Outputs, Payload, StageItem

from ..dit import Context


class FrameJob:
    """A tick's frames in order: ``observed`` real ones, then ``imagined`` ones. ``actions [k, a]`` lead to the last
    k of them; to a first frame leads none. Real frames' latents are given, or read from ``images`` first.

    The next pass takes ``x [p, c]`` at noise ``level`` behind ``prev [p, c]`` under ``action [a]``, if that is
    ``known``. Level 0 is the clean pass; a denoise step leads all but ``ratio`` of the way from ``x`` to its guess. The
    session's state is not written before :meth:`store`.
    """

    x: Tensor
    prev: Tensor
    action: Tensor
    known: bool

    def __init__(
        self,
        item: StageItem,
        actions: Tensor,
        meta: Mapping[str, Scalar],
        observed: int = 0,
        imagined: int = 0,
        levels: Sequence[float] = (),
        images: Tensor | None = None,
        latents: Tensor | None = None,
    ) -> None:
        self._item, self._actions, self._meta = item, actions, meta
        self._observed, self._frames = observed, observed + imagined
        self._steps = list(pairwise(levels))
        self._step = 0  # of the present frame
        self._generator = torch.Generator().manual_seed(item.noise_seed("frames"))
        self._real = latents
        self.images = images
        self._last: Tensor | None = None  # latents of the frame before the present one
        self._made: list[Tensor] = []  # latents of the frames that are done,
        self._fresh: list[Tensor] = []  # and their keys and values [layers, 2, p, h, e]
        self.context: Context | None = None  # with a row for every job of the same passes
        self.row = 0

    def start(self, context: Context, last: Tensor | None) -> None:
        """``context`` for this job alone; ``last`` are the latents of the frame before, if there is one."""
        self.context, self._last = context, last
        if self.images is None:
            self._next_frame()

    def see(self, latents: Tensor) -> None:
        """The latents ``[n, p, c]`` of the images."""
        self._real, self.images = latents, None
        self._next_frame()

    @property
    def finished(self) -> bool:
        return len(self._made) == self._frames

    @property
    def position(self) -> int:
        """Of the present frame in its context."""
        assert self.context is not None
        return self.context.position[self.row]

    @property
    def level(self) -> float:
        return self._steps[self._step][0] if self._step < len(self._steps) else 0.0

    @property
    def ratio(self) -> float:
        now, then = self._steps[self._step] if self._step < len(self._steps) else (1.0, 1.0)
        return then / now

    def end_step(self, x: Tensor) -> None:
        """A denoise step has led to ``x``."""
        self.x, self._step = x, self._step + 1

    def end_frame(self, fresh: Tensor) -> None:
        """The clean pass gave the present frame's keys and values ``[layers, 2, p, h, e]``."""
        self._made.append(self.x)
        self._fresh.append(fresh)
        self._last = self.x
        if not self.finished:
            self._next_frame()

    def _next_frame(self) -> None:
        i = len(self._made)
        if i < self._observed:
            assert self._real is not None
            self.x, self._step = self._real[i], len(self._steps)
        else:
            assert self._last is not None
            self.x, self._step = torch.randn(self._last.shape, generator=self._generator).to(self._last.device), 0
        self.prev = self.x if self._last is None else self._last  # a first frame stands in for the one before it
        at = i - (self._frames - len(self._actions))
        self.known = at >= 0
        self.action = self._actions[at] if self.known else self._actions.new_zeros(self._actions.shape[1])

    def store(self) -> Outputs:
        """Stage blocks and latents of all frames. The output holds the imagined ones, or all when none is."""
        n, state = self._observed, self._item.state
        for fresh, imagined in ((self._fresh[:n], False), (self._fresh[n:], True)):
            if fresh:
                state.kv("kv").append(torch.cat(fresh, 2), imagined=imagined)
        ring = state.ring("recent")
        for latents in self._made:
            ring.push(latents)
        shown = self._made[n:] if self._frames > n else self._made
        arrays = {"latents": torch.stack(shown), "actions": self._actions}
        return {"latents": Payload(PayloadKind.LATENTS, arrays, self._meta)}


def side_by_side(jobs: list[FrameJob]) -> tuple[list[FrameJob], Context]:
    """``jobs``, which hold equally many frames, in the order of the rows of the context they share. Jobs that go on
    together stay where they are; when one has joined or left, all move once."""
    first = jobs[0].context
    assert first is not None
    if len(jobs) == len(first.position) and all(job.context is first for job in jobs):
        return sorted(jobs, key=attrgetter("row")), first
    shared = Context(
        torch.stack([job.context.room[:, :, job.row] for job in jobs if job.context is not None], 2),
        [job.position for job in jobs],
        first.tokens,
    )
    for row, job in enumerate(jobs):
        job.context, job.row = shared, row
    return jobs, shared
