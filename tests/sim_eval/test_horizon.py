"""Hand-computed distances of pictures."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop.errors import InvalidInput
from omni_loop_sim_eval.horizon import lpips_distance, psnr, ssim

C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


def flat(value: int, size: int = 16) -> NDArray[np.uint8]:
    return np.full((1, size, size, 3), value, np.uint8)


def test_psnr_by_hand() -> None:
    assert psnr(flat(100), flat(110)) == pytest.approx(20 * np.log10(255 / 10))
    assert psnr(flat(0), flat(255)) == pytest.approx(0)
    assert psnr(flat(7), flat(7)) == 120
    both = np.concatenate([flat(100), flat(100)]), np.concatenate([flat(100), flat(110)])
    assert psnr(*both) == pytest.approx(20 * np.log10(255 / 10) + 10 * np.log10(2)), "of all pictures as one"


def test_ssim_of_plain_pictures_is_that_of_their_means() -> None:
    a, b = 100.0, 140.0
    assert ssim(flat(100), flat(140))[0] == pytest.approx((2 * a * b + C1) / (a * a + b * b + C1))
    assert ssim(flat(0), flat(255))[0] == pytest.approx(C1 / (255**2 + C1))


def test_ssim_of_one_window_by_the_papers_sums() -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.integers(0, 256, (1, 11, 11, 1)).astype(np.uint8) for _ in range(2))
    at = np.arange(-5, 6)
    w = np.exp(-(at[:, None] ** 2 + at[None] ** 2) / (2 * 1.5**2))
    w /= w.sum()
    a, b = x[0, :, :, 0].astype(float), y[0, :, :, 0].astype(float)
    ma, mb = (w * a).sum(), (w * b).sum()
    va, vb, ab = (w * (a - ma) ** 2).sum(), (w * (b - mb) ** 2).sum(), (w * (a - ma) * (b - mb)).sum()
    want = (2 * ma * mb + C1) * (2 * ab + C2) / ((ma**2 + mb**2 + C1) * (va + vb + C2))
    assert ssim(x, y)[0] == pytest.approx(want, abs=1e-12)


def test_ssim_is_one_of_what_is_the_same_and_falls_with_noise() -> None:
    rng = np.random.default_rng(1)
    x = rng.integers(40, 216, (2, 32, 32, 3)).astype(np.uint8)
    np.testing.assert_allclose(ssim(x, x), 1)
    noisy = [np.clip(x + rng.normal(0, s, x.shape), 0, 255).astype(np.uint8) for s in (5, 20, 60)]
    scores = [ssim(x, n) for n in noisy]
    assert (scores[0] > scores[1]).all()
    assert (scores[1] > scores[2]).all()
    assert scores[0].shape == (2,)
    assert ssim(255 - x, x)[0] < 0, "what goes the other way is worse than nothing"


def test_pictures_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(InvalidInput, match="11 x 11"):
        ssim(flat(0, 10), flat(0, 10))
    with pytest.raises(InvalidInput, match="two equal stacks"):
        ssim(flat(0, 16), flat(0, 17))


def test_lpips_is_said_to_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)
    assert lpips_distance() == (None, "not measured: the package lpips is not installed")
    hub = types.SimpleNamespace(get_dir=lambda: str(tmp_path))
    for name, module in {"lpips": types.SimpleNamespace(), "torch": types.SimpleNamespace(), "torch.hub": hub}.items():
        monkeypatch.setitem(sys.modules, name, module)
    distance, why = lpips_distance()
    assert distance is None
    assert "weights of AlexNet are not on this machine" in why
