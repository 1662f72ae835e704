"""Names of LeRobot's datasets and of our observations: the feature ``observation.<key>`` is the array ``<key>``.

The standard library only, so that whoever speaks both languages may import it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import InvalidInput, nearest

OBSERVATION = "observation."
ACTION = "action"
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


def feature_of(key: str) -> str:
    """``observation.<key>``: the LeRobot feature of our observation array ``key``."""
    return OBSERVATION + key


def key_of(feature: str) -> str:
    """The observation array that LeRobot calls ``feature``. Raises InvalidInput for what is no observation."""
    key = feature.removeprefix(OBSERVATION)
    if key == feature or not key:
        raise InvalidInput(f"the feature {feature!r} is no observation: its name does not begin with {OBSERVATION!r}")
    return key


def is_image(dtype: str, shape: Iterable[int]) -> bool:
    """Whether an array of ``dtype`` and ``shape`` is an image on our wire: ``uint8[h, w, 3]``, RGB."""
    dims = tuple(shape)
    return dtype == "uint8" and len(dims) == 3 and dims[-1] == 3


def renamed(key: str, names: Mapping[str, str]) -> str:
    """The key that ``key`` is exported as: ``names[key]`` where somebody wants another (``agent_pos=state``)."""
    return names.get(key, key)


def check_names(names: Mapping[str, str], keys: Iterable[str], images: Iterable[str] = ()) -> None:
    """Raises InvalidInput when ``names`` renames a key that is not there, makes two keys one, or gives a name that is
    none in LeRobot: ``images.<name>`` are ``images``, and dots separate words of letters, digits, ``_`` and ``-``."""
    keys, images = tuple(keys), tuple(images)
    for key, name in names.items():
        if key not in keys:
            raise InvalidInput(f"there is no observation {key!r} to rename.{nearest(key, keys)}")
        if not _NAME.fullmatch(name):
            raise InvalidInput(f"{key!r} cannot be called {name!r}: say letters, digits, '_' and '-', such as state")
        if name.split(".")[0] == "images" and key not in images:
            raise InvalidInput(f"{key!r} cannot be called {name!r}: it is no image")
    seen: dict[str, str] = {}
    for key in keys:
        if "/" in renamed(key, names):
            raise InvalidInput(f"LeRobot takes no '/' in a name; say another for {key!r} with --map")
        other = seen.setdefault(renamed(key, names), key)
        if other != key:
            raise InvalidInput(f"the observations {other!r} and {key!r} would both be called {renamed(key, names)!r}")


def feature_shape(dtype: str, shape: Iterable[int]) -> dict[str, Any]:
    """A LeRobot feature for an array: images as ``image`` ``[h, w, 3]``, all else as a vector, row by row, by dtype:
    LeRobot's policies read no other rank."""
    dims = tuple(int(d) for d in shape)
    if is_image(dtype, dims):
        return {"dtype": "image", "shape": dims, "names": ["height", "width", "channels"]}
    return {"dtype": dtype, "shape": (math.prod(dims),), "names": None}
