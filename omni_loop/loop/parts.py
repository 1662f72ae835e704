"""What a tick shows before it is done: parts of a stage's output, run through the stage behind it as they come.

A stage that still runs tells of a part -> the stage behind a streaming edge runs on it, beside the tick's transaction
(see :class:`~omni_loop.messages.RunStage`) -> its frames are shown. The whole takes its own way, as if nobody had
asked: that the result depends on no part is why parts may be late, fail or be left out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ..errors import OmniLoopError
from ..messages import Done, Part, PayloadKey, Receipt, RunStage
from ..stage import Payload
from .graph import CompiledPlan, StageStep
from .pipeline import Edge

if TYPE_CHECKING:
    from ..runner.handle import OnPart, RunnerHandle

Show = Callable[[int, Payload], None]  # the part's number, and what the plan's frames stage made of it
Hand = Callable[[Edge, Receipt, int], Receipt]  # a receipt that the edge's target can read
_log = logging.getLogger(__name__)


class Parts:
    """The parts of one tick. ``run`` makes the command of a stage; ``hand`` brings a payload to an edge's target."""

    def __init__(
        self,
        plan: CompiledPlan,
        handles: Mapping[str, RunnerHandle],
        hand: Hand,
        run: Callable[[str, Mapping[str, Receipt], int], RunStage],
        show: Show,
    ) -> None:
        self._plan, self._handles, self._hand, self._run, self._show = plan, handles, hand, run, show
        self._tasks: set[asyncio.Future[Done]] = set()
        self._put: dict[RunnerHandle, list[PayloadKey]] = {}
        self._over = False

    def wanted(self, stage: str) -> tuple[str, ...]:
        """Outputs of ``stage`` whose parts are to be told."""
        outputs = dict.fromkeys(edge.output for edge in self._plan.streams.get(stage, ()))
        if stage == self._plan.shows:
            outputs[str(self._plan.plan.frames).partition(".")[2]] = None
        return tuple(outputs)

    def listener(self, step: StageStep) -> OnPart:
        return partial(self._take, step)

    def stop(self) -> None:
        """Show nothing more."""
        self._over = True

    async def settle(self) -> None:
        """Until no run on a part is under way."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def release(self) -> dict[RunnerHandle, tuple[PayloadKey, ...]]:
        """What the runners have put as parts, which nobody reads any more."""
        put, self._put = self._put, {}
        return {handle: tuple(keys) for handle, keys in put.items()}

    def _take(self, step: StageStep, part: Part) -> None:
        """Of a stage that runs. Raises nothing: the tick goes on whatever becomes of a part."""
        self._holds(self._handles[step.name], part.outputs)
        if self._over:
            return
        try:
            for edge in self._plan.streams.get(step.name, ()):
                if edge.output in part.outputs:
                    receipt = self._hand(edge, part.outputs[edge.output], part.part)
                    self._submit(self._run(edge.target, {edge.input: receipt}, part.part))
            self._read(step.name, part.part, part.outputs)
        except OmniLoopError as error:
            self._lose(error)

    def _submit(self, command: RunStage) -> None:
        stage = command.stage.rpartition("/")[2]
        task = asyncio.ensure_future(self._handles[stage].submit(command))
        self._tasks.add(task)
        task.add_done_callback(partial(self._made, stage, command.part))

    def _made(self, stage: str, number: int, task: asyncio.Future[Done]) -> None:
        self._tasks.discard(task)
        error = task.exception()
        if error is None:
            self._holds(self._handles[stage], task.result().outputs)
            if self._over:
                return
            try:
                self._read(stage, number, task.result().outputs)
            except OmniLoopError as unread:
                error = unread
        if error is not None:
            self._lose(error)

    def _read(self, stage: str, number: int, outputs: Mapping[str, Receipt]) -> None:
        """Show what is the plan's frames. None: the whole came before the part's turn."""
        name = str(self._plan.plan.frames).partition(".")[2]
        if stage == self._plan.shows and name in outputs:
            self._show(number, self._handles[stage].connector.get(outputs[name]))

    def _lose(self, error: BaseException) -> None:
        """No part follows one that failed; what the failure means for the tick, the whole will say."""
        if not self._over:
            _log.warning("parts of a tick end: %s", error)
        self._over = True

    def _holds(self, handle: RunnerHandle, outputs: Mapping[str, Receipt]) -> None:
        self._put.setdefault(handle, []).extend(receipt.key for receipt in outputs.values())
