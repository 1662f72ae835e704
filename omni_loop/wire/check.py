"""Arrays against their spec: the same checks on the client before it sends and on the server before it runs.

That values are finite is checked where arrays come into being (:mod:`.tensors`), not again here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ..errors import SHOWN, TensorError, nearest
from ..types import Array, ArraySpec, SessionSpec
from .limits import shown

# A message may hold 100,000 wrong keys; its answer names the first few.
_NAMED = 8


def check_array(spec: ArraySpec, array: Array, leading: int = 0, name: str = "") -> None:
    """``array`` is ``[*leading axes of any length, *spec.shape]`` of the spec's dtype and within ``low..high``.
    Raises :class:`TensorError` naming the array, what came and what is right."""
    name = name or spec.name
    if array.dtype.name != spec.dtype:
        raise TensorError(f"{name!r} is {array.dtype.name}; it must be {spec.dtype}")
    want = ("n",) * leading + tuple("n" if d < 0 else str(d) for d in spec.shape)
    if not _fits(array.shape, leading, spec):
        raise TensorError(f"{name!r} has shape {shown(array.shape)}; it must be [{','.join(want)}]")
    if array.size and not _within_dtype(spec):
        _check_range(spec, array, name)


def _fits(shape: tuple[int, ...], leading: int, spec: ArraySpec) -> bool:
    if len(shape) != leading + len(spec.shape):
        return False
    return all(
        have <= spec.max_length if want < 0 else have == want
        for have, want in zip(shape[leading:], spec.shape, strict=True)
    )


def _within_dtype(spec: ArraySpec) -> bool:
    """Whether the bounds hold for every value of the dtype, as for images; then nobody looks at them."""
    if spec.low is None and spec.high is None:
        return True
    if np.dtype(spec.dtype).kind not in "iu":
        return False
    info = np.iinfo(spec.dtype)
    return (spec.low is None or spec.low <= info.min) and (spec.high is None or spec.high >= info.max)


def _check_range(spec: ArraySpec, array: Array, name: str) -> None:
    low, high = array.min(), array.max()
    unit = f" {spec.unit}" if spec.unit else ""
    if spec.low is not None and low < spec.low:
        raise TensorError(f"{name!r} goes down to {low:g}; its least value is {spec.low:g}{unit}")
    if spec.high is not None and high > spec.high:
        raise TensorError(f"{name!r} goes up to {high:g}; its greatest value is {spec.high:g}{unit}")


def check_actions(spec: SessionSpec, actions: Array, name: str = "actions") -> None:
    """``actions float32[n, action_dim]``; n may be 0."""
    check_array(spec.action, actions, leading=1, name=name)


def check_keys(expected: Sequence[str], sent: Iterable[str]) -> None:
    """Raises :class:`TensorError` listing every missing and every extra key, each with the nearest right one."""
    sent = set(sent)
    missing = sorted(set(expected) - sent)
    extra = sorted(sent - set(expected))
    if not missing and not extra:
        return
    parts = []
    if missing:
        parts.append(f"missing observation keys: {_listed(missing)}.")
    if extra:
        parts.append(f"unknown observation keys: {_listed(extra)}.{_meant(extra[0], expected, missing)}")
    raise TensorError(" ".join(parts))


def _meant(key: str, expected: Sequence[str], missing: Sequence[str]) -> str:
    """What ``key`` was to be: rather a key that is missing. A dataset's ``observation.<key>`` is ``<key>`` here."""
    bare = key[:SHOWN].removeprefix("observation.")
    if bare in expected:
        return nearest(bare, [bare])
    meant = nearest(bare, missing)
    return meant if "Did you mean" in meant else nearest(bare, expected)


def _listed(names: Sequence[str]) -> str:
    shown_names = ", ".join(repr(n[:64]) for n in names[:_NAMED])
    return shown_names + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def check_observation(spec: SessionSpec, keys: Sequence[str], arrays: Mapping[str, Array], leading: int = 0) -> None:
    """Exactly the session's ``keys``, each as its :class:`ArraySpec` says; ``leading`` 1 for a run of steps."""
    check_keys(keys, arrays)
    for name, array in arrays.items():
        declared = spec.observation(name)
        if declared is None:
            raise TensorError(f"pipeline {spec.pipeline!r} has no observation {name!r}")
        check_array(declared, array, leading)
