"""LeRobot policies behind a runner: what sharing forward passes between sessions gains, and that it changes nothing.

The policies are made here, with random weights: LeRobot's ACT in the size that is trained on FetchPickAndPlace from
state, and one with a camera of 96 x 96. What they compute is meaningless; how long they take is not.
"""

from __future__ import annotations

import io
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from omni_loop.connect.base import as_numpy
from omni_loop.messages import PayloadKind
from omni_loop.stage import Payload
from omni_loop.types import Array, Op
from omni_loop_policies.lerobot.stage import LeRobotStage

from .rows import Bar, Bench, Measured, Settings
from .sessions import Sessions, one_thread

SESSIONS = 8
ACTION_DIM = 4
STATE = ("STATE", (28,))
SIZE = {
    "chunk_size": 10,
    "n_action_steps": 5,
    "dim_model": 128,
    "n_heads": 4,
    "dim_feedforward": 512,
    "n_encoder_layers": 2,
    "n_decoder_layers": 1,
    "n_vae_encoder_layers": 2,
    "latent_dim": 16,
    "pretrained_backbone_weights": None,
}
INPUTS: Mapping[str, Mapping[str, Any]] = {
    "state": {"observation.environment_state": ("ENV", (28,)), "observation.state": STATE},
    "image": {"observation.image": ("VISUAL", (3, 96, 96)), "observation.state": STATE},
}


class Plain:
    """The policy as LeRobot's documentation has it: preprocess, predict, postprocess, one observation at a time."""

    def __init__(self, folder: Path) -> None:
        from lerobot.configs import PreTrainedConfig
        from lerobot.policies import get_policy_class, make_pre_post_processors

        config = PreTrainedConfig.from_pretrained(folder)
        with redirect_stdout(io.StringIO()):  # it says that it loads
            self._policy: Any = get_policy_class(config.type).from_pretrained(folder, config=config)
        self._pre, self._post = make_pre_post_processors(self._policy.config, pretrained_path=str(folder))

    def chunk(self, arrays: Mapping[str, Array]) -> Array:
        made: Array = self._post(self._policy.predict_action_chunk(self._prepared(arrays))).numpy()[0]
        return made

    def forward_s(self, arrays: Mapping[str, Array]) -> float:
        """Seconds of the forward pass alone."""
        batch = self._prepared(arrays)
        begin = time.perf_counter()
        self._policy.predict_action_chunk(batch)
        return time.perf_counter() - begin

    def _prepared(self, arrays: Mapping[str, Array]) -> Any:
        from lerobot.policies import prepare_observation_for_inference

        named = {f"observation.{key}": array.copy() for key, array in arrays.items()}
        return self._pre(prepare_observation_for_inference(named, torch.device("cpu"), ""))


class Act:
    """The same observations through a runner, eight sessions together, and one after the other through LeRobot."""

    def __init__(self, folder: Path, inputs: Mapping[str, Any], rounds: int) -> None:
        save(folder, inputs)
        self._plain = Plain(folder)
        stage = LeRobotStage(str(folder))
        stage.warm_up()
        self._many, self._one = Sessions(stage, SESSIONS), Sessions(stage, 1)
        self._rng, self._inputs, self._rounds = np.random.default_rng(0), inputs, rounds
        self._tick = 0

    def chunks_per_second(self) -> Measured:
        """Medians of interleaved rounds, of this thread's CPU time."""
        ours, theirs = [], []
        for n in range(3 + self._rounds):
            scenes = [self._scene() for _ in range(SESSIONS)]
            begin = time.thread_time()
            self._together(scenes)
            between = time.thread_time()
            for scene in scenes:
                self._plain.chunk(scene)
            end = time.thread_time()
            if n >= 3:  # first calls take longer
                ours.append(between - begin)
                theirs.append(end - between)
        return Measured(SESSIONS / median(ours), SESSIONS / median(theirs))

    def apart(self) -> float:
        """By how much a chunk of a batch differs at most from LeRobot's own of that observation, and from one alone."""
        scenes = [self._scene() for _ in range(SESSIONS)]
        together = self._together(scenes)
        worst = 0.0
        for scene, chunk in zip(scenes, together, strict=True):
            (alone,) = self._one.tick(self._next(), Op.INFER, [_observed(scene)])
            single = as_numpy(alone["chunk"].arrays["actions"])
            worst = max(worst, *(float(np.abs(chunk - other).max()) for other in (single, self._plain.chunk(scene))))
        return worst

    def _together(self, scenes: list[Mapping[str, Array]]) -> list[Array]:
        made = self._many.tick(self._next(), Op.INFER, [_observed(scene) for scene in scenes])
        return [as_numpy(outputs["chunk"].arrays["actions"]) for outputs in made]

    def _next(self) -> int:
        self._tick += 1
        return self._tick

    def _scene(self) -> Mapping[str, Array]:
        scene: dict[str, Array] = {}
        for name, (kind, shape) in self._inputs.items():
            image = self._rng.integers(0, 256, (*shape[1:], 3), np.uint8) if kind == "VISUAL" else None
            vector = self._rng.normal(size=shape).astype(np.float32)
            scene[name.removeprefix("observation.")] = vector if image is None else image
        return scene


def _observed(scene: Mapping[str, Array]) -> Mapping[str, Payload]:
    return {"observation": Payload(PayloadKind.OBSERVATION, scene)}


def save(folder: Path, inputs: Mapping[str, Any]) -> None:
    """An ACT of random weights as LeRobot's training saves it."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies import get_policy_class, make_policy_config, make_pre_post_processors

    features = {name: PolicyFeature(FeatureType(kind), shape) for name, (kind, shape) in inputs.items()}
    action = {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}
    config = make_policy_config("act", input_features=features, output_features=action, device="cpu", **SIZE)
    torch.manual_seed(0)
    get_policy_class("act")(config).save_pretrained(folder)
    shapes = {
        name: (3, 1, 1) if f.type is FeatureType.VISUAL else f.shape for name, f in {**features, **action}.items()
    }
    statistics = {name: {"mean": torch.zeros(s), "std": torch.ones(s)} for name, s in shapes.items()}
    for processors in make_pre_post_processors(config, dataset_stats=statistics):
        processors.save_pretrained(folder)


class LeRobot:
    def __init__(self, settings: Settings, folder: Path) -> None:
        self._rounds, self._folder = (2 if settings.quick else 40), folder

    @cached_property
    def state(self) -> Act:
        return Act(self._folder / "state", INPUTS["state"], self._rounds)

    @cached_property
    def image(self) -> Act:
        return Act(self._folder / "image", INPUTS["image"], max(2, self._rounds // 4))


@contextmanager
def _subject(settings: Settings) -> Iterator[LeRobot]:
    with one_thread(), torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        yield LeRobot(settings, Path(folder))


BENCH: Bench[LeRobot] = Bench("lerobot", _subject)


@BENCH.row("chunks/CPU s", Bar("ratio", ">=", 2.5))
def act_8_sessions(lerobot: LeRobot) -> Measured:
    """LeRobot's ACT from state: 8 sessions through a runner, against 8 calls of the policy one after the other."""
    return lerobot.state.chunks_per_second()


@BENCH.row("action units", Bar("ours", "<=", 1e-5))
def act_apart(lerobot: LeRobot) -> Measured:
    """By how much a chunk of the batch differs at most from the same one alone, and from LeRobot's own."""
    return Measured(lerobot.state.apart())


@BENCH.row("chunks/CPU s")
def act_image_8_sessions(lerobot: LeRobot) -> Measured:
    """As act_8_sessions, from a camera of 96 x 96 through a ResNet-18."""
    return lerobot.image.chunks_per_second()


@BENCH.row("action units", Bar("ours", "<=", 1e-5))
def act_image_apart(lerobot: LeRobot) -> Measured:
    """As act_apart, from the camera."""
    return Measured(lerobot.image.apart())
