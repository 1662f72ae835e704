"""Checkpoints that would be served as something else than what was trained, and files that are no checkpoint's."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from omni_loop.cli.check_config import check_config
from omni_loop.errors import CheckpointError, ConfigError
from omni_loop_policies.lerobot.load import load
from omni_loop_policies.lerobot.stage import LeRobotStage
from omni_loop_policies.lerobot.template import lerobot

pytest.importorskip("lerobot")
pytestmark = pytest.mark.timeout(300)
Checkpoints = Callable[..., Path]
PRE, POST, CONFIG = "policy_preprocessor.json", "policy_postprocessor.json", "config.json"
NORMALISER = "policy_preprocessor_step_3_normalizer_processor.safetensors"
UNNORMALISER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"
IDENTITY = {"STATE": "IDENTITY", "VISUAL": "IDENTITY", "ACTION": "IDENTITY"}
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy of an ACT checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoints("act"), tmp_path / "mine"))


def change_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def change_tensors(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load(str(folder))
    for word in words:
        assert word in error.value.text, error.value.text


def step_config(index: int, **changed: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["steps"][index]["config"].update(changed)


class TestNormalisation:
    @pytest.mark.parametrize(
        ("file", "change", "says"),
        [
            (POST, step_config(0, norm_map=IDENTITY), "action is normalised as IDENTITY"),
            (POST, step_config(0, norm_map={"ACTION": "MIN_MAX"}), "action is normalised as MIN_MAX"),
            (PRE, step_config(3, norm_map=IDENTITY), "observation.state is normalised as IDENTITY"),
            (PRE, step_config(3, normalize_observation_keys=[]), "observation.state is normalised by no step"),
            (PRE, lambda d: d["steps"].append(d["steps"][3]), "observation.state is normalised by 2 steps"),
            (POST, lambda d: d["steps"].append(d["steps"][0]), "action is normalised by 2 steps"),
            (POST, lambda d: d["steps"].pop(0), "action is normalised by no step"),
            (PRE, step_config(3, eps=1e9), "eps is 1e+09"),
            (
                PRE,
                lambda d: d["steps"].append({**d["steps"][3], "registry_name": "unnormalizer_processor"}),
                "UnnormalizerProcessorStep, which belongs into the other one",
            ),
        ],
    )
    def test_steps_do_what_the_policy_was_trained_with(
        self, folder: Path, file: str, change: Callable[[dict[str, Any]], None], says: str
    ) -> None:
        change_json(folder / file, change)
        refused(folder, says)

    @pytest.mark.parametrize(
        ("file", "name", "change", "says"),
        [
            (NORMALISER, "observation.state.mean", lambda t: t[:1], "has shape [1], for a feature of [4]"),
            (NORMALISER, "observation.state.std", lambda t: t[0], "has shape [], for a feature of [4]"),
            (UNNORMALISER, "action.std", lambda t: -t, "action.std is negative"),
            (UNNORMALISER, "action.std", lambda t: t * 0, "action.std is zero throughout"),
        ],
    )
    def test_statistics_are_of_their_feature(
        self, folder: Path, file: str, name: str, change: Callable[[Any], Any], says: str
    ) -> None:
        change_tensors(folder / file, lambda t: t.update({name: change(t[name]).clone().contiguous()}))
        refused(folder, name, says)

    def test_a_joint_that_never_moved_is_served(self, folder: Path) -> None:
        change_tensors(folder / NORMALISER, lambda t: t["observation.state.std"][:1].zero_())
        assert load(str(folder)).horizon == 6

    def test_a_range_the_wrong_way_round(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(checkpoints("ddim"), tmp_path / "mine"))
        change_tensors(folder / UNNORMALISER, lambda t: t.update({"action.max": t["action.min"] - 1}))
        refused(folder, "action.max - action.min is negative")


class TestWeights:
    def test_a_smaller_policy_than_the_file_holds(self, checkpoints: Checkpoints, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(checkpoints("act", n_encoder_layers=2), tmp_path / "mine"))
        change_json(folder / CONFIG, lambda c: c.update(n_encoder_layers=1))
        refused(folder, "tensors that the policy of its config.json does not have", "model.encoder.layers.1.")

    def test_the_encoder_of_the_vae_may_be_left_out(self, folder: Path) -> None:
        """Only ACT's training runs it."""
        change_json(folder / CONFIG, lambda c: c.update(use_vae=False))
        LeRobotStage(str(folder)).warm_up()

    def test_values_that_are_not_finite_are_said_to_be(self, folder: Path) -> None:
        change_tensors(folder / "model.safetensors", lambda t: t["model.action_head.bias"].fill_(NAN))
        refused(folder, "'model.action_head.bias' holds values that are not finite")


class TestOptions:
    @pytest.mark.parametrize("steps", [-3, 11])
    def test_denoising_steps_out_of_range(self, checkpoints: Checkpoints, steps: int) -> None:
        folder = str(checkpoints("ddim"))
        with pytest.raises(ConfigError, match=rf"inference_steps is {steps}; it must be 1\.\.10"):
            lerobot("mine", folder, inference_steps=steps)
        with pytest.raises(ConfigError, match="inference_steps"):
            LeRobotStage(folder, inference_steps=steps)

    def test_options_of_the_stage_are_checked_before_a_start(self, tmp_path: Path) -> None:
        """As ``check config`` does, which loads nothing."""
        file, out = tmp_path / "mine.yaml", io.StringIO()
        named = "pipelines: [{name: mine, template: lerobot, options: {checkpoint: fetch-act}}]\n"
        file.write_text(named + "stage_options: {lerobot: {inference_steps: -3}}")
        assert not check_config([str(file)], Console(file=out, width=400))
        assert "bad  options of mine/act: inference_steps is -3" in out.getvalue()

    @pytest.mark.parametrize("decay", [NAN, INF, -5.0])
    def test_a_decay_without_a_mean(self, folder: Path, decay: float) -> None:
        with pytest.raises(ConfigError, match="ensemble_decay"):
            lerobot("mine", str(folder), ensemble=True, ensemble_decay=decay)
        with pytest.raises(ConfigError, match="ensemble_decay"):
            LeRobotStage(str(folder), ensemble=True, ensemble_decay=decay)

    @pytest.mark.parametrize("options", [{"inference_steps": 2}, {"vlm": "x"}, {"tokenizer": "x"}])
    def test_options_that_the_type_does_not_take(self, folder: Path, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options))):
            lerobot("mine", str(folder), **options)

    @pytest.mark.parametrize("rate", [NAN, INF, 1e9])
    def test_control_rates(self, folder: Path, rate: float) -> None:
        with pytest.raises(ConfigError, match="control_hz"):
            lerobot("mine", str(folder), control_hz=rate)


@pytest.mark.parametrize(
    "setting",
    [
        {"chunk_size": 0},
        {"chunk_size": -5},
        {"chunk_size": 10**12},
        {"chunk_size": True},
        {"n_action_steps": 0},
        {"n_action_steps": "x"},
        {"n_obs_steps": "abc"},
        {"temporal_ensemble_coeff": NAN},
        {"temporal_ensemble_coeff": "x"},
    ],
)
def test_numbers_of_the_configuration(folder: Path, setting: Mapping[str, Any]) -> None:
    change_json(folder / CONFIG, lambda c: c.update(setting))
    with pytest.raises(CheckpointError, match=f"config.json: {next(iter(setting))} is"):
        lerobot("mine", str(folder))


@pytest.mark.parametrize("shape", [[-4], [0], [10**15], "44", [True], []])
def test_shapes_of_the_configuration(folder: Path, shape: Any) -> None:
    change_json(folder / CONFIG, lambda c: c["input_features"]["observation.state"].update(shape=shape))
    with pytest.raises(CheckpointError, match=r"observation\.state"):
        lerobot("mine", str(folder))


@pytest.mark.parametrize("rate", ["NaN", "Infinity", "true", "-1", '"x"', "1" + "0" * 400])
def test_the_rate_of_a_card(folder: Path, rate: str) -> None:
    (folder / "card.json").write_text(f'{{"control_hz": {rate}}}')
    with pytest.raises(CheckpointError, match=r"card\.json: control_hz is"):
        lerobot("mine", str(folder))


class TestProcessorFiles:
    def test_no_function_is_called_as_a_step(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        import lerobot.processor.converters
        import lerobot.utils.utils

        called: list[Any] = []
        monkeypatch.setattr(lerobot.utils.utils, "say", lambda *a, **k: called.append(k))
        monkeypatch.setattr(lerobot.processor.converters, "to_tensor", lambda *a, **k: called.append(k))
        for name in ("lerobot.utils.utils.say", "lerobot.processor.converters.to_tensor"):
            change_json(
                folder / PRE, lambda d, name=name: d["steps"].insert(0, {"class": name, "config": {"text": "x"}})
            )
            refused(folder, name)
            change_json(folder / PRE, lambda d: d["steps"].pop(0))
        assert not called

    def test_a_step_of_lerobot_may_be_named_by_its_class(self, folder: Path) -> None:
        named = "lerobot.processor.batch_processor.AddBatchDimensionProcessorStep"
        change_json(folder / PRE, lambda d: d["steps"].__setitem__(1, {"class": named, "config": {}}))
        LeRobotStage(str(folder)).warm_up()

    @pytest.mark.parametrize("state", [3, f"../mine/{NORMALISER}", ".safetensors", "config.json", "no.safetensors"])
    def test_states_lie_beside_the_others(self, folder: Path, state: Any) -> None:
        change_json(folder / PRE, lambda d: d["steps"][3].update(state_file=state))
        refused(folder, "no safetensors file here")

    @pytest.mark.parametrize("steps", [["a"], None, 3, [{"class": 3}], [{"registry_name": ["x"]}], [{}]])
    def test_steps_that_are_none(self, folder: Path, steps: Any) -> None:
        change_json(folder / PRE, lambda d: d.update(steps=steps))
        refused(folder, PRE)

    @pytest.mark.parametrize("file", [PRE, CONFIG])
    def test_brackets_without_end(self, folder: Path, file: str) -> None:
        (folder / file).write_text("[" * 200_000)
        refused(folder, file)

    @pytest.mark.parametrize("file", [PRE, POST, NORMALISER, "model.safetensors"])
    def test_the_template_misses_what_serving_will(self, folder: Path, file: str) -> None:
        (folder / file).unlink()
        with pytest.raises(CheckpointError, match=file):
            lerobot("mine", str(folder))
