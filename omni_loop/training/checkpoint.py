"""Checkpoints: a folder with ``model.safetensors`` (float16), ``config.json`` and a card."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ..errors import CheckpointError

C = TypeVar("C", bound=BaseModel)
_FULL_PRECISION = 4096  # small tensors (norms, statistics) keep float32: they cost nothing


def save(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], card: dict[str, Any], text: str) -> None:
    """Write weights, configuration and card (as JSON and as Markdown)."""
    folder.mkdir(parents=True, exist_ok=True)
    packed = {
        name: (t.half() if t.is_floating_point() and t.numel() > _FULL_PRECISION else t).contiguous()
        for name, t in tensors.items()
    }
    save_file(packed, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    (folder / "README.md").write_text(text)


def revision(folder: Path) -> str:
    """First 12 hex digits of the SHA-256 of the weights: names exactly what is served."""
    try:
        return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()[:12]
    except OSError as e:
        raise _unreadable(folder, "model.safetensors", e) from None


def load_config(folder: Path, kind: type[C]) -> C:
    """The part's configuration; a missing or wrong one is a :class:`CheckpointError` that says where."""
    path = folder / "config.json"
    try:
        return kind.model_validate_json(path.read_bytes())
    except OSError as e:
        raise _unreadable(folder, "config.json", e) from None
    except ValidationError as e:
        raise CheckpointError(f"{folder.name}/config.json: {e.errors()[0]['loc']}: {e.errors()[0]['msg']}") from None


def load_weights(folder: Path, module: nn.Module) -> nn.Module:
    """Fill ``module`` from the folder, refusing missing, extra, mis-shaped or non-finite tensors."""
    path = folder / "model.safetensors"
    try:
        tensors = {k: (v.float() if v.is_floating_point() else v) for k, v in load_file(str(path)).items()}
    except OSError as e:
        raise _unreadable(folder, "model.safetensors", e) from None
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
    module.load_state_dict(tensors)
    return module.eval().requires_grad_(False)


def _unreadable(folder: Path, file: str, error: OSError) -> CheckpointError:
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError))
    what = "is missing" if missing else f"cannot be read ({error.strerror})"
    return CheckpointError(f"no checkpoint at {folder.name!r}: {file} {what}")
