"""What was loaded of a checkpoint is what its files and its configuration say: every weight, every statistic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from omni_loop.errors import CheckpointError

from .checkpoint import BLANK, POSTPROCESSOR, PREPROCESSOR, WEIGHTS
from .families import STATISTICS, Family

_MOST_EPS = 1e-2
# Tensors of a file that no policy of today has and none misses: LeRobot's normalisers of before 0.4, which are
# processors now, and tables that transformers computes by itself.
_SUPERSEDED = re.compile(r"(normalize_inputs|normalize_targets|unnormalize_outputs)\..*|.*\.(position_ids|inv_freq)")
_VAE = re.compile(r"model\.vae_encoder.*")  # ACT's, which only its training runs


def check_weights(folder: Path, policy: Any) -> None:
    """Every parameter holds what the file says, and the file holds nothing else: some of LeRobot's loaders only print
    that they failed, others drop what they have no place for.

    Raises:
        CheckpointError: the file is corrupt; a parameter is not in it, was not taken from it or is not finite; or it
            holds tensors that the policy of this configuration does not have.
    """
    state: Mapping[str, Tensor] = policy.state_dict()
    known: set[tuple[int, torch.Size]] = set()
    extra: list[str] = []
    try:
        with safe_open(str(folder / WEIGHTS), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  not a mapping
                mine = state.get(name, state.get(f"model.{name}"))
                if mine is None:
                    extra.append(name)
                    continue
                _check_weight(f"{folder.name}/{WEIGHTS}", name, mine, file.get_tensor(name))
                known.add((mine.data_ptr(), mine.shape))
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{folder.name}/{WEIGHTS} is corrupt: {e}") from None
    # Tied parameters are saved once: they share their storage with one that is in the file.
    missing = [n for n, t in state.items() if t.numel() and (t.data_ptr(), t.shape) not in known]
    if missing:
        raise CheckpointError(f"{folder.name}/{WEIGHTS} lacks {len(missing)} tensors of the policy: {_some(missing)}")
    if extra := [name for name in extra if not _may_be_left(name, policy.config)]:
        raise CheckpointError(
            f"{folder.name}/{WEIGHTS} holds {len(extra)} tensors that the policy of its config.json does not have: "
            f"{_some(extra)}"
        )
    if any(name.endswith("vqvae_model.discretized") and not bool(flag) for name, flag in state.items()):
        raise CheckpointError(f"{folder.name!r}: VQ-BeT's codes were never trained (vqvae_model.discretized is false)")


def _check_weight(file: str, name: str, mine: Tensor, wanted: Tensor) -> None:
    if wanted.is_floating_point() and not torch.isfinite(wanted).all():  # before equality, which NaN never has
        raise CheckpointError(f"{file}: {name!r} holds values that are not finite")
    if mine.shape != wanted.shape or not torch.equal(mine.cpu(), wanted.to(mine.dtype)):
        raise CheckpointError(f"{file}: LeRobot did not take {name!r} from it")
    if mine.is_floating_point() and not torch.isfinite(mine).all():
        raise CheckpointError(f"{file}: {name!r} holds values that are not finite as {mine.dtype}")


def _may_be_left(name: str, config: Any) -> bool:
    """Whether a tensor of the file means nothing to the policy's actions."""
    if config.type == "act" and not config.use_vae and _VAE.fullmatch(name):
        return True
    return _SUPERSEDED.fullmatch(name) is not None


def check_statistics(folder: Path, config: Any, family: Family, pre: Any, post: Any) -> None:
    """Observations are normalised on the way in and actions on the way out, as the policy was trained: where something
    of it is missing, LeRobot's steps silently do nothing.

    Raises:
        CheckpointError: a feature is normalised otherwise than by ``normalization_mapping``, by no step or by two; a
            statistic is missing, of another shape, not finite or no spread. All are named.
    """
    from lerobot.processor import NormalizerProcessorStep, UnnormalizerProcessorStep

    into = [step for step in pre.steps if isinstance(step, NormalizerProcessorStep)]
    out = [step for step in post.steps if isinstance(step, UnnormalizerProcessorStep)]
    problems: list[str] = []
    if family.plain:  # else the type has steps of its own besides
        problems += _backwards(pre.steps, post.steps, NormalizerProcessorStep, UnnormalizerProcessorStep)
        for features, steps in ((config.input_features, into), (config.output_features, out)):
            for name, feature in features.items():
                if BLANK not in name:
                    problems += _normalised_as_trained(name, feature, config, steps)
    for steps, actions in ((into, False), (out, True)):
        for step in steps:
            problems += _step_problems(step, actions)
    if problems:
        raise CheckpointError(f"{folder.name!r} would not be normalised as it was trained: {_some(problems, 8)}")


def _backwards(pre: Iterable[Any], post: Iterable[Any], normaliser: type, unnormaliser: type) -> Iterator[str]:
    for file, steps, kind in ((PREPROCESSOR, pre, unnormaliser), (POSTPROCESSOR, post, normaliser)):
        if any(isinstance(step, kind) for step in steps):
            yield f"{file} has a step {kind.__name__}, which belongs into the other one"


def _normalised_as_trained(name: str, feature: Any, config: Any, steps: list[Any]) -> Iterator[str]:
    """What is otherwise than ``normalization_mapping`` says of one feature of the policy."""
    wanted = _value(config.normalization_mapping.get(_value(feature.type), "IDENTITY"))
    modes = [mode for step in steps if (mode := _mode(step, name)) != "IDENTITY"]
    if len(modes) > 1:
        yield f"{name} is normalised by {len(modes)} steps"
    elif not modes and wanted != "IDENTITY":
        listed = [s for s in steps if name in s.features and _chosen(s, name)]
        how = "as IDENTITY" if listed else "by no step"
        yield f"{name} is normalised {how}; normalization_mapping says {wanted}"
    elif modes and modes[0] != wanted:
        yield f"{name} is normalised as {modes[0]}; normalization_mapping says {wanted}"
    for step in steps:
        if name in step.features and tuple(step.features[name].shape) != tuple(feature.shape):
            shapes = f"{list(step.features[name].shape)}; config.json says {list(feature.shape)}"
            yield f"{name} has the shape {shapes}"


def _chosen(step: Any, name: str) -> bool:
    """Whether ``normalize_observation_keys`` leaves the feature to the step; actions are not chosen by it."""
    keys = step.normalize_observation_keys
    return keys is None or name in keys or _value(step.features[name].type) == "ACTION"


def _mode(step: Any, name: str) -> str:
    """How a step treats a feature."""
    if name not in step.features or not _chosen(step, name):
        return "IDENTITY"
    return _value(step.norm_map.get(step.features[name].type, "IDENTITY"))


def _step_problems(step: Any, actions: bool) -> Iterator[str]:
    """Statistics of one step: of observations on the way in, of actions on the way out."""
    for name, feature in step.features.items():
        if (_value(feature.type) == "ACTION") is actions and (mode := _mode(step, name)) in STATISTICS:
            yield from _problems(name, feature, mode, step)
    if not 0 <= step.eps <= _MOST_EPS:
        yield f"eps is {step.eps:g}; it must be 0 to {_MOST_EPS:g}"


def _problems(name: str, feature: Any, mode: str, step: Any) -> Iterator[str]:
    found: list[Tensor] = []
    for statistic in STATISTICS[mode]:
        value = step._tensor_stats.get(name, {}).get(statistic)
        if value is None:
            yield f"{name}.{statistic} is missing"
        elif not torch.isfinite(value).all():
            yield f"{name}.{statistic} is not finite"
        elif tuple(value.shape) not in _shapes(feature):
            yield f"{name}.{statistic} has shape {list(value.shape)}, for a feature of {list(feature.shape)}"
        else:
            found.append(value)
    if len(found) == 2:
        yield from _spread(name, mode, *found)


def _shapes(feature: Any) -> set[tuple[int, ...]]:
    """A statistic has its feature's shape; those of images may be one per channel."""
    shape = tuple(feature.shape)
    return {shape, (shape[0], 1, 1)} if _value(feature.type) == "VISUAL" else {shape}


def _spread(name: str, mode: str, first: Tensor, second: Tensor) -> Iterator[str]:
    """No spread is negative, and not all are zero. A zero among others is data's own: a joint that never moved."""
    spread = second if mode == "MEAN_STD" else second - first
    low, high = STATISTICS[mode]
    said = f"{name}.{high}" if mode == "MEAN_STD" else f"{name}.{high} - {name}.{low}"
    if bool((spread < 0).any()):
        yield f"{said} is negative"
    elif not bool((spread > 0).any()):
        yield f"{said} is zero throughout"


def _value(named: Any) -> str:
    """The text of one of LeRobot's enumerations, or the text itself."""
    return str(getattr(named, "value", named))


def _some(names: list[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
