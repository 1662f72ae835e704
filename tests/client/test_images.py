"""Images are clipped and not wrapped around; numpy resizes as pillow does."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.client import images
from omni_loop.errors import InvalidInput, TensorError
from omni_loop.types import ArraySpec, Op, SessionSpec

SPEC = SessionSpec(
    pipeline="p",
    observations=(ArraySpec("image", "uint8", (24, 32, 3)), ArraySpec("state", "float32", (2,))),
    action=ArraySpec("action", "float32", (2,)),
    horizon=4,
    execution_horizon=2,
    control_hz=10,
    ops=(Op.INFER,),
)


def picture(h: int, w: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(h * w)
    smooth = np.add.outer(np.linspace(0, 200, h), np.linspace(0, 50, w))[..., None]
    return np.clip(smooth + rng.normal(0, 20, (h, w, 3)), 0, 255).astype(np.uint8)


def test_floats_are_clipped_and_not_wrapped_around() -> None:
    image = np.array([[[-0.2, 0.0, 0.5], [1.0, 1.2, 0.999]]])
    assert images.to_uint8(image).tolist() == [[[0, 0, 128], [255, 255, 255]]]
    assert (image * 255).astype(np.uint8)[0, 1, 1] == 50  # what others made of 1.2


@pytest.mark.parametrize(
    ("image", "high", "want"),
    [
        (np.array([0.0, 127.6, 260.0], np.float32), 255.0, [0, 128, 255]),
        (np.array([-3, 7, 300], np.int64), None, [0, 7, 255]),
        (np.array([0, 32768, 65535], np.uint16), 65535, [0, 128, 255]),
        (np.array([1, 2, 3], np.uint8), None, [1, 2, 3]),
        (np.array([0.5], np.float16), None, [128]),
    ],
)
def test_the_range_is_that_of_the_dtype_or_as_told(image: NDArray[Any], high: float | None, want: list[int]) -> None:
    made = images.to_uint8(image, high)
    assert made.dtype == np.uint8
    assert made.tolist() == want


@pytest.mark.parametrize(
    ("image", "text"),
    [
        (np.array([0.0, 200.0]), "goes from 0 to 200, but 0..1 was expected"),
        (np.array([0, 60000], np.uint16), "0..255 was expected"),
        (np.array([0.0, np.nan]), "not finite"),
        (np.array([0.0, np.inf]), "not finite"),
        (np.array([True]), "holds bool"),
        (np.array([1j]), "holds complex"),
    ],
)
def test_what_cannot_be_an_image_is_refused(image: NDArray[Any], text: str) -> None:
    with pytest.raises(TensorError, match=text):
        images.to_uint8(image)
    with pytest.raises(InvalidInput, match="high"):
        images.to_uint8(np.zeros(2), high=0.0)


@pytest.mark.parametrize("size", [(24, 32), (96, 96), (200, 20), (7, 301), (31, 64)])
def test_numpy_resizes_as_pillow_does(size: tuple[int, int]) -> None:
    pillow = pytest.importorskip("PIL.Image")
    image = picture(64, 48)
    want = np.array(pillow.fromarray(image).resize(size[::-1], pillow.Resampling.BILINEAR)).astype(int)
    assert np.abs(images.scaled_by_numpy(image, *size) - want).max() <= 1
    assert (images.resize(image, *size) == want).all()


def test_padding_keeps_what_is_seen_in_shape() -> None:
    image = np.full((10, 20, 3), 200, np.uint8)
    padded = images.resize(image, 30, 30, pad=True)
    assert padded.shape == (30, 30, 3)
    assert (padded[8:22] == 200).all()
    assert not padded[:7].any()
    assert not padded[23:].any()
    assert (images.resize(image, 30, 30) == 200).all()


@pytest.mark.parametrize("size", [(0, 4), (4, -1)])
def test_no_size_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InvalidInput, match="cannot resize"):
        images.resize(picture(4, 4), *size)


def test_jpeg() -> None:
    pillow = pytest.importorskip("PIL.Image")
    image = images.resize(picture(8, 8), 64, 64)
    back = np.asarray(pillow.open(io.BytesIO(images.to_jpeg(image)))).astype(int)
    assert back.shape == image.shape
    assert np.abs(back - image).mean() < 6
    with pytest.raises(TensorError, match="uint8"):
        images.to_jpeg(np.zeros((4, 4), np.uint8))


def test_an_observation_is_fitted_to_the_spec() -> None:
    state = np.zeros(2, np.float32)
    fitted = images.fit(SPEC, {"image": np.full((48, 64, 3), 1.2), "state": state, "other": 3})
    assert fitted["image"].shape == (24, 32, 3)
    assert (fitted["image"] == 255).all()
    assert fitted["state"] is state
    exact = picture(24, 32)
    assert images.fit(SPEC, {"image": exact})["image"] is exact
    with pytest.raises(TensorError, match=r"'image' has shape \[3, 24, 32\]; an image is \[h, w, 3\]"):
        images.fit(SPEC, {"image": np.zeros((3, 24, 32))})
