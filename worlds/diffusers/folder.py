"""A diffusers folder: what its JSON files say without any weights, and its components, loaded by path.

Only ``safetensors`` are read, nothing is downloaded, and components may only be classes of diffusers and transformers
that ``model_index.json`` names (diffusers' own format: https://huggingface.co/docs/diffusers/using-diffusers/loading).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from omni_loop import registry
from omni_loop.errors import CheckpointError, nearest

_LIBRARIES = ("diffusers", "transformers")
_TEXT = ("text_encoder", "tokenizer")  # what may lie in a folder of its own
_READ = (".json", ".jinja", ".model", ".safetensors", ".txt")
_HEAD, _SAMPLE, _EVERY = 1 << 20, 1 << 16, 1 << 26  # bytes of a file's head, and of samples every so many, are hashed


class Folder:
    """``checkpoint`` on disk, with the index of its own or of the folder it is a part of. Raises CheckpointError when
    there is none."""

    def __init__(self, checkpoint: str, part_of: Folder | None = None) -> None:
        self.path = Path(checkpoint)
        self.name = self.path.name if len(self.path.name) <= 100 else f"{self.path.name[:100]}..."
        self._index: Mapping[str, Any] = self._json("model_index.json") if part_of is None else part_of._index

    def kind(self, known: Iterable[str]) -> str:
        """The class of its pipeline, which must be one of ``known``."""
        kind, names = str(self._index.get("_class_name", "")), tuple(known)
        if kind not in names:
            raise CheckpointError(f"{self.name}/model_index.json is of the pipeline {kind!r}.{nearest(kind, names)}")
        return kind

    def setting(self, name: str, default: Any = None) -> Any:
        """A setting of the pipeline itself."""
        return self._index.get(name, default)

    def config(self, part: str) -> Mapping[str, Any]:
        """The configuration of a component."""
        return self._json(f"{part}/config.json")

    def has(self, part: str) -> bool:
        """Whether the pipeline has this component."""
        entry = self._index.get(part)
        return isinstance(entry, list) and len(entry) == 2 and None not in entry

    def load(self, part: str, **options: Any) -> Any:
        """A component with its weights, as the class that the index names."""
        if not self.has(part):
            raise CheckpointError(f"{self.name}/model_index.json names no {part!r}")
        library, name = self._index[part]
        if library not in _LIBRARIES:
            raise CheckpointError(
                f"{self.name}/model_index.json: {part!r} is of {library!r}; components are of {' or '.join(_LIBRARIES)}"
            )
        kind = getattr(imported(library), name, None)
        if kind is None:
            raise CheckpointError(f"{self.name}/model_index.json: {library} has no class {name!r} ({part!r})")
        return self.load_as(kind, part, **options)

    def load_as(self, kind: Any, part: str, **options: Any) -> Any:
        """A component as ``kind``."""
        folder = self.path / part
        if not folder.is_dir():
            raise CheckpointError(f"no checkpoint at {self.name!r}: the folder {part!r} is missing")
        try:
            return kind.from_pretrained(str(folder), local_files_only=True, **options)
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as e:  # their texts hold paths
            raise CheckpointError(f"{self.name}/{part} cannot be loaded as {kind.__name__}: {type(e).__name__}") from e

    def weights(self, part: str, dtype: Any, device: str) -> Any:
        """A component that is a model, ready to run."""
        # Both libraries renamed the argument of the type, at different times.
        name = "torch_dtype" if self._index.get(part, [""])[0] == "diffusers" else "dtype"
        return ready(self.load(part, use_safetensors=True, **{name: dtype}), device)

    def revision(self, text: Folder, more: str = "") -> str:
        """12 hex digits that name what is served, with the text encoder of ``text``: JSON files and headers in full, of
        large weights samples, since any training changes all of them; and ``more``."""
        digest = hashlib.blake2b(more.encode(), digest_size=6)
        for part in sorted(self._index):
            home = text if part in _TEXT else self
            for file in sorted((home.path / part).rglob("*")) if self.has(part) else ():
                if file.suffix not in _READ:
                    continue
                digest.update(f"{file.relative_to(home.path)} {file.stat().st_size}".encode())
                _sample(file, digest)
        return digest.hexdigest()

    def _json(self, file: str) -> Mapping[str, Any]:
        try:
            data = json.loads((self.path / file).read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            raise CheckpointError(f"no checkpoint at {self.name!r}: {file} is missing") from None
        except (OSError, ValueError) as e:
            raise CheckpointError(f"{self.name}/{file} cannot be read: {type(e).__name__}") from None
        if not isinstance(data, dict):
            raise CheckpointError(f"{self.name}/{file}: wanted keys and values, not {type(data).__name__}")
        return data


def _sample(file: Path, digest: hashlib.blake2b) -> None:
    with file.open("rb") as opened:
        for at in range(0, max(file.stat().st_size, 1), _EVERY):
            opened.seek(at)
            digest.update(opened.read(_SAMPLE if at else _HEAD))


def imported(library: str) -> Any:
    """A heavy package, when it is first needed. Raises MissingExtra when it is not installed."""
    try:
        return import_module(library)
    except ModuleNotFoundError as e:
        raise registry.missing_extra(e, "a diffusers pipeline ") from e


def ready(module: Any, device: str) -> Any:
    """``module`` on ``device``, for inference."""
    return module.to(device).eval().requires_grad_(False)
