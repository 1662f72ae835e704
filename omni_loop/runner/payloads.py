"""What a runner gets and puts: inputs of the right version, outputs as the edges they leave by want them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..connect.base import Connector, as_numpy
from ..connect.schema import StageEdges
from ..errors import Reason, StageFailed, StateError
from ..messages import Done, PayloadKey, Probe, Receipt, RunStage
from ..stage import Outputs, Payload
from .cells import is_finite
from .state import StateManager

_NONE = StageEdges()


class Payloads:
    """A runner's end of its connector. ``edges``: schemas by full stage name; without one nothing is checked."""

    def __init__(self, connector: Connector, state: StateManager, edges: Mapping[str, StageEdges]) -> None:
        self._connector, self._state, self._edges = connector, state, edges

    def inputs(self, command: RunStage) -> dict[str, Payload]:
        """Raises PayloadError as the connector does, StageFailed (BAD_SPEC) for another kind or version."""
        got = {name: self._connector.get(receipt) for name, receipt in command.inputs.items()}
        edges = self._edges.get(command.stage, _NONE).inputs
        for name, payload in got.items():
            if (edge := edges.get(name)) is not None:
                edge.check_got(payload)
        return got

    def publish(self, command: RunStage, outputs: Outputs, part: int) -> dict[str, Receipt]:
        """Check every output, then put all of them or none. Raises StageFailed (BAD_OUTPUT)."""
        checked = {
            name: (f"{command.stage}.{name}", self._checked(command.stage, name, payload))
            for name, payload in outputs.items()
        }
        return self.put_all(checked, command.session, command.epoch, command.tick, part)

    def put_all(
        self, payloads: Mapping[str, tuple[str, Payload]], session: str, epoch: int, tick: int, part: int = 0
    ) -> dict[str, Receipt]:
        """Put payloads, each with its edge; all of them or none."""
        receipts: dict[str, Receipt] = {}
        try:
            for name, (edge, payload) in payloads.items():
                receipts[name] = self._connector.put(PayloadKey(edge, session, epoch, tick, part), payload)
        except BaseException:
            for receipt in receipts.values():
                self._connector.cleanup(receipt.key)
            raise
        return receipts

    def probe(self, command: Probe) -> Done:
        """Send back what came, through memory taken on the device; raises PayloadError when it did not come."""
        receipts = {}
        for name, receipt in command.inputs.items():
            payload, key = self._connector.get(receipt), receipt.key
            copies = {n: self._state.through_device(as_numpy(array)) for n, array in payload.arrays.items()}
            answer = PayloadKey(key.edge, f"{key.session}-back", key.epoch, key.tick)
            receipts[name] = self._connector.put(answer, Payload(payload.kind, copies))
        return Done(0, receipts, used=self._state.used())

    def _checked(self, stage: str, output: str, payload: Payload) -> Payload:
        if not isinstance(payload, Payload):
            text = f"stage {stage!r} gave a {type(payload).__name__} as {output!r}, not a Payload"
            raise StageFailed(text, reason=Reason.BAD_OUTPUT)
        for edge in self._edges.get(stage, _NONE).outputs.get(output, ()):
            edge.check_put(payload)
        arrays = {}
        for name, value in payload.arrays.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(as_numpy(value))
            if not is_finite(tensor):
                text = f"stage {stage!r} gave values that are not finite: array {name!r} of output {output!r}"
                raise StageFailed(text, reason=Reason.BAD_OUTPUT)
            # A view of the pool would change under its reader, since blocks are reused after the tick.
            owned = tensor.numel() > 0 and self._state.owns_memory(tensor.data_ptr())
            arrays[name] = tensor.clone() if owned else value
        return Payload(payload.kind, arrays, payload.meta, payload.schema)


class NoState:
    """The state of a stage that runs on a part: there is none."""

    def kv(self, name: str) -> Any:
        raise _none(name)

    def tensor(self, name: str) -> Any:
        raise _none(name)

    def ring(self, name: str) -> Any:
        raise _none(name)

    def counter(self, name: str) -> Any:
        raise _none(name)


def _none(name: str) -> StateError:
    return StateError(f"a stage that runs on parts has no state; {name!r} was asked for", reason=Reason.BAD_REQUEST)
