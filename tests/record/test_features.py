"""LeRobot's names and ours."""

from __future__ import annotations

import pytest

from omni_loop.errors import InvalidInput
from omni_loop.record.features import check_names, feature_of, feature_shape, is_image, key_of


@pytest.mark.parametrize("key", ["state", "images.top", "image", "environment_state"])
def test_a_key_and_its_feature_are_one_to_one(key: str) -> None:
    assert feature_of(key) == f"observation.{key}"
    assert key_of(feature_of(key)) == key


@pytest.mark.parametrize("feature", ["action", "observation.", "next.done", "observations.state"])
def test_what_is_no_observation_is_refused(feature: str) -> None:
    with pytest.raises(InvalidInput, match="is no observation"):
        key_of(feature)


def test_images_are_known_by_dtype_and_shape() -> None:
    assert is_image("uint8", (4, 5, 3))
    assert not any(is_image(d, s) for d, s in (("uint8", (4, 5)), ("float32", (4, 5, 3)), ("uint8", (4, 5, 1))))
    assert feature_shape("uint8", (4, 5, 3))["dtype"] == "image"
    assert feature_shape("float32", (2, 3)) == {"dtype": "float32", "shape": (6,), "names": None}
    assert feature_shape("float32", ()) == {"dtype": "float32", "shape": (1,), "names": None}


def test_names_may_be_swapped_and_not_doubled() -> None:
    check_names({"a": "b", "b": "a"}, ("a", "b"))
    with pytest.raises(InvalidInput, match="would both be called 'b'"):
        check_names({"a": "b"}, ("a", "b"))
