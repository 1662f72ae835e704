"""What a session remembers of its ticks, as tokens; pure functions.

vLLM's cache has no sink with a sliding window behind it: its keys carry their positions. So the context is
re-anchored instead. A tick is read behind the instruction and the ticks since the anchor; when those are more than
``window``, the last ``keep`` of them become the new anchor, and are read once more at their new positions::

    window 4, keep 2:   I0   I01  I012  I0123  I01234  I345  I3456  I34567  I678  ...

Until then (ticks 0..``window``) both engines see the same tokens at the same positions. Afterwards the embedded engine
sees ``window`` past ticks, with keys and values that knew ticks before them; here a tick sees ``keep``..``window`` of
them, and nothing of what came before the anchor. ``keep = window`` shows the same ticks as the embedded engine's
window, at the price of reading them all again every time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..context.decode import read_instruction, read_tick
from ..context.layout import INSTRUCTION, TICK
from ..context.llama import ContextModel


@dataclass(frozen=True, slots=True)
class History:
    """``ticks int[n, 32]`` since the anchor, oldest first; the last ``imagined`` of them were not real."""

    ticks: Tensor
    imagined: int = 0

    def real(self) -> History:
        """Without what was imagined since the last real tick."""
        return History(self.ticks[: len(self.ticks) - self.imagined]) if self.imagined else self

    def prompt(self, instruction: Tensor, given: Tensor) -> list[int]:
        """Token ids of ``instruction int[32]``, the ticks, and ``given int[30]`` of the present one."""
        return [int(token) for token in torch.cat([instruction, self.ticks.flatten().long(), given])]

    def with_tick(self, tick: Tensor, imagined: bool, window: int, keep: int) -> History:
        """With ``tick int[32]`` behind it: what the next tick will be read behind."""
        ticks = torch.cat([self.ticks, tick[None].to(self.ticks.dtype)])
        tail = self.imagined + 1 if imagined else 0
        if len(ticks) > window:
            ticks = ticks[len(ticks) - keep :]
        return History(ticks, min(tail, len(ticks)))


@torch.no_grad()
def roll(model: ContextModel, given: Tensor, instruction: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    """What the embedded model says of a session's ticks ``given int64[t, 30]`` when it reads them by this rule:
    progress and done probability ``[t]``. For figures of the rule alone."""
    head, window = read_instruction(model, instruction[None]), model.config.window_ticks
    history, progress, done = History(given.new_zeros(0, TICK)), [], []
    for tokens in given:
        past = head
        if len(history.ticks):
            past = torch.cat([head, model(history.ticks.flatten()[None], head)[1]], 3)
        reading = read_tick(model, past, tokens[None])
        history = history.with_tick(reading.tokens[0], False, window, keep)
        progress.append(reading.progress[0])
        done.append(reading.done[0])
    return torch.stack(progress), torch.stack(done)


def longest(window: int) -> int:
    """Most tokens of a tick's request: instruction, past ticks, its own, and one that is asked for and not read."""
    return INSTRUCTION + (window + 1) * TICK + 1
