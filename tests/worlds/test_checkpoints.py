"""A part that is not as its configuration says is refused when it is loaded, by name and without a path."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from omni_loop.errors import CheckpointError
from omni_loop.runner.local import LocalRunner
from omni_loop.training.checkpoint import revision
from omni_loop_policies.stages import act
from omni_loop_worlds.context.perceive import load_codec, load_context
from omni_loop_worlds.stages import context, decode, frames
from omni_loop_worlds.stages.shared import SHIPPED

POLICY = Path(inspect.getfile(act)).parent / "checkpoints"
Spoil = Callable[[Path], None]
NAME = "blocks.0.qkv.weight"


def _tensors(change: Callable[[dict[str, Tensor]], object]) -> Spoil:
    def spoil(part: Path) -> None:
        tensors = {k: v.clone() for k, v in load_file(part / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, part / "model.safetensors")

    return spoil


def _bytes(change: Callable[[bytearray], object], name: str = "model.safetensors") -> Spoil:
    def spoil(part: Path) -> None:
        data = bytearray((part / name).read_bytes())
        change(data)
        (part / name).write_bytes(data)

    return spoil


def _config(**values: object) -> Spoil:
    def spoil(part: Path) -> None:
        config = json.loads((part / "config.json").read_text()) | values
        (part / "config.json").write_text(json.dumps(config))

    return spoil


def _card(text: str) -> Spoil:
    def spoil(part: Path) -> None:
        (part / "card.json").write_text(text)

    return spoil


def _set(data: bytearray, at: int, value: bytes) -> None:
    at %= len(data)
    data[at : at + len(value)] = value


def _a_file_instead(part: Path) -> None:
    shutil.rmtree(part)
    part.write_text("x")


SPOILED: dict[str, tuple[Spoil, str]] = {
    "no folder": (shutil.rmtree, "world"),
    "a file for a folder": (_a_file_instead, "world"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), "model.safetensors is missing"),
    "no configuration": (lambda p: (p / "config.json").unlink(), "config.json is missing"),
    "empty weights": (_bytes(lambda d: d.clear()), "model.safetensors is corrupt"),
    "weights cut short": (_bytes(lambda d: d.__delitem__(slice(-100, None))), "model.safetensors is corrupt"),
    "a header cut short": (_bytes(lambda d: d.__delitem__(slice(40, None))), "model.safetensors is corrupt"),
    "a flipped header length": (_bytes(lambda d: _set(d, 7, b"\x7f")), "model.safetensors is corrupt"),
    "a flipped header bit": (_bytes(lambda d: _set(d, 8, bytes([d[8] ^ 4]))), "model.safetensors is corrupt"),
    "a tensor missing": (_tensors(lambda t: t.pop(NAME)), NAME),
    "a tensor too many": (_tensors(lambda t: t.update(stranger=torch.zeros(3))), "stranger"),
    "a tensor of another shape": (_tensors(lambda t: t.update({NAME: t[NAME][:-1].clone()})), NAME),
    "a tensor of the right size turned": (_tensors(lambda t: t.update({NAME: t[NAME].T.contiguous()})), NAME),
    "a flipped bit of a weight": (_bytes(lambda d: _set(d, -3, bytes([d[-3] ^ 1]))), "is corrupt or was replaced"),
    "a zeroed tail": (_bytes(lambda d: _set(d, -200, bytes(200))), "is corrupt or was replaced"),
    "another hash": (_card('{"sha256": "0123456789abcdef"}'), "that in card.json with 0123456789ab"),
    "a hash that is none": (_card('{"sha256": 7}'), "card.json: sha256: wanted text, not int"),
    "a card that is no JSON": (_card("{"), "card.json is no JSON"),
    "a NaN": (_tensors(lambda t: t[NAME].view(-1).__setitem__(7, float("nan"))), NAME),
    "an infinity": (_tensors(lambda t: t[NAME].view(-1).__setitem__(7, float("-inf"))), NAME),
    "another width": (_config(width=64), "wanted"),
    "another number of layers": (_config(layers=3), "blocks.2"),
    "an unknown key": (_config(widht=64), "widht"),
    "a value of another type": (_config(width="wide"), "width"),
    "another kind": (_config(kind="codec"), "world/config.json: kind: Input should be 'dit'"),
    "no JSON": (_bytes(lambda d: d.__delitem__(slice(-9, None)), "config.json"), "config.json"),
    "no text": (_bytes(lambda d: _set(d, 0, b"\xff\xfe\x00"), "config.json"), "config.json"),
}


@pytest.fixture
def folder(small_checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_checkpoints, tmp_path / "parts"))


def test_sound_parts_load(folder: Path) -> None:
    stages = [factory(checkpoints=str(folder)) for factory in (context, frames, decode, act)]
    assert len({stage.revision for stage in stages}) == 4


@pytest.mark.parametrize("case", SPOILED)
def test_a_spoiled_part_is_refused_by_name(folder: Path, case: str) -> None:
    spoil, named = SPOILED[case]
    spoil(folder / "world")
    with pytest.raises(CheckpointError) as caught:
        frames(checkpoints=str(folder))
    assert named in caught.value.text
    assert "world" in caught.value.text
    assert str(folder) not in caught.value.text
    assert "/" not in re.sub(r"world/(config\.json|card\.json|model\.safetensors)", "", caught.value.text)


@pytest.mark.parametrize("card", [None, "{}", "[]"])
def test_without_a_hash_in_the_card_weights_are_taken_as_they_are(folder: Path, card: str | None) -> None:
    path = folder / "world" / "card.json"
    path.unlink() if card is None else path.write_text(card)
    assert frames(checkpoints=str(folder)).revision == revision(folder / "world")


def test_the_card_names_what_is_served_and_it_is_hashed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []

    def sha256(data: bytes) -> object:
        hashed.append(len(data))
        return hashlib.new("sha256", data)

    monkeypatch.setattr("omni_loop.training.checkpoint.hashlib", SimpleNamespace(sha256=sha256))
    served = act(checkpoints=str(folder)).revision
    assert hashed == [(folder / "act" / "model.safetensors").stat().st_size]
    assert json.loads((folder / "act" / "card.json").read_text())["sha256"].startswith(served)


def test_the_revision_follows_the_file(folder: Path) -> None:
    first = revision(folder / "world")
    SPOILED["a zeroed tail"][0](folder / "world")
    assert revision(folder / "world") != first


@pytest.mark.parametrize("part", [*(SHIPPED / n for n in ("codec", "world", "context")), POLICY / "act"])
def test_shipped_cards_name_their_weights(part: Path) -> None:
    card = json.loads((part / "card.json").read_text())
    assert card["sha256"] == hashlib.sha256((part / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(("part", "load"), [("codec", load_codec), ("context", load_context)])
def test_other_parts_too(folder: Path, part: str, load: Callable[[Path], object]) -> None:
    (folder / part / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=f"{part}.*model.safetensors is missing"):
        load(folder / part)


def test_a_missing_part_is_named_before_anything_runs(folder: Path) -> None:
    shutil.rmtree(folder / "act")
    with pytest.raises(CheckpointError, match="no checkpoint at 'act'"):
        act(checkpoints=str(folder))


async def test_a_runner_with_a_corrupt_checkpoint_does_not_start(folder: Path) -> None:
    SPOILED["a NaN"][0](folder / "world")
    runner = LocalRunner("r", [("p/frames", frames, {"checkpoints": str(folder)})])
    with pytest.raises(CheckpointError, match=NAME):
        await runner.start()
    await runner.stop()
