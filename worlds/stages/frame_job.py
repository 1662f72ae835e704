"""One session's frames under way, pass by pass, and how jobs come to lie side by side in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

import torch
from torch import Tensor

from omni_loop.messages import PayloadKind, Scalar
from omni_loop.stage import Outputs, Payload, StageItem

from ..window import Context


@dataclass(slots=True)
class Frame:
    """What a pass takes: ``x [p, c]`` at noise ``level`` behind ``prev [p, c]`` under ``action [a]``, if that is
    ``known``. Level 0 is the clean pass; a denoise step leads all but ``ratio`` of the way from ``x`` to its guess."""

    x: Tensor
    prev: Tensor
    action: Tensor
    known: bool
    steps: Sequence[tuple[float, float]]  # levels from and to which the denoise steps lead that are to come

    @property
    def level(self) -> float:
        return self.steps[0][0] if self.steps else 0.0

    @property
    def ratio(self) -> float:
        now, then = self.steps[0] if self.steps else (1.0, 1.0)
        return then / now


class FrameJob:
    """A tick's frames in order: ``observed`` real ones, then ``imagined`` ones. ``actions [k, a]`` lead to the last
    k of them; to a first frame leads none. Real frames' latents are given, or read from ``images`` first.

    The next pass takes the ``present`` frame and, with its clean pass, the first one of the frame ``ahead``, if there
    is one: n frames of s denoise steps take n s + 1 passes. The session's state is not written before :meth:`store`.
    """

    present: Frame
    ahead: Frame | None = None

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
        self._generator = torch.Generator().manual_seed(item.noise_seed("frames"))
        self._real = latents
        self.images = images
        self._last: Tensor | None = None  # latents of the frame before the first one
        self._made: list[Tensor] = []  # latents of the frames that are done,
        self._fresh: list[Tensor] = []  # and their keys and values [layers, 2, p, h, e]
        self._guess: Tensor | None = None  # of the first imagined frame, after its first pass
        self._guessed = False  # and shown
        self._shown = observed  # frames
        self.context: Context | None = None  # with a row for every job of the same passes
        self.row = 0

    def start(self, context: Context, last: Tensor | None) -> None:
        """``context`` for this job alone; ``last`` are the latents of the frame before, if there is one."""
        self.context, self._last = context, last
        if self.images is None:
            self._begin()

    def see(self, latents: Tensor) -> None:
        """The latents ``[n, p, c]`` of the images."""
        self._real, self.images = latents, None
        self._begin()

    def _begin(self) -> None:
        self.present = self._frame(0, self._last)
        self._look_ahead()

    @property
    def finished(self) -> bool:
        return len(self._made) == self._frames

    @property
    def position(self) -> int:
        """Of the present frame in its context."""
        assert self.context is not None
        return self.context.position[self.row]

    def end_step(self, x: Tensor, guess: Tensor) -> None:
        """A denoise step of the present frame has led to ``x``; ``guess`` is where the model thinks it will end."""
        self.present.x, self.present.steps = x, self.present.steps[1:]
        if self._guess is None:
            self._guess = guess
        self._look_ahead()

    def end_frame(self, fresh: Tensor) -> None:
        """The clean pass gave the present frame's keys and values ``[layers, 2, p, h, e]``. The one ahead is next."""
        self._made.append(self.present.x)
        self._fresh.append(fresh)
        if self.ahead is not None:
            self.present, self.ahead = self.ahead, None
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Set the frame ahead: what leads to it is known once the present one is clean."""
        if self.present.level == 0 and (i := len(self._made) + 1) < self._frames:
            self.ahead = self._frame(i, self.present.x)

    def _frame(self, i: int, last: Tensor | None) -> Frame:
        """Frame ``i`` of the tick behind ``last``."""
        if i < self._observed:
            assert self._real is not None
            x, steps = self._real[i], []
        else:
            assert last is not None
            x, steps = torch.randn(last.shape, generator=self._generator).to(last.device), self._steps
        at = i - (self._frames - len(self._actions))
        action = self._actions[at] if at >= 0 else self._actions.new_zeros(self._actions.shape[1])
        return Frame(x, x if last is None else last, action, at >= 0, steps)  # a first frame is behind itself

    def parts(self) -> list[Outputs]:
        """What there is of the imagined frames since the last call: a guess at the first one, then each when it is
        denoised, which is one pass before the job is done with it. The last one comes with the whole."""
        if self.images is not None:
            return []
        n, made = self._observed, list[Outputs]()
        denoised = len(self._made) + (self.present.level == 0)
        if self._guess is not None and not self._guessed and denoised == n:
            self._guessed = True
            made.append(self._part(self._guess, 0, preview=True))
        for i in range(self._shown, min(denoised, self._frames - 1)):
            latents = self._made[i] if i < len(self._made) else self.present.x
            made.append(self._part(latents, i - n, preview=False))
        self._shown = max(self._shown, denoised)
        return made

    def _part(self, latents: Tensor, i: int, preview: bool) -> Outputs:
        meta = {**self._meta, "first_step": int(self._meta["first_step"]) + i, "preview": preview}
        return {"latents": Payload(PayloadKind.LATENTS, {"latents": latents[None]}, meta)}

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
