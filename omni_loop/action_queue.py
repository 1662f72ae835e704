"""The raw chunk a session was sent last, for policies that continue it: real-time chunking (arXiv:2506.07339).

``raw`` is a chunk in the model's own space, before any clipping: what a sampler can be guided by. It lies in the
session's typed state, so that it commits, rolls back, forks, rewinds and is saved with the rest.

A stage that can be guided does, in each tick::

    joining = queue.joining(item)              # None: nobody asks for it, or there is nothing to join
    raw = sample(..., joining)                 # rows up to joining.frozen repeat joining.left_over, the rest joins it
    queue.keep(item, raw)
    output meta: JOINED: INPAINTED             # where it was guided

What a stage does not label so, the loop labels ``overlap``: it puts the frozen rows over the policy's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .stage import CounterSpec, StageItem, StateSpec, StateView, TensorSpec
from .types import Op

FROZEN = "frozen"  # parameter of a tick: rows at the front that repeat the chunk before
JOINS = "joins"  # parameter of a tick: the control step that chunk begins at
JOINED = "joined"  # in the meta of the output that is the chunk: how it joins the one before
INPAINTED, OVERLAP = "inpainted", "overlap"
_RAW, _STEP = "raw", "raw_step"


@dataclass(frozen=True, slots=True)
class Joining:
    """``left_over float32[n, action_dim]``: rows of the chunk before from the tick's step on, n >= 1. The first
    ``frozen`` of them are executed before the new chunk is there."""

    left_over: Any
    frozen: int


class ActionQueue:
    """Of chunks ``float32[horizon, action_dim]``; holds nothing itself."""

    def __init__(self, horizon: int, action_dim: int) -> None:
        self._horizon, self._dim = horizon, action_dim

    def state_specs(self) -> Mapping[str, StateSpec]:
        # `raw_step` is the control step of the chunk's first action; -1: there is none.
        return {_RAW: TensorSpec((self._horizon, self._dim)), _STEP: CounterSpec(-1)}

    def left_over(self, state: StateView, step: int) -> Any | None:
        """``float32[n, action_dim]``, the first for ``step``; None when nothing is left of it."""
        begin = state.counter(_STEP).get()
        if begin < 0 or not begin <= step < begin + self._horizon:
            return None
        return state.tensor(_RAW).get()[step - begin :]

    def joining(self, item: StageItem) -> Joining | None:
        """What the tick's chunk is asked to join. None too when the chunk that was sent is not this stage's own."""
        if FROZEN not in item.params or item.state.counter(_STEP).get() != item.params[JOINS]:
            return None
        left = self.left_over(item.state, item.step)
        return None if left is None else Joining(left, int(item.params[FROZEN]))

    def keep(self, item: StageItem, raw: Any) -> None:
        """``raw float32[horizon, action_dim]`` is the session's last chunk; an imagined one is not what a robot
        executes."""
        if item.op is Op.INFER:
            item.state.tensor(_RAW).set(raw)
            item.state.counter(_STEP).set(item.step)
