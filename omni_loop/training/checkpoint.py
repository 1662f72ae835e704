"""Checkpoints: a folder with ``model.safetensors`` (float16), ``config.json`` and a card."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor, nn

from ..config import location
from ..errors import CheckpointError

C = TypeVar("C", bound=BaseModel)
_FULL_PRECISION = 4096  # small tensors (norms, statistics) keep float32: they cost nothing


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], card: dict[str, Any], text: str) -> None:
    """Write weights, configuration and card (as JSON, with the SHA-256 of the weights, and as Markdown)."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = {
        name: (t.half() if t.is_floating_point() and t.numel() > _FULL_PRECISION else t).contiguous()
        for name, t in tensors.items()
    }
    save_file(packed, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    _, digest = _weights(folder)
    (folder / "card.json").write_text(json.dumps({**card, "sha256": digest}, indent=1) + "\n")
    (folder / "README.md").write_text(text)


def revision(folder: Path) -> str:
    """First 12 hex digits of the SHA-256 of the weights: names exactly what is served."""
    path = folder / "model.safetensors"
    try:
        known = _digests.get((path, _stamp(path.stat())))
    except OSError as e:
        raise _unreadable(folder, path.name, e) from None
    return (known or _weights(folder)[1])[:12]


def load_config(folder: Path, kind: type[C]) -> C:
    """The part's configuration; a missing or wrong one is a :class:`CheckpointError` that says where."""
    path = folder / "config.json"
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as e:
        raise _unreadable(folder, "config.json", e) from None
    except ValidationError as e:
        problem = e.errors()[0]
        where = location(problem["loc"])
        text = f"{where}: {problem['msg']}" if where else problem["msg"]
        raise CheckpointError(f"{folder.name}/config.json: {text}") from None


def load_weights(folder: Path, module: nn.Module) -> nn.Module:
    """Fill ``module`` from the folder, refusing missing, extra, mis-shaped or non-finite tensors, and weights
    other than those the card names by their SHA-256 (cards of older versions name none)."""
    data, digest = _weights(folder)
    try:
        tensors = {k: (v.float() if v.is_floating_point() else v) for k, v in load(data).items()}
    except (SafetensorError, ValueError, KeyError) as e:
        raise CheckpointError(f"{folder.name}/model.safetensors is corrupt: {e}") from None
    want = module.state_dict()
    missing, extra = sorted(want.keys() - tensors.keys()), sorted(tensors.keys() - want.keys())
    if missing or extra:
        raise CheckpointError(f"{folder.name}: tensors missing {missing[:3]}, unexpected {extra[:3]}")
    for name, t in tensors.items():
        if t.shape != want[name].shape:
            raise CheckpointError(f"{folder.name}: {name} is {tuple(t.shape)}, wanted {tuple(want[name].shape)}")
        if t.is_floating_point() and not torch.isfinite(t).all():
            raise CheckpointError(f"{folder.name}: {name} holds values that are not finite")
    # Last, since what the checks above say is more exact.
    if (promised := _promised(folder)) is not None and promised != digest:
        raise CheckpointError(
            f"{folder.name}/model.safetensors is corrupt or was replaced: its SHA-256 begins with {digest[:12]}, "
            f"that in card.json with {promised[:12]}"
        )
    module.load_state_dict(tensors)
    return module.eval().requires_grad_(False)


# SHA-256 of weights read before, by path and stamp: a server asks for the revision of what it has just loaded.
_digests: dict[tuple[Path, tuple[int, ...]], str] = {}


def _stamp(stat: os.stat_result) -> tuple[int, ...]:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _weights(folder: Path) -> tuple[bytes, str]:
    """The bytes of the weights and their SHA-256 in hex."""
    path = folder / "model.safetensors"
    try:
        with path.open("rb") as file:
            stamp, data = _stamp(os.fstat(file.fileno())), file.read()
    except OSError as e:
        raise _unreadable(folder, path.name, e) from None
    digest = _digests[path, stamp] = hashlib.sha256(data).hexdigest()
    return data, digest


def load_card(folder: Path) -> dict[str, Any]:
    """The checkpoint's card. Raises CheckpointError when there is none that can be read."""
    card = _read_card(folder)
    if not isinstance(card, dict):
        raise CheckpointError(f"{folder.name}/card.json: wanted keys and values, not {type(card).__name__}")
    return card


def _read_card(folder: Path) -> Any:
    try:
        return json.loads((folder / "card.json").read_bytes())
    except OSError as e:
        raise _unreadable(folder, "card.json", e) from None
    except ValueError as e:
        raise CheckpointError(f"{folder.name}/card.json is no JSON: {e}") from None


def _promised(folder: Path) -> str | None:
    """The SHA-256 that the card names, if there is a card and it names one."""
    card = _read_card(folder) if (folder / "card.json").exists() else None
    promised = card.get("sha256") if isinstance(card, dict) else None
    if promised is not None and not isinstance(promised, str):
        raise CheckpointError(f"{folder.name}/card.json: sha256: wanted text, not {type(promised).__name__}")
    return promised


def _unreadable(folder: Path, file: str, error: OSError) -> CheckpointError:
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    what = "is missing" if missing else f"cannot be read ({error.strerror})"
    return CheckpointError(f"no checkpoint at {folder.name!r}: {file} {what}")
