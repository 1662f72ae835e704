"""A LeRobot checkpoint before LeRobot is imported: where it is, what it says of itself, what it may hold.

A checkpoint is a folder with ``config.json``, ``model.safetensors`` and the processors ``policy_preprocessor.json``
and ``policy_postprocessor.json`` with the statistics they name. Only JSON and safetensors are read: nothing pickled.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_loop.errors import CheckpointError, ConfigError, InvalidInput, MissingExtra, nearest
from omni_loop.record.features import ACTION, key_of
from omni_loop.types import ArraySpec

from .numbers import check_settings, control_rate, shape_of

SHIPPED = Path(__file__).parent.parent / "checkpoints"
WEIGHTS = "model.safetensors"
PREPROCESSOR, POSTPROCESSOR = "policy_preprocessor.json", "policy_postprocessor.json"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
_OWN_STEP = re.compile(r"lerobot\.(processor|policies)(\.\w+)+")
_STATE_FILE = re.compile(r"\w[\w.-]*\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_HUB_WAIT = 5.0  # seconds
_CARD = "card.json"
_BESIDE = (_CARD, "train_config.json")  # tell where it comes from; nothing of them is served
# Cameras that VLAs fill with blanks by themselves.
BLANK = ".empty_camera_"


@dataclass(frozen=True, slots=True)
class Feature:
    """One input or output: ``shape`` as LeRobot has it, images ``[3, h, w]``. ``kind``: STATE, ENV, VISUAL, ..."""

    name: str
    kind: str
    shape: tuple[int, ...]

    @property
    def key(self) -> str:
        """What our observations call it."""
        return key_of(self.name)

    @property
    def is_image(self) -> bool:
        return self.kind == "VISUAL"

    def spec(self) -> ArraySpec:
        """The array a client sends: images as ``uint8[h, w, 3]``."""
        if self.is_image:
            _, h, w = self.shape
            return ArraySpec(self.key, "uint8", (h, w, 3), "rgb")
        return ArraySpec(self.key, "float32", self.shape, description=f"LeRobot's feature {self.name}")


@dataclass(frozen=True, slots=True)
class Described:
    """What ``config.json`` says. ``settings`` are all of it. ``control_hz``: of the data it learnt from, where a card
    of ours says it; LeRobot's own files do not."""

    type: str
    inputs: tuple[Feature, ...]
    action_dim: int
    settings: Mapping[str, Any]
    control_hz: float | None = None

    @property
    def n_obs_steps(self) -> int:
        return int(self.settings.get("n_obs_steps", 1))


def locate(checkpoint: str) -> Path:
    """The folder of a checkpoint: one of this machine, a shipped one by name, or a hub's, which is downloaded.

    Raises:
        CheckpointError: there is none; the text names what is near, or why the hub did not give it.
        MissingExtra: a hub id without LeRobot's extra.
    """
    return _here(checkpoint) or _download(checkpoint, _HUB_FILES)


def describe(checkpoint: str) -> Described:
    """What the checkpoint's ``config.json`` says; of a hub's checkpoint only that file is fetched. Raises as
    :func:`locate`, and CheckpointError for a file that says no policy's features."""
    folder = _here(checkpoint) or _download(checkpoint, ["config.json"])
    settings = _read_json(folder, "config.json")
    type_ = settings.get("type")
    if not isinstance(type_, str):
        raise CheckpointError(f"{folder.name}/config.json is no LeRobot policy's: it has no 'type'")
    inputs = [f for f in _features(folder, settings, "input_features") if BLANK not in f.name]
    outputs = {f.name: f for f in _features(folder, settings, "output_features")}
    if ACTION not in outputs or len(outputs[ACTION].shape) != 1:
        raise CheckpointError(f"{folder.name}/config.json: output_features has no 'action' of one dimension")
    if not inputs:
        raise CheckpointError(f"{folder.name}/config.json: input_features is empty: nothing could be observed")
    check_settings(f"{folder.name}/config.json", settings)
    card = _read_json(folder, _CARD) if (folder / _CARD).is_file() else {}
    control_hz = control_rate(f"{folder.name}/{_CARD}", card.get("control_hz"))
    return Described(type_, tuple(inputs), outputs[ACTION].shape[0], settings, control_hz)


def verify_files(folder: Path) -> None:
    """Every file is there and of a kind that is read; processors are made of LeRobot's own steps.

    Raises:
        CheckpointError: one is missing, is pickled, or names code of somebody else.
    """
    if not (folder / WEIGHTS).is_file():
        pickled = sorted(f.name for f in folder.iterdir() if f.suffix in _PICKLED)
        instead = f"; {pickled[0]} is pickled, and nothing pickled is read" if pickled else ""
        raise CheckpointError(f"no LeRobot checkpoint at {folder.name!r}: {WEIGHTS} is missing{instead}")
    for name in (PREPROCESSOR, POSTPROCESSOR):
        if not (folder / name).is_file():
            raise CheckpointError(
                f"no LeRobot checkpoint at {folder.name!r}: {name} is missing; checkpoints of before 0.4 are brought "
                "up to date by lerobot.processor.migrate_policy_normalization"
            )
        for step in processor_steps(folder, name):
            _check_step(folder, name, step)


def processor_steps(folder: Path, name: str) -> list[dict[str, Any]]:
    """The steps of one of the two processors' files. Raises CheckpointError for what is no list of them."""
    steps = _read_json(folder, name).get("steps")
    if not isinstance(steps, list) or not all(isinstance(step, dict) for step in steps):
        raise CheckpointError(f"{folder.name}/{name}: 'steps' must be a list of keys and values")
    return steps


def verify_here(checkpoint: str) -> Path | None:
    """:func:`verify_files` of a checkpoint on this machine, and its folder; None: it is a hub's."""
    folder = _here(checkpoint)
    if folder is not None:
        verify_files(folder)
    return folder


def check_tokenizer(folder: Path, tokenizer: str) -> None:
    """Raises ConfigError for the option ``tokenizer`` where the checkpoint's processors have none."""
    if tokenizer and all(
        s.get("registry_name") != "tokenizer_processor" for s in processor_steps(folder, PREPROCESSOR)
    ):
        raise ConfigError(f"the checkpoint {folder.name!r} has no tokenizer (option 'tokenizer')")


def _check_step(folder: Path, name: str, step: Mapping[str, Any]) -> None:
    where = f"{folder.name}/{name}"
    code = step.get("registry_name", step.get("class"))
    if not isinstance(code, str):
        raise CheckpointError(f"{where}: a step has the name {code!r:.80}; it must be text")
    if "registry_name" not in step and not _OWN_STEP.fullmatch(code):
        raise CheckpointError(f"{where}: the step {code!r:.80} is not one of LeRobot's own")
    if not isinstance(step.get("config", {}), dict):
        raise CheckpointError(f"{where}: the config of the step {code!r:.80} must be keys and values")
    if "state_file" not in step:
        return
    state = step["state_file"]
    # Beside the others, so that the revision is of it too.
    if not (isinstance(state, str) and _STATE_FILE.fullmatch(state) and (folder / state).is_file()):
        raise CheckpointError(f"{where}: its state {state!r:.80} is no safetensors file here")


def revision(folder: Path) -> str:
    """First 12 hex digits of a SHA-256 over weights, configuration and processors: names exactly what is served."""
    digest = hashlib.sha256()
    read = (f for f in folder.iterdir() if f.suffix in (".json", ".safetensors") and f.name not in _BESIDE)
    for file in sorted(f for f in read if f.is_file()):
        digest.update(file.name.encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:12]


def shipped() -> list[str]:
    """Names of the LeRobot checkpoints that ship with this package."""
    return sorted(f.parent.name for f in SHIPPED.glob(f"*/{PREPROCESSOR}"))


def _here(checkpoint: str) -> Path | None:
    """The folder on this machine; None: it can only be a hub's."""
    try:
        path = Path(checkpoint).expanduser()
        if path.is_dir():
            return path
    except (OSError, RuntimeError) as e:  # a name longer than any file's; nobody's home
        reason = e.strerror if isinstance(e, OSError) else "no such user"
        shown = checkpoint if len(checkpoint) <= 100 else f"{checkpoint[:100]}..."
        raise CheckpointError(f"no LeRobot checkpoint at {shown!r}: {reason}") from None
    if "/" not in checkpoint and checkpoint in shipped():
        return SHIPPED / checkpoint
    if _HUB_ID.fullmatch(checkpoint):
        return None
    beside = [f.parent.name for f in path.parent.glob("*/config.json")]
    known = beside if "/" in checkpoint else [*shipped(), *beside]
    looked = path.absolute().parent
    raise CheckpointError(
        f"no LeRobot checkpoint at {checkpoint!r}: no such folder in {looked}.{nearest(path.name, known)}"
    )


def _download(repository: str, files: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError:
        text = (
            f"the checkpoint {repository!r} is no folder here ({Path.cwd()}); to fetch it from the hub install "
            "omni-loop[lerobot], or in a clone: uv sync --inexact --extra lerobot"
        )
        raise MissingExtra(text) from None
    not_here = f"the checkpoint {repository!r} is no folder here ({Path.cwd()}), and the hub"
    try:
        return Path(snapshot_download(repository, allow_patterns=files, etag_timeout=_HUB_WAIT))
    except LocalEntryNotFoundError as e:  # nor in its cache
        raise CheckpointError(f"{not_here} is not reachable") from e
    except (HfHubHTTPError, HFValidationError, OSError) as e:
        why = str(e).partition("\n")[0]
        raise CheckpointError(f"{not_here} did not give it: {type(e).__name__}: {why:.200}") from e


def _read_json(folder: Path, name: str) -> dict[str, Any]:
    try:
        data = json.loads((folder / name).read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"no LeRobot checkpoint at {folder.name!r}: {name} is missing") from None
    except OSError as e:
        raise CheckpointError(f"{folder.name}/{name} cannot be read ({e.strerror})") from None
    except RecursionError:
        raise CheckpointError(f"{folder.name}/{name} is no JSON that is read: it is nested too deeply") from None
    except ValueError as e:
        raise CheckpointError(f"{folder.name}/{name} is no JSON: {e}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{folder.name}/{name}: wanted keys and values, not {type(data).__name__}")
    return data


def _features(folder: Path, settings: Mapping[str, Any], group: str) -> list[Feature]:
    given = settings.get(group)
    if not isinstance(given, dict):
        raise CheckpointError(f"{folder.name}/config.json: {group} is missing")
    features = []
    for name, described in given.items():
        try:
            feature = Feature(name, str(described["type"]), shape_of(described["shape"]))
            if group == "input_features":
                _ = feature.key
        except (TypeError, KeyError, ValueError, InvalidInput) as e:
            raise CheckpointError(f"{folder.name}/config.json: {group}: {name!r}: {e}") from None
        if feature.is_image and (len(feature.shape) != 3 or feature.shape[0] != 3):
            raise CheckpointError(f"{folder.name}/config.json: {name!r} has shape {list(feature.shape)}, not [3, h, w]")
        features.append(feature)
    return features
