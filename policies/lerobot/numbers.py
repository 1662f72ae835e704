"""Numbers that a checkpoint's files or a deployment give: of their type, finite and in range, or refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from omni_loop.errors import CheckpointError, ConfigError

MOST_STEPS, MOST_WIDE, MOST_HZ = 4096, 1 << 16, 10_000.0
_MOST_DENOISING = 1000  # where a checkpoint does not say how many it was trained with
_COUNTS = {
    "n_obs_steps": MOST_STEPS,
    "n_action_steps": MOST_STEPS,
    "n_action_repeats": MOST_STEPS,
    "chunk_size": MOST_STEPS,
    "horizon": MOST_STEPS,
    "action_chunk_size": MOST_STEPS,
    "action_horizon": MOST_STEPS,
    "max_action_dim": MOST_WIDE,
    "max_state_dim": MOST_WIDE,
}
_STEPS = ("num_inference_steps", "num_steps", "num_integration_steps")
# Settings that name a model of somebody else's: a folder or a hub id.
MODELS = ("vlm_model_name", "vision_encoder_name", "text_encoder_name")


def check_settings(where: str, settings: Mapping[str, Any]) -> None:
    """The counts that serving reads of ``config.json``.

    Raises:
        CheckpointError: one is no whole number, or out of range; ``where`` is the file.
    """
    for name, most in _COUNTS.items():
        if name in settings and not is_count(settings[name], most):
            raise CheckpointError(f"{where}: {name} is {settings[name]!r:.40}; it must be a whole number, 1..{most}")
    coefficient = settings.get("temporal_ensemble_coeff")
    if coefficient is not None and not (_is_number(coefficient) and _decays(coefficient)):
        text = f"temporal_ensemble_coeff is {coefficient!r:.40}; it must be a number, {_DECAYS}"
        raise CheckpointError(f"{where}: {text}")


def shape_of(given: Any) -> tuple[int, ...]:
    """A feature's shape as LeRobot writes it. Raises ValueError for anything else."""
    if not isinstance(given, list) or not 1 <= len(given) <= 4 or not all(is_count(d, MOST_WIDE) for d in given):
        raise ValueError(f"its shape is {given!r:.60}; it must be a list of 1..4 whole numbers, each 1..{MOST_WIDE}")
    return tuple(given)


def control_rate(where: str, given: Any) -> float | None:
    """``control_hz`` of a card; None where it says none. Raises CheckpointError for one that no robot has."""
    if given is None:
        return None
    if not _is_number(given) or not 0 < given <= MOST_HZ:
        text = f"control_hz is {given!r:.40}; it must be a number above 0, at most {MOST_HZ:g}"
        raise CheckpointError(f"{where}: {text}")
    return float(given)


def is_count(value: Any, most: int) -> bool:
    return type(value) is int and 1 <= value <= most


def check_options(
    type_: str, settings: Mapping[str, Any], *, ensemble_decay: float, inference_steps: int, vlm: str
) -> None:
    """What can be known of a stage's options before LeRobot is imported. Raises ConfigError with all that is wrong."""
    if problems := [*_problems(type_, settings, ensemble_decay, inference_steps, vlm)]:
        raise ConfigError("; ".join(problems))


def _problems(
    type_: str, settings: Mapping[str, Any], ensemble_decay: float, inference_steps: int, vlm: str
) -> Iterator[str]:
    if not _decays(ensemble_decay):
        yield f"ensemble_decay is {ensemble_decay!r:.40}; it must be {_DECAYS}"
    trained = settings.get("num_train_timesteps")
    most = trained if isinstance(trained, int) and is_count(trained, 1 << 20) else _MOST_DENOISING
    if not 0 <= inference_steps <= most:
        yield f"inference_steps is {inference_steps}; it must be 1..{most}, or 0 for the checkpoint's"
    if inference_steps and not _has(settings, _STEPS):
        yield f"LeRobot's {type_} has none of the settings {', '.join(_STEPS)} (option 'inference_steps')"
    if vlm and not _has(settings, MODELS):
        yield f"LeRobot's {type_} is made without a model of somebody else's (option 'vlm')"


def _has(settings: Mapping[str, Any], names: Iterable[str]) -> bool:
    return any(name in settings for name in names)


_DECAYS = "-0.1..100"  # of chunks of MOST_STEPS, exp(-decay * rank) is a finite double


def _decays(value: float) -> bool:
    return -0.1 <= value <= 100


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and (type(value) is int or math.isfinite(value))
