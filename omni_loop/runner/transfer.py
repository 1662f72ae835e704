"""A stage's committed state as plain arrays and facts, and back: for snapshots and for another runner.

Of a paged KV ``kv``: the array ``kv.blocks [layers, 2, n, block_size, kv_heads, head_dim]`` and the facts ``kv.sink``
and ``kv.window`` (blocks in each), ``kv.end`` (position in blocks) and ``kv.observed`` (JSON: runs of observed
positions). Of a tensor its value, of a ring ``[n, *shape]``, of a counter a fact. What comes in is checked against the
specs as a whole before anything is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import SnapshotError, nearest
from ..messages import Scalar
from ..stage import CounterSpec, KVSpec, RingSpec, StateSpec, TensorSpec
from .block_table import Layout
from .cells import CounterCell, RingCell, TensorCell, is_finite, torch_dtype
from .kv_cell import KVCell
from .stage_state import StageState

StageImage = tuple[Mapping[str, Any], Mapping[str, Scalar]]  # arrays, facts
_KV_FACTS = ("sink", "window", "end", "observed")


def export_stage(state: StageState) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """Arrays and facts of what is committed; the arrays are copies."""
    arrays: dict[str, Tensor] = {}
    facts: dict[str, Scalar] = {}
    for name, cell in state.cells.items():
        match cell:
            case KVCell():
                layout = cell.value
                arrays[f"{name}.blocks"] = cell.pool.read(layout.blocks).clone(memory_format=torch.contiguous_format)
                facts |= {f"{name}.sink": layout.sink, f"{name}.window": layout.window, f"{name}.end": layout.end}
                facts[f"{name}.observed"] = json.dumps(layout.observed)
            case TensorCell():
                arrays[name] = cell.export()
            case RingCell():
                arrays[name] = cell.export()
            case CounterCell():
                facts[name] = cell.value
    return arrays, facts


def read_stage(stage: str, specs: Mapping[str, StateSpec], image: StageImage) -> dict[str, Any]:
    """The values of every state of ``stage``, checked but not placed yet.

    Raises:
        SnapshotError: something is missing, unknown, of another shape or dtype, not finite or impossible.
    """
    arrays, facts = image
    wanted_arrays = {_array(name, spec) for name, spec in specs.items() if not isinstance(spec, CounterSpec)}
    wanted_facts = {fact for name, spec in specs.items() for fact in _facts(name, spec)}
    for kind, given, wanted in (("array", arrays, wanted_arrays), ("fact", facts, wanted_facts)):
        for name in wanted - given.keys():
            raise SnapshotError(f"the state of stage {stage!r} lacks the {kind} {name!r}")
        for name in given.keys() - wanted:
            raise SnapshotError(f"stage {stage!r} has no {kind} {name!r} in its state.{nearest(str(name), wanted)}")
    return {name: _value(f"{stage}.{name}", name, spec, arrays, facts) for name, spec in specs.items()}


def place(state: StageState, values: Mapping[str, Any]) -> None:
    """Give a fresh ``state`` the values :func:`read_stage` returned.

    Raises:
        Exhausted: a pool has not enough blocks. The state must be freed then.
    """
    for name, cell in state.cells.items():
        match cell:
            case KVCell():
                layout, blocks = values[name]
                cell.pool.place(cell.table, layout, blocks)
            case RingCell():
                cell.value = tuple(item.to(cell.like.device, copy=True) for item in values[name])
            case TensorCell():
                cell.value = values[name].to(cell.like.device, copy=True)
            case CounterCell():
                cell.value = values[name]


def _array(name: str, spec: StateSpec) -> str:
    return f"{name}.blocks" if isinstance(spec, KVSpec) else name


def _facts(name: str, spec: StateSpec) -> list[str]:
    match spec:
        case KVSpec():
            return [f"{name}.{fact}" for fact in _KV_FACTS]
        case CounterSpec():
            return [name]
    return []


def _value(owner: str, name: str, spec: StateSpec, arrays: Mapping[str, Any], facts: Mapping[str, Scalar]) -> Any:
    match spec:
        case KVSpec():
            return _kv(owner, name, spec, arrays, facts)
        case TensorSpec():
            return _tensor(owner, arrays[name], spec.shape, spec.dtype)
        case RingSpec():
            items = _tensor(owner, arrays[name], None, spec.dtype)
            if tuple(items.shape[1:]) != spec.shape or len(items) > spec.capacity:
                raise SnapshotError(
                    f"state {owner!r} has shape {list(items.shape)}, expected up to {spec.capacity} of "
                    f"{list(spec.shape)}"
                )
            return items
        case CounterSpec():
            return _integer(owner, facts[name])


def _kv(
    owner: str, name: str, spec: KVSpec, arrays: Mapping[str, Any], facts: Mapping[str, Scalar]
) -> tuple[Layout, Tensor]:
    sink, window, end = (_integer(f"{owner}.{fact}", facts[f"{name}.{fact}"]) for fact in _KV_FACTS[:3])
    given = arrays[f"{name}.blocks"]
    n = given.shape[2] if getattr(given, "ndim", 0) == 6 else 0
    blocks = _tensor(owner, given, (spec.layers, 2, n, spec.block_size, spec.kv_heads, spec.head_dim), "float32")
    observed = _runs(owner, facts[f"{name}.observed"], end)
    if (
        n != sink + window
        or sink != min(end, spec.sink_blocks)
        or not 0 <= window <= min(spec.window_blocks, end - sink)
    ):
        raise SnapshotError(f"state {owner!r} cannot hold {n} blocks at position {end} with {sink} of them in the sink")
    return Layout(list(range(n)), sink, end, observed), blocks


def _runs(owner: str, text: Scalar, end: int) -> tuple[tuple[int, int], ...]:
    """Runs in order, apart from each other, none beyond ``end``."""
    try:
        given = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError) as e:
        raise SnapshotError(f"state {owner!r}: the observed runs are no JSON") from e
    last, runs = -1, []
    for run in given if isinstance(given, list) else [None]:
        if not (isinstance(run, list) and len(run) == 2 and all(type(x) is int for x in run)):
            raise SnapshotError(f"state {owner!r}: observed runs are pairs of positions")
        if not last < run[0] < run[1] <= end:
            raise SnapshotError(f"state {owner!r}: observed runs that cannot be: {run} of {end}")
        last = run[1]
        runs.append((run[0], run[1]))
    return tuple(runs)


def _integer(owner: str, value: Scalar) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise SnapshotError(f"state {owner!r} takes an int, not {type(value).__name__}")
    return value


def _tensor(owner: str, value: Any, shape: tuple[int, ...] | None, dtype: str) -> Tensor:
    try:
        tensor = torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as e:
        raise SnapshotError(f"state {owner!r} is no array: {type(value).__name__}") from e
    if shape is not None and tuple(tensor.shape) != shape:
        raise SnapshotError(f"state {owner!r} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype != torch_dtype(dtype, owner):
        raise SnapshotError(f"state {owner!r} holds {tensor.dtype}, expected {dtype}")
    if not is_finite(tensor):
        raise SnapshotError(f"state {owner!r} holds values that are not finite")
    return tensor
