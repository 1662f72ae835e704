"""Train LeRobot's ACT or Diffusion on a LeRobotDataset v3 on disk, with LeRobot's own parts.

Policy, processors, optimiser, schedule, sampler, step and files are LeRobot's. Only the loop is ours: LeRobot's script
reads the process's arguments, takes over its logging, and reads small sets slowly (see :mod:`.train_rows`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from pydantic import Field

from omni_loop.config import Count, Section, load, validate
from omni_loop.errors import ConfigError, UnknownName, nearest
from omni_loop.record.features import ACTION, OBSERVATION, feature_of
from omni_loop.record.quiet import quiet
from omni_loop.registry import missing_extra
from omni_loop.training.rollouts import Wanted

from .train_card import Trained, write_card
from .train_data import check_rows, check_statistics, dataset_info, local_only
from .train_folder import made_beside, plain_name
from .train_rows import Rows, whole

Kind = Literal["act", "diffusion"]
# For what a small machine can train. Images make the net wider; what a recipe says comes last.
_SIZES: Mapping[Kind, Mapping[str, Any]] = {
    "act": {
        "chunk_size": 10, "n_action_steps": 5, "dim_model": 128, "n_heads": 4, "dim_feedforward": 512,
        "n_encoder_layers": 2, "n_decoder_layers": 1, "n_vae_encoder_layers": 2, "latent_dim": 16, "kl_weight": 1.0,
    },
    "diffusion": {
        "horizon": 16, "n_action_steps": 8, "down_dims": (64, 128, 256), "diffusion_step_embed_dim": 64,
        "noise_scheduler_type": "DDIM", "num_inference_steps": 10,
    },
}  # fmt: skip
_WITH_IMAGES: Mapping[Kind, Mapping[str, Any]] = {
    "act": {"dim_model": 256, "dim_feedforward": 1024},
    "diffusion": {"down_dims": (128, 256, 512), "diffusion_step_embed_dim": 128},
}


class LeRobotRecipe(Section):
    """How a policy is trained. ``policy`` are fields of LeRobot's own configuration of that type, instead of sizes
    chosen by what the dataset holds. ``keys`` are the observations the policy reads; None: all of the dataset's."""

    type: Kind
    steps: Count
    seed: Annotated[int, Field(ge=0)] = 0
    threads: Count = 1
    device: str = "cpu"
    batch: Count = 64
    lr: Annotated[float, Field(gt=0)] = 5e-4
    weight_decay: Annotated[float, Field(ge=0)] = 1e-4
    warmup: Annotated[int, Field(ge=0)] = 100  # steps; then the rate falls by a cosine to 0
    clip: Annotated[float, Field(ge=0)] = 1.0  # norm of the gradient; 0: none
    held_out: Annotated[float, Field(ge=0, lt=1)] = 0.04  # of the episodes, the last; a single one is not held out
    keys: tuple[str, ...] | None = None
    policy: Mapping[str, Any] = Field(default_factory=dict)


def train_from(data: Path, out: Path, wanted: Wanted, log: Callable[[str], None]) -> Path:
    """As :class:`omni_loop.training.rollouts.RolloutTrainer`: the recipe is the shipped one of the type, or a file."""
    if wanted.name is not None:
        plain_name(wanted.name)
    kind = wanted.type or "act"
    if wanted.recipe is None and kind not in get_args(Kind):
        raise UnknownName(f"no LeRobot policy of type {kind!r} is trained here.{nearest(kind, get_args(Kind))}")
    recipe = load(LeRobotRecipe, wanted.recipe or f"lerobot-{kind}", "train")
    if wanted.type is not None and wanted.type != recipe.type:
        raise ConfigError(f"--type {wanted.type}, but the recipe says type {recipe.type}")
    chosen = {"steps": wanted.steps, "seed": wanted.seed, "threads": wanted.threads, "keys": wanted.keys or None}
    given = {field: value for field, value in chosen.items() if value is not None}
    recipe = validate(LeRobotRecipe, recipe.model_dump(mode="json") | given, "--steps, --seed, --threads, --keys")
    folder = out / (wanted.name or f"lerobot-{recipe.type}")
    trained = train(data, recipe, folder, log)
    unseen = "" if trained.held_out_loss is None else f", held out {trained.held_out_loss:.4f}"
    log(f"loss {trained.losses[-1]:.4f}{unseen}; {trained.parameters:,} parameters")
    return folder


def train(data: Path, recipe: LeRobotRecipe, folder: Path, log: Callable[[str], None] = lambda text: None) -> Trained:
    """Train on the dataset in ``data`` and write the checkpoint with its card to ``folder``, which must not exist.

    The checkpoint is LeRobot's own (``config.json``, ``model.safetensors``, the processors, ``train_config.json``) and
    is what the template ``lerobot`` serves.

    Raises:
        ConfigError: no LeRobotDataset v3 at ``data``, or a damaged one; ``folder`` exists; the recipe does not fit the
            dataset; the loss is not finite.
        MissingExtra: lerobot is not installed.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists; name another --out, or remove it")
    data = data.resolve()
    info = dataset_info(data)
    with quiet():
        return _train(data, info, recipe, folder, log)


def _train(
    data: Path, info: dict[str, Any], recipe: LeRobotRecipe, folder: Path, log: Callable[[str], None]
) -> Trained:
    try:
        import lerobot.scripts.lerobot_train  # noqa: F401  all that is needed, before anything is read
    except ModuleNotFoundError as e:
        raise missing_extra(e, "training a LeRobot policy ") from e
    torch.set_num_threads(recipe.threads)
    config = _configure(data, info, recipe)
    check_rows(data, info, {**config.policy.input_features, **config.policy.output_features})
    check_statistics(data, config.policy)
    with made_beside(folder) as partial:
        trained = _run(config, recipe, partial, log)
        _forget_paths(partial, folder.name, data.name)
        write_card(partial, trained, recipe.model_dump(mode="json"), info, folder.name, data.name)
    return trained


def _configure(data: Path, info: Mapping[str, Any], recipe: LeRobotRecipe) -> Any:
    """LeRobot's configuration of the whole run."""
    from lerobot.configs.default import DatasetConfig
    from lerobot.configs.train import TrainPipelineConfig
    from lerobot.optim.optimizers import AdamWConfig
    from lerobot.optim.schedulers import DiffuserSchedulerConfig

    enough = int(info["total_episodes"]) > 1
    name = f"omni_loop/{data.name}"
    return TrainPipelineConfig(
        dataset=DatasetConfig(repo_id=name, root=str(data), eval_split=recipe.held_out if enough else 0.0),
        policy=_policy(info, recipe),
        seed=recipe.seed,
        num_workers=0,
        batch_size=recipe.batch,
        steps=recipe.steps,
        env_eval_freq=0,
        use_policy_training_preset=False,
        optimizer=AdamWConfig(lr=recipe.lr, weight_decay=recipe.weight_decay, grad_clip_norm=recipe.clip),
        scheduler=DiffuserSchedulerConfig(name="cosine", num_warmup_steps=recipe.warmup),
    )


def _policy(info: Mapping[str, Any], recipe: LeRobotRecipe) -> Any:
    """The policy's configuration: its features by the dataset, its sizes by what they are and the recipe."""
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
    from lerobot.utils.feature_utils import dataset_to_policy_features

    try:
        features = dataset_to_policy_features(dict(info["features"]))
    except (KeyError, IndexError, TypeError, ValueError) as e:
        raise ConfigError(f"the dataset has a feature that LeRobot does not read: {type(e).__name__}: {e}") from e
    if ACTION not in features:
        raise ConfigError("the dataset has no feature 'action': there is nothing to learn")
    inputs = {name: feature for name, feature in features.items() if name.startswith(OBSERVATION)}
    if recipe.keys is not None:
        for key in recipe.keys:
            if feature_of(key) not in inputs:
                known = [name.removeprefix(OBSERVATION) for name in inputs]
                raise ConfigError(f"keys: the dataset has no observation {key!r}.{nearest(key, known)}")
        inputs = {feature_of(key): inputs[feature_of(key)] for key in recipe.keys}
    _check_ranks(recipe.type, {**inputs, ACTION: features[ACTION]})
    kind: Any = {"act": ACTConfig, "diffusion": DiffusionConfig}[recipe.type]
    known = [field.name for field in dataclasses.fields(kind)]
    for field in recipe.policy:
        if field not in known:
            raise ConfigError(f"policy: LeRobot's {recipe.type} has no {field!r}.{nearest(field, known)}")
    images = any(feature.type.value == "VISUAL" for feature in inputs.values())
    chosen = {**_SIZES[recipe.type], **(_WITH_IMAGES[recipe.type] if images else {}), **recipe.policy}
    if recipe.type == "diffusion":  # so many rows at an episode's end that no chunk is mostly padding
        observed = int(chosen.get("n_obs_steps", 2))
        chosen.setdefault("drop_n_last_frames", chosen["horizon"] - chosen["n_action_steps"] - observed + 1)
    fixed = {"input_features": inputs, "output_features": {ACTION: features[ACTION]}, "push_to_hub": False}
    try:
        # Weights from the hub only where the recipe names them.
        config = kind(**{"pretrained_backbone_weights": None, **chosen, **fixed, "device": recipe.device})
        config.validate_features()
    except (TypeError, ValueError, NotImplementedError) as e:
        raise ConfigError(f"LeRobot's {recipe.type} on {', '.join(inputs) or 'no observation'}: {e}") from e
    return config


def _check_ranks(kind: Kind, features: Mapping[str, Any]) -> None:
    """Raises ConfigError naming every feature of a rank that LeRobot's policies do not read."""
    odd = [
        f"{name} {list(feature.shape)}"
        for name, feature in features.items()
        if feature.type.value != "VISUAL" and len(feature.shape) != 1
    ]
    if odd:
        way = "leave it out with --keys, or make vectors of it, as `omni-loop export` does"
        raise ConfigError(f"LeRobot's {kind} reads vectors and images, not {', '.join(odd)}: {way}")


def _run(config: Any, recipe: LeRobotRecipe, folder: Path, log: Callable[[str], None]) -> Trained:
    """LeRobot's training steps; writes what LeRobot writes."""
    from accelerate import Accelerator
    from lerobot.datasets.factory import make_train_eval_datasets
    from lerobot.optim.factory import make_optimizer_and_scheduler
    from lerobot.policies import make_policy, make_pre_post_processors
    from lerobot.scripts.lerobot_train import update_policy
    from lerobot.utils.logging_utils import AverageMeter, MetricsTracker
    from lerobot.utils.random_utils import set_seed
    from lerobot.utils.utils import cycle

    accelerator = Accelerator(step_scheduler_with_optimizer=False, cpu=recipe.device == "cpu")
    set_seed(recipe.seed)
    with local_only(config.dataset.root):
        dataset, held_out = make_train_eval_datasets(config)
        batches = cycle(_loader(dataset, config, shuffled=True))
    policy = make_policy(cfg=config.policy, ds_meta=dataset.meta)
    pre, post = make_pre_post_processors(config.policy, dataset_stats=dataset.meta.stats)
    optimiser, schedule = make_optimizer_and_scheduler(config, policy)
    meters = {name: AverageMeter(name) for name in ("loss", "grad_norm", "lr", "update_s")}
    tracker = MetricsTracker(recipe.batch, dataset.num_frames, dataset.num_episodes, meters, accelerator=accelerator)
    began, cpu, losses = time.monotonic(), time.process_time(), []
    for step in range(1, recipe.steps + 1):
        batch = pre(_floats(next(batches), dataset.meta.camera_keys))
        tracker, _ = update_policy(
            tracker, policy, batch, optimiser, recipe.clip, accelerator=accelerator, lr_scheduler=schedule
        )
        losses.append(_finite(float(tracker.metrics["loss"].val), f"the loss of step {step}"))
        if step % max(1, recipe.steps // 20) == 0:
            recent = losses[-max(1, recipe.steps // 20) :]
            log(f"step {step}/{recipe.steps} loss {sum(recent) / len(recent):.4f}")
    spent = {"wall_minutes": (time.monotonic() - began) / 60, "cpu_minutes": (time.process_time() - cpu) / 60}
    policy.eval()
    unseen = None if held_out is None else _loss(policy, pre, _loader(held_out, config), dataset.meta.camera_keys)
    if unseen is not None:
        _finite(unseen, "the loss on the held-out episodes")
    if not all(bool(torch.isfinite(p).all()) for p in policy.parameters()):
        raise ConfigError("the weights are not finite after the last step; lower lr, or set clip")
    for part in (policy, config, pre, post):
        part.save_pretrained(folder)
    return Trained(
        type=recipe.type,
        losses=tuple(losses),
        held_out_loss=unseen,
        episodes=int(dataset.num_episodes),
        held_out_episodes=0 if held_out is None else int(held_out.num_episodes),
        rows=int(dataset.num_frames),
        parameters=sum(p.numel() for p in policy.parameters()),
        inputs={name: tuple(feature.shape) for name, feature in config.policy.input_features.items()},
        spent={name: round(minutes, 2) for name, minutes in spent.items()},
    )


def _finite(loss: float, what: str) -> float:
    if not math.isfinite(loss):
        raise ConfigError(f"{what} is {loss}: nothing was written; lower lr, or set clip")
    return loss


def _loader(dataset: Any, config: Any, shuffled: bool = False) -> Any:
    """Batches of ``dataset``, in LeRobot's order."""
    from lerobot.datasets import EpisodeAwareSampler
    from lerobot.datasets.factory import resolve_delta_timestamps

    episodes = dataset.meta.episodes
    sampler = EpisodeAwareSampler(
        episodes["dataset_from_index"],
        episodes["dataset_to_index"],
        episode_indices_to_use=dataset.episodes,
        drop_n_last_frames=getattr(config.policy, "drop_n_last_frames", 0),
        shuffle=shuffled,
        seed=config.seed,
        absolute_to_relative_idx=dataset.absolute_to_relative_idx,
    )
    if dataset.meta.camera_keys:
        return torch.utils.data.DataLoader(dataset, batch_size=config.batch_size, sampler=sampler)
    deltas = resolve_delta_timestamps(config.policy, dataset.meta) or {}
    rows = Rows(dataset, {name: [round(t * dataset.meta.fps) for t in around] for name, around in deltas.items()})
    return torch.utils.data.DataLoader(rows, batch_size=config.batch_size, sampler=sampler, collate_fn=whole)


def _floats(batch: dict[str, Any], cameras: list[str]) -> dict[str, Any]:
    """Images as LeRobot's policies take them: 0..1."""
    for key in cameras:
        if key in batch and batch[key].dtype == torch.uint8:
            batch[key] = batch[key].float() / 255
    return batch


@torch.no_grad()
def _loss(policy: Any, pre: Any, loader: Any, cameras: list[str]) -> float:
    """Mean loss over all batches of ``loader``."""
    losses = [float(policy.forward(pre(_floats(batch, cameras)))[0]) for batch in loader]
    return sum(losses) / len(losses)


def _forget_paths(folder: Path, name: str, data: str) -> None:
    """A checkpoint travels: its ``train_config.json`` names no place on this machine."""
    file = folder / "train_config.json"
    config = json.loads(file.read_text())
    config["dataset"]["root"], config["output_dir"], config["job_name"] = data, name, name
    file.write_text(json.dumps(config, indent=4) + "\n")
