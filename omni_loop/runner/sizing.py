"""How many bytes a session's typed state takes, and how many blocks each pool gets."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..errors import ConfigError, InvalidInput, Reason
from ..stage import CounterSpec, KVSpec, RingSpec, StateSpec, TensorSpec
from .cells import torch_dtype
from .kv_pool import block_bytes, blocks_per_session

StageSpecs = Mapping[str, Mapping[str, StateSpec]]  # stage -> name -> spec


def reserved_bytes(stage: str, specs: Mapping[str, StateSpec]) -> int:
    """Bytes the tensors and rings of one session can take in ``stage``: what is committed, and as much again, which a
    tick may stage before it is decided.

    Raises:
        InvalidInput: a spec that cannot be met.
    """
    return 2 * sum(_committed_bytes(f"{stage}.{name}", spec) for name, spec in specs.items())


def pool_sizes(
    specs: StageSpecs, max_sessions: int, nbytes: int, blocks: int | None
) -> dict[tuple[str, str], tuple[KVSpec, int]]:
    """Blocks of each pool by (stage, name): ``blocks``, or enough for ``max_sessions`` or as many as fit ``nbytes``.

    Raises:
        ConfigError: ``nbytes`` are not enough for one session.
    """
    found = {
        (stage, name): spec
        for stage, named in specs.items()
        for name, spec in named.items()
        if isinstance(spec, KVSpec)
    }
    kv = sum(blocks_per_session(spec) * block_bytes(spec) for spec in found.values())
    fixed = sum(reserved_bytes(stage, named) for stage, named in specs.items())
    fit = min(max_sessions, nbytes // (kv + fixed)) if kv + fixed else max_sessions
    given = sum(block_bytes(spec) for spec in found.values()) * (blocks or 0)
    if fit < 1 or given + fixed > nbytes:
        raise ConfigError(f"the runner's pools need {max(kv, given) + fixed} bytes, but budget_bytes is {nbytes}")
    return {key: (spec, blocks or fit * blocks_per_session(spec)) for key, spec in found.items()}


def _committed_bytes(owner: str, spec: StateSpec) -> int:
    match spec:
        case KVSpec():
            sizes = (spec.layers, spec.kv_heads, spec.head_dim, spec.block_size, spec.scratch_blocks)
            if min(sizes) < 1 or min(spec.window_blocks, spec.sink_blocks) < 0:
                raise InvalidInput(f"state {owner!r} has sizes that cannot be: {spec}", reason=Reason.BAD_SPEC)
            return 0
        case TensorSpec():
            count = 1
        case RingSpec():
            count = spec.capacity
        case CounterSpec():
            return 0
        case _:  # what a stage of somebody's own returns is not type-checked
            text = f"state {owner!r} is {type(spec).__name__}; it must be KVSpec, TensorSpec, RingSpec or CounterSpec"
            raise InvalidInput(text, reason=Reason.BAD_SPEC)
    if min((count, *spec.shape), default=1) < 1:
        raise InvalidInput(f"state {owner!r} has sizes that cannot be: {spec}", reason=Reason.BAD_SPEC)
    return count * math.prod(spec.shape) * torch_dtype(spec.dtype, owner).itemsize
