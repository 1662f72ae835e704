"""What LeRobot calls the parts of an observation, as arrays of ours.

LeRobot's policies read features called ``observation.<key>``; the array of that feature is ``<key>`` here, and that is
what the template ``lerobot`` takes: ``state``, ``environment_state``, ``image``, ``images.top``. Images are
``uint8[h, w, 3]``, all else is float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from omni_loop.errors import ConfigError
from omni_loop.record.features import OBSERVATION, is_image
from omni_loop.types import Array, ArraySpec

#: From a simulator's raw observation, without a batch, to arrays by key.
Naming = Callable[[Any], dict[str, Array]]

_KEYS = {"agent_pos": "state", "pixels": "image"}  # of lerobot.envs.utils.preprocess_observation


def naming(preprocess: Any = None) -> Naming:
    """How to name an observation. ``preprocess``: LeRobot's own pipeline for this env; then its code does it all.

    Without one the arrays are the very ones of LeRobot's ``preprocess_observation``, but for images, which it would
    make float32 in 0..1.
    """
    return _named if preprocess is None else lambda raw: _through(preprocess, raw)


def _named(raw: Any) -> dict[str, Array]:
    if not isinstance(raw, Mapping):  # an observation that is one array
        raw = {"pixels" if is_image(np.asarray(raw).dtype.name, np.shape(raw)) else "agent_pos": raw}
    found: dict[str, Array] = {}
    for key, value in raw.items():
        if isinstance(value, Mapping):
            prefix = "images" if key == "pixels" else key
            found |= {f"{prefix}.{name}": _own(part) for name, part in _flat(value)}
        else:
            found[_KEYS.get(key, key)] = _own(value)
    return found


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        found += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return found


def _own(value: Any) -> Array:
    array = np.asarray(value)
    kept = is_image(array.dtype.name, array.shape)
    return np.array(array, np.uint8 if kept else np.float32, order="C")


def _through(preprocess: Any, raw: Any) -> dict[str, Array]:
    """LeRobot's own way from an observation to what a policy reads, batch of one, and back to arrays."""
    from lerobot.envs.utils import preprocess_observation

    batch = preprocess(preprocess_observation(_batched(raw)))
    found: dict[str, Array] = {}
    for name, value in batch.items():
        if not name.startswith(OBSERVATION) or not hasattr(value, "numpy"):
            continue
        array, key = value.numpy()[0], name.removeprefix(OBSERVATION)
        if key == "image" or key.startswith("images."):  # float32[3, h, w] in 0..1 to uint8[h, w, 3], exactly
            array = np.rint(array * 255).astype(np.uint8).transpose(1, 2, 0)
        found[key] = _own(array)
    return found


def _batched(raw: Any) -> Any:
    if isinstance(raw, Mapping):
        return {key: _batched(value) for key, value in raw.items()}
    return np.ascontiguousarray(raw)[None]


def blank(space: gymnasium.Space[Any]) -> Any:
    """An observation of zeros, which says what keys and shapes there are before a simulator is started."""
    if isinstance(space, gymnasium.spaces.Dict):
        return {key: blank(part) for key, part in space.items()}
    if space.shape is None or space.dtype is None:
        raise ConfigError(f"an observation {space} cannot be sent: it is no array")
    return np.zeros(space.shape, space.dtype)


def specs(name: Naming, space: gymnasium.Space[Any]) -> tuple[ArraySpec, ...]:
    """Of every array that observations of ``space`` give."""
    return tuple(_spec(key, array) for key, array in name(blank(space)).items())


def _spec(key: str, array: NDArray[Any]) -> ArraySpec:
    if array.dtype == np.uint8:
        return ArraySpec(key, "uint8", array.shape, unit="RGB", low=0, high=255)
    return ArraySpec(key, "float32", array.shape)
