"""What a world holds of its past: the books of recondition and predict, for stages that keep their last steps.

A world that keeps a paged cache, or more than one tensor a step, keeps its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .errors import InvalidInput, Reason, StateError
from .stage import CounterSpec, RingSpec, StageItem, StateSpec

_RING, _FIRST, _NEXT = "past", "past_first", "past_next"
EXECUTED = "executed"


class Past:
    """The past of ``item``'s session inside a tick; what changes is staged with it. ``most``: steps of one tick;
    ``action_dim``: numbers of one action.

    The stage declares :meth:`specs` in its ``state_specs``. A tick is then :meth:`observe` or :meth:`actions`, and
    :meth:`extend` with one entry for each real or predicted step.
    """

    def __init__(self, item: StageItem, most: int, action_dim: int) -> None:
        self._item, self._most, self._width = item, most, action_dim
        self._ring = item.state.ring(_RING)
        self._first, self._next = item.state.counter(_FIRST), item.state.counter(_NEXT)

    @staticmethod
    def specs(shape: tuple[int, ...], capacity: int, dtype: str = "float32") -> dict[str, StateSpec]:
        """Of a past of ``capacity`` steps, each a tensor of ``shape``. As many as one tick predicts can be taken back,
        besides those the world looks at."""
        return {_RING: RingSpec(shape, capacity, dtype), _FIRST: CounterSpec(), _NEXT: CounterSpec()}

    @property
    def items(self) -> Sequence[Any]:
        """The steps held, oldest first; the last is the present one. Empty before anything was observed."""
        return self._ring.items()

    def observe(self) -> Mapping[str, Any]:
        """The real steps of a RECONDITION by observation key, ``[n, ...]``, and ``executed float32[n, action_dim]``,
        which led to each of them (``n - 1`` rows when the first has no predecessor). Steps from the first of them on,
        real or imagined, are no longer held.

        Raises:
            InvalidInput: no steps, more than ``most`` + 1, or actions that do not fit them.
            StateError: they do not follow what is held, or lie too far back.
        """
        if "observation" not in self._item.inputs:
            raise InvalidInput("there is nothing to recondition on: send 'observation'")
        arrays = self._item.inputs["observation"].arrays
        start, held = int(self._item.params.get("first_step", self._item.step)), list(self.items)
        count = len(next((array for key, array in arrays.items() if key != EXECUTED), ()))
        if not 0 < count <= self._most + 1:
            raise InvalidInput(f"{count} steps at once, between 1 and {self._most + 1} can be observed")
        back = self._next.get() - start
        if fresh := not held or start <= self._first.get():
            self._first.set(start)
            held = []
        elif not 0 <= back < len(held):
            known = f"{self._next.get() - len(held) + 1} to {self._next.get()}, or {self._first.get()}"
            raise StateError(f"step {start} cannot follow: real steps may begin at {known}", reason=Reason.BAD_REQUEST)
        got, want = list(arrays[EXECUTED].shape) if EXECUTED in arrays else None, [count - fresh, self._width]
        if got != want:
            raise InvalidInput(f"{count} steps need executed actions {want} (each leads to a step), not {got}")
        self._ring.clear()
        for entry in held if fresh else held[: len(held) - back]:
            self._ring.push(entry)
        self._next.set(start)
        return arrays

    def actions(self) -> Any:
        """The actions of a PREDICT, ``float32[n, action_dim]``: n steps are to follow.

        Raises:
            InvalidInput: none, more than ``most``, of another width, or fewer than the steps asked for.
            StateError: nothing was observed yet.
        """
        if "actions" not in self._item.inputs:
            raise InvalidInput("there are no actions to predict under: send 'actions'")
        given, params = self._item.inputs["actions"].arrays["actions"], self._item.params
        count = int(params.get("frames", 0) or params.get("steps", 0)) or len(given)
        if len(given.shape) != 2 or given.shape[1] != self._width or not 0 < count <= min(len(given), self._most):
            shape = list(given.shape)
            raise InvalidInput(f"{count} steps (of at most {self._most}) do not follow from actions {shape}")
        if not self.items:
            raise StateError("nothing to predict from: recondition on a real step first", reason=Reason.BAD_REQUEST)
        return given[:count]

    def extend(self, entries: Sequence[Any]) -> None:
        """Hold one more step for each of ``entries``."""
        for entry in entries:
            self._ring.push(entry)
        self._next.set(self._next.get() + len(entries))
