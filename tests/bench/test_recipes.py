"""``bench recipes``: new parts are held to the spread their trainers state."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omni_loop import registry
from omni_loop.errors import CheckpointError, ConfigError
from omni_loop_bench.rows import Settings, find

PSNR = "codec_psnr_db_episodes"


def _card(folder: Path, metrics: dict[str, float]) -> None:
    (folder / "codec").mkdir(parents=True)
    (folder / "codec" / "card.json").write_text(json.dumps({"metrics": metrics}))


def _passes(folder: Path, psnr: float) -> bool | None:
    _card(folder, {"psnr_db_episodes": psnr})
    return find("recipes").run([PSNR], Settings(checkpoints=str(folder)))[0].passed


def test_a_part_within_the_spread_passes_and_a_worse_one_fails(tmp_path: Path) -> None:
    spread = registry.load(registry.TRAINERS, "codec").spread["psnr_db_episodes"]
    row = find("recipes")
    _card(tmp_path / "same", {"psnr_db_episodes": 0.0})
    shipped = row.run([PSNR], Settings(checkpoints=str(tmp_path / "same")))[0].value.baseline
    assert shipped is not None
    assert spread < 0
    assert _passes(tmp_path / "near", shipped + 0.9 * spread)
    assert _passes(tmp_path / "better", shipped + 1)
    assert _passes(tmp_path / "far", shipped + 1.1 * spread) is False


def test_every_stated_spread_is_a_row_and_a_metric_of_the_shipped_card() -> None:
    rows = find("recipes").rows
    for part, trainer in (("codec", "codec"), ("world", "world"), ("context", "context"), ("act", "policy")):
        stated = registry.load(registry.TRAINERS, trainer).spread
        assert stated
        assert {f"{part}_{metric}" for metric in stated} <= rows.keys()


def test_without_new_parts_it_says_how_to_train_them() -> None:
    with pytest.raises(ConfigError, match="omni-loop train all --out"):
        find("recipes").run([PSNR])


def test_a_card_without_the_metric_is_named(tmp_path: Path) -> None:
    _card(tmp_path, {"other": 1.0})
    with pytest.raises(CheckpointError, match="psnr_db_episodes"):
        find("recipes").run([PSNR], Settings(checkpoints=str(tmp_path)))
