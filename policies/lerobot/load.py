"""Loading a LeRobot checkpoint so that it computes what it was trained to: all weights, all statistics, or nothing."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_loop.errors import CheckpointError, ConfigError, OmniLoopError
from omni_loop.registry import missing_extra

from .checkpoint import PREPROCESSOR, WEIGHTS, Described, describe, locate, revision, verify_files
from .families import Family, chunk_length, family_of

_log = logging.getLogger(__name__)
# What each way of normalising needs to know of a feature.
_STATISTICS = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
# Settings that name a model of somebody else's: a folder or a hub id.
_MODELS = ("vlm_model_name", "vision_encoder_name", "text_encoder_name")


@dataclass(frozen=True, slots=True)
class Options:
    """What a deployment may choose; see :func:`.template.lerobot`."""

    rtc: bool = False
    inference_steps: int = 0
    tokenizer: str = ""
    vlm: str = ""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A policy on its device with its processors. ``pre`` takes a batch by feature name, ``post`` a whole chunk
    ``[b, horizon, action_dim]``; both are LeRobot's pipelines. ``horizon``: actions of a call."""

    policy: Any
    pre: Any
    post: Any
    described: Described
    family: Family
    horizon: int
    device: str
    revision: str


def load(checkpoint: str, device: str = "cpu", options: Options = Options()) -> Loaded:
    """Everything of a checkpoint; see :func:`.checkpoint.locate` for what may be named.

    Raises:
        CheckpointError: something of it is missing, corrupt or does not fit, named.
        ConfigError: an option that this type does not take.
        MissingExtra: LeRobot or what the type needs besides is not installed.
    """
    described = describe(checkpoint)
    family = family_of(described.type)
    folder = locate(checkpoint)
    verify_files(folder)
    try:
        with _quiet():
            policy, pre, post = _load(folder, described, device, options)
    except OmniLoopError:
        raise
    except ModuleNotFoundError as e:
        raise missing_extra(e, f"a LeRobot {described.type} policy ") from e
    except Exception as e:  # of any library that a policy is made of
        why = str(e).replace(str(folder), folder.name)
        raise CheckpointError(f"LeRobot cannot load {folder.name!r}: {type(e).__name__}: {why}") from e
    _check_weights(folder, policy)
    _check_statistics(folder, policy.config, family, pre, post)
    horizon = chunk_length(described.type, described.settings)
    return Loaded(policy, pre, post, described, family, horizon, device, revision(folder))


def _load(folder: Path, described: Described, device: str, options: Options) -> tuple[Any, Any, Any]:
    import lerobot  # noqa: F401  light; its policies are not, and all of them are imported

    if "lerobot.policies" not in sys.modules:
        _log.warning("importing LeRobot takes about 20 s of CPU")
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies import get_policy_class, make_pre_post_processors

    if described.settings.get("use_peft"):
        raise CheckpointError(f"{folder.name!r} holds an adapter only; merge it into its base policy with peft first")
    config = PreTrainedConfig.from_pretrained(folder)
    config.device, config.pretrained_path = device, folder
    _configure(config, folder, described, options)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    policy.to(device).eval().requires_grad_(False)
    pre, post = make_pre_post_processors(
        policy.config, pretrained_path=str(folder), preprocessor_overrides=_overrides(folder, device, options)
    )
    return policy, pre, post


def _configure(config: Any, folder: Path, described: Described, options: Options) -> None:
    """What serving wants otherwise than training: no downloads, whole chunks, no state in the object."""
    for name, value in (("pretrained_backbone_weights", None), ("load_vlm_weights", False)):
        if hasattr(config, name):  # the checkpoint has these weights
            setattr(config, name, value)
    if getattr(config, "temporal_ensemble_coeff", None) is not None:
        config.temporal_ensemble_coeff = None  # the stage averages, with each session's own chunks
    if described.type in ("diffusion", "multi_task_dit"):
        config.n_action_steps = chunk_length(described.type, described.settings)  # all that was denoised
    if options.inference_steps:
        _set(config, ("num_inference_steps", "num_steps", "num_integration_steps"), options.inference_steps)
    named = [name for name in _MODELS if isinstance(getattr(config, name, None), str)]
    if options.vlm and not named:
        raise ConfigError(f"LeRobot's {config.type} is made without a model of somebody else's (option 'vlm')")
    for name in named:
        setattr(config, name, _inside(folder, options.vlm or getattr(config, name)))
    if hasattr(config, "rtc_config"):
        from lerobot.policies.rtc.configuration_rtc import RTCConfig

        known = config.rtc_config or RTCConfig()
        known.enabled = options.rtc
        config.rtc_config = known if options.rtc else None


def _set(config: Any, names: tuple[str, ...], value: Any) -> None:
    """The first of the settings that the policy has."""
    for name in names:
        if hasattr(config, name):
            setattr(config, name, value)
            return
    raise ConfigError(f"LeRobot's {config.type} has none of the settings {', '.join(names)}")


def _inside(folder: Path, name: str) -> str:
    """A folder of the checkpoint where there is one of this name, else the name as it is."""
    return str(folder / name) if name and (folder / name).is_dir() else name


def _overrides(folder: Path, device: str, options: Options) -> dict[str, Any]:
    """For the preprocessor's steps that name a device or a tokenizer."""
    steps = json.loads((folder / PREPROCESSOR).read_bytes()).get("steps", ())
    named = {step.get("registry_name"): step.get("config", {}) for step in steps}
    overrides: dict[str, Any] = {}
    if "device_processor" in named:
        overrides["device_processor"] = {"device": device}
    if "tokenizer_processor" in named:
        wanted = options.tokenizer or options.vlm or named["tokenizer_processor"].get("tokenizer_name", "")
        overrides["tokenizer_processor"] = {"tokenizer_name": _inside(folder, wanted)}
    elif options.tokenizer:
        raise ConfigError(f"the checkpoint {folder.name!r} has no tokenizer (option 'tokenizer')")
    return overrides


def _check_weights(folder: Path, policy: Any) -> None:
    """Every parameter holds what the file says: some of LeRobot's loaders only print that they failed.

    Raises:
        CheckpointError: the file is corrupt, or a parameter is not in it, was not taken from it or is not finite.
    """
    state: Mapping[str, Tensor] = policy.state_dict()
    known: set[tuple[int, torch.Size]] = set()
    try:
        with safe_open(str(folder / WEIGHTS), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                mine = state.get(name, state.get(f"model.{name}"))
                if mine is None:
                    continue
                wanted = file.get_tensor(name)
                if mine.shape != wanted.shape or not torch.equal(mine.cpu(), wanted.to(mine.dtype)):
                    raise CheckpointError(f"{folder.name}/{WEIGHTS}: LeRobot did not take {name!r} from it")
                if mine.is_floating_point() and not torch.isfinite(mine).all():
                    raise CheckpointError(f"{folder.name}/{WEIGHTS}: {name!r} holds values that are not finite")
                known.add((mine.data_ptr(), mine.shape))
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{folder.name}/{WEIGHTS} is corrupt: {e}") from None
    # Tied parameters are saved once: they share their storage with one that is in the file.
    missing = [n for n, t in state.items() if t.numel() and (t.data_ptr(), t.shape) not in known]
    if missing:
        raise CheckpointError(f"{folder.name}/{WEIGHTS} lacks {len(missing)} tensors of the policy: {_some(missing)}")
    if any(name.endswith("vqvae_model.discretized") and not bool(flag) for name, flag in state.items()):
        raise CheckpointError(f"{folder.name!r}: VQ-BeT's codes were never trained (vqvae_model.discretized is false)")


def _check_statistics(folder: Path, config: Any, family: Family, pre: Any, post: Any) -> None:
    """Without them the normaliser is silently the identity.

    Raises:
        CheckpointError: a statistic of a normalised feature is missing, of another shape or not finite; all named.
    """
    from lerobot.configs import FeatureType
    from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep

    problems: list[str] = []
    covered: set[str] = set()
    for step in (*pre.steps, *post.steps):
        if not isinstance(step, (NormalizerProcessorStep, UnnormalizerProcessorStep)):
            continue
        actions = isinstance(step, UnnormalizerProcessorStep)
        for name, feature in step.features.items():
            if (feature.type is FeatureType.ACTION) is not actions:
                continue  # observations on the way in, actions on the way out
            covered.add(name)
            problems += _problems(name, feature, step)
    if family.plain:
        for name, feature in {**config.input_features, **config.output_features}.items():
            mode = config.normalization_mapping.get(feature.type.value, "IDENTITY")
            if getattr(mode, "value", mode) != "IDENTITY" and name not in covered and ".empty_camera_" not in name:
                problems.append(f"{name} is normalised by no step")
    if problems:
        raise CheckpointError(f"{folder.name!r} lacks statistics: {_some(problems, 8)}")


def _problems(name: str, feature: Any, step: Any) -> Iterator[str]:
    mode = step.norm_map.get(feature.type, "IDENTITY")
    for statistic in _STATISTICS.get(getattr(mode, "value", mode), ()):
        value = step._tensor_stats.get(name, {}).get(statistic)
        if value is None:
            yield f"{name}.{statistic} is missing"
        elif not torch.isfinite(value).all():
            yield f"{name}.{statistic} is not finite"
        elif not _broadcasts(value.shape, feature.shape):
            yield f"{name}.{statistic} has shape {list(value.shape)}, for a feature of {list(feature.shape)}"


def _broadcasts(shape: Iterable[int], wanted: Iterable[int]) -> bool:
    shape, wanted = tuple(shape), tuple(wanted)
    try:
        return tuple(torch.broadcast_shapes(shape, wanted)) == wanted
    except RuntimeError:
        return False


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """LeRobot prints while it loads; a server's output is not the place."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            yield
    finally:
        for line in said.getvalue().splitlines():
            _log.debug("%s", line)
