"""What a robot sends under its own names, as the observation of a pipeline; checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ...errors import ConfigError, TensorError, nearest
from ...types import Array, ArraySpec, SessionSpec
from ...wire import check
from ...wire.tensors import check_finite

_MOST_NUMBERS = 4096  # of a list that stands for an array


class Schema:
    """``names`` are the client's, by the pipeline's name for them. ``reshape``: a vector of as many numbers as an array
    of more dimensions has is that array, row by row, for clients that can send nothing but vectors.

    Raises:
        ConfigError: ``names`` has one for an observation that the pipeline does not take, or one name for two.
    """

    def __init__(self, spec: SessionSpec, names: Mapping[str, str], *, reshape: bool = False) -> None:
        known = [s.name for s in spec.observations]
        for name in names:
            if name not in known:
                raise ConfigError(f"pipeline {spec.pipeline!r} takes no observation {name!r}.{nearest(name, known)}")
        self.spec, self._reshape = spec, reshape
        self._specs = {names.get(s.name, s.name): s for s in spec.observations}
        if len(self._specs) < len(known):
            raise ConfigError("two observations of a pipeline cannot come under one name")

    def keys(self, sent: Collection[str]) -> tuple[str, ...]:
        """The pipeline's observation names for a session whose client sends ``sent``: all required ones, and those of
        the optional ones that are there. Raises :class:`TensorError` that names every missing and every extra key, and
        what an extra one may have been meant as."""
        expected = [name for name, s in self._specs.items() if not s.optional or name in sent]
        check.check_keys(expected, sent)
        return tuple(self._specs[name].name for name in expected)

    def arrays(self, sent: Mapping[str, Any], keys: Collection[str]) -> dict[str, Array]:
        """Exactly the session's ``keys``, each as its spec says. Numbers of another width or kind are converted where
        that loses no more than rounding; images are not touched. Raises :class:`TensorError`."""
        check.check_keys([name for name, s in self._specs.items() if s.name in keys], sent)
        return {
            self._specs[name].name: fitted(self._specs[name], name, value, self._reshape)
            for name, value in sent.items()
        }


def fitted(spec: ArraySpec, name: str, value: Any, reshape: bool = False) -> Array:
    """``value``, which the client calls ``name``, as ``spec`` says. Raises :class:`TensorError`."""
    array = _as_array(name, value)
    if reshape and array.ndim == 1 and -1 not in spec.shape and array.size == math.prod(spec.shape):
        array = array.reshape(spec.shape)
    want = np.dtype(spec.dtype)
    if array.dtype != want:
        array = _converted(name, array, want)
    check_finite(name, array)
    check.check_array(spec, array, name=name)
    return array


def _as_array(name: str, value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, bool | int | float | np.generic):
        return np.asarray(value)
    if isinstance(value, list) and len(value) <= _MOST_NUMBERS and all(type(v) in (int, float) for v in value):
        return np.asarray(value, np.float64)
    raise TensorError(f"{name!r} is a {type(value).__name__}; an array of numbers is needed")


def _converted(name: str, array: Array, want: np.dtype[Any]) -> Array:
    if want.kind == "f" and array.dtype.kind in "iuf":
        check_finite(name, array)
        with np.errstate(over="ignore"):  # what became infinite is refused next
            return array.astype(want)
    if want.kind in "iu" and array.dtype.kind in "iu":
        info = np.iinfo(want)
        if not array.size or (info.min <= array.min() and array.max() <= info.max):
            return array.astype(want)
    return array  # and check_array says what it must be
