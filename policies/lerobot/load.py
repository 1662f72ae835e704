"""Loading a LeRobot checkpoint so that it computes what it was trained to: all weights, all statistics, or nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from omni_loop.errors import CheckpointError, ConfigError, OmniLoopError
from omni_loop.registry import missing_extra

from .checkpoint import (
    POSTPROCESSOR,
    PREPROCESSOR,
    Described,
    check_tokenizer,
    describe,
    locate,
    processor_steps,
    revision,
    verify_files,
)
from .families import Family, chunk_length, family_of
from .numbers import MODELS, check_options
from .verify import check_statistics, check_weights

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Options:
    """What a deployment may choose; see :func:`.template.lerobot`."""

    rtc: bool = False
    inference_steps: int = 0
    tokenizer: str = ""
    vlm: str = ""
    ensemble_decay: float = 0.01


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
    check_options(
        described.type,
        described.settings,
        ensemble_decay=options.ensemble_decay,
        inference_steps=options.inference_steps,
        vlm=options.vlm,
    )
    folder = locate(checkpoint)
    verify_files(folder)
    check_tokenizer(folder, options.tokenizer)
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
    check_weights(folder, policy)
    check_statistics(folder, policy.config, family, pre, post)
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
    _check_code(folder)
    pre, post = make_pre_post_processors(
        policy.config, pretrained_path=str(folder), preprocessor_overrides=_overrides(folder, device, options)
    )
    return policy, pre, post


def _check_code(folder: Path) -> None:
    """A step named by its class is one of LeRobot's: whatever is named would be called.

    Raises:
        CheckpointError: it is something else.
    """
    from lerobot.processor import ProcessorStep

    for name in (PREPROCESSOR, POSTPROCESSOR):
        for step in processor_steps(folder, name):
            if "registry_name" in step:
                continue  # only what was registered by code that is running
            module, _, attribute = step["class"].rpartition(".")
            found = getattr(import_module(module), attribute, None)
            if not (isinstance(found, type) and issubclass(found, ProcessorStep) and found.__module__ == module):
                raise CheckpointError(f"{folder.name}/{name}: {step['class']!r:.80} is no processor step of LeRobot")


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
    named = [name for name in MODELS if isinstance(getattr(config, name, None), str)]
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
    named = {step.get("registry_name"): step.get("config", {}) for step in processor_steps(folder, PREPROCESSOR)}
    overrides: dict[str, Any] = {}
    if "device_processor" in named:
        overrides["device_processor"] = {"device": device}
    if "tokenizer_processor" in named:
        wanted = options.tokenizer or options.vlm or named["tokenizer_processor"].get("tokenizer_name", "")
        overrides["tokenizer_processor"] = {"tokenizer_name": _inside(folder, wanted)}
    return overrides


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
