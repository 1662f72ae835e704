"""Checkpoints that lack something are refused, and the refusal names it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from omni_loop import registry
from omni_loop.config import PipelineConfig, load_deployment
from omni_loop.errors import CheckpointError, ConfigError, Unsupported
from omni_loop.loop.pipeline import load_pipeline
from omni_loop_policies.lerobot.checkpoint import locate, revision
from omni_loop_policies.lerobot.families import FAMILIES, REFUSED
from omni_loop_policies.lerobot.load import Options, load
from omni_loop_policies.lerobot.stage import LeRobotStage
from omni_loop_policies.lerobot.template import lerobot

pytest.importorskip("lerobot")
pytestmark = pytest.mark.timeout(300)
Checkpoints = Callable[..., Path]
NORMALISER = "policy_preprocessor_step_3_normalizer_processor.safetensors"
UNNORMALISER = "policy_postprocessor_step_0_unnormalizer_processor.safetensors"


@pytest.fixture
def folder(checkpoints: Checkpoints, tmp_path: Path) -> Path:
    """A copy of an ACT checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoints("act"), tmp_path / "mine"))


def change_tensors(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def change_json(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as error:
        LeRobotStage(str(folder))
    for word in words:
        assert word in error.value.text, error.value.text
    assert str(folder.parent) not in error.value.text  # a path is nobody's business


@pytest.mark.parametrize(
    ("checkpoint", "named"),
    [("~nosuchuser/x", "'~nosuchuser/x': no such user"), ("x" * 5000, r"'x{100}\.\.\.': File name too long")],
)
def test_paths_that_cannot_be(checkpoint: str, named: str) -> None:
    with pytest.raises(CheckpointError, match=named):
        locate(checkpoint)


def test_a_missing_statistic_is_named(folder: Path) -> None:
    change_tensors(folder / NORMALISER, lambda t: t.pop("observation.state.mean"))
    refused(folder, "observation.state.mean is missing")


def test_every_missing_statistic_is_named(folder: Path) -> None:
    change_tensors(folder / NORMALISER, lambda t: [t.pop(f"observation.state.{s}") for s in ("mean", "std")])
    change_tensors(folder / UNNORMALISER, lambda t: t.pop("action.std"))
    refused(folder, "observation.state.mean", "observation.state.std", "action.std")


def test_a_statistic_that_is_not_finite_is_named(folder: Path) -> None:
    change_tensors(folder / UNNORMALISER, lambda t: t["action.std"].fill_(float("inf")))
    refused(folder, "action.std is not finite")


def test_a_statistic_of_another_shape_is_named(folder: Path) -> None:
    change_tensors(folder / NORMALISER, lambda t: t.update({"observation.state.std": t["action.std"].clone()}))
    refused(folder, "observation.state.std has shape [3], for a feature of [4]")


def test_a_feature_that_no_step_normalises_is_named(folder: Path) -> None:
    def drop(data: dict[str, Any]) -> None:
        data["steps"] = [step for step in data["steps"] if step["registry_name"] != "normalizer_processor"]

    change_json(folder / "policy_preprocessor.json", drop)
    refused(folder, "observation.state is normalised by no step")


def test_statistics_that_nobody_uses_may_be_missing(folder: Path) -> None:
    change_tensors(folder / NORMALISER, lambda t: t.pop("observation.state.min"))
    LeRobotStage(str(folder)).warm_up()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "policy_preprocessor.json", NORMALISER])
def test_a_missing_file_is_named(folder: Path, name: str) -> None:
    (folder / name).unlink()
    refused(folder, name)


def test_nothing_pickled_is_read(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "pytorch_model.bin is pickled")


def test_no_processor_brings_code_of_its_own(folder: Path) -> None:
    def foreign(data: dict[str, Any]) -> None:
        data["steps"][0] = {"class": "os.path.join", "config": {}}

    change_json(folder / "policy_preprocessor.json", foreign)
    refused(folder, "'os.path.join' is not one of LeRobot's own")


def test_weights_that_are_missing_are_named(folder: Path) -> None:
    change_tensors(folder / "model.safetensors", lambda t: t.pop("model.action_head.weight"))
    refused(folder, "lacks 1 tensors", "model.action_head.weight")


def test_weights_that_are_not_finite_are_named(folder: Path) -> None:
    change_tensors(folder / "model.safetensors", lambda t: t["model.action_head.bias"].fill_(float("nan")))
    refused(folder, "model.action_head.bias")


def test_weights_of_another_shape_are_named(folder: Path) -> None:
    def cut(tensors: dict[str, Any]) -> None:
        tensors["model.action_head.bias"] = tensors["model.action_head.bias"][:2].clone()

    change_tensors(folder / "model.safetensors", cut)
    refused(folder, "model.action_head.bias")


def test_a_vqbet_whose_codes_were_never_trained(checkpoints: Checkpoints, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoints("vqbet"), tmp_path / "mine"))
    flag = "vqbet.action_head.vqvae_model.discretized"
    change_tensors(folder / "model.safetensors", lambda t: t.update({flag: ~t[flag]}))
    refused(folder, "never trained")


def test_corrupt_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\x10" * 64)
    refused(folder, "mine")


def test_weights_that_a_loader_silently_left_out_are_found(
    checkpoints: Checkpoints, tmp_path: Path, small_gemma: None
) -> None:
    """pi0's prints that it could not load, and goes on with random weights."""
    folder = Path(shutil.copytree(checkpoints("pi0"), tmp_path / "mine"))
    change_tensors(folder / "model.safetensors", lambda t: t.pop("model.state_proj.weight"))
    refused(folder, "model.safetensors")


def test_an_adapter_alone_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", lambda c: c.update(use_peft=True))
    refused(folder, "adapter", "merge")


def test_the_revision_is_that_of_everything_served(folder: Path, checkpoints: Checkpoints) -> None:
    want = revision(checkpoints("act"))
    assert revision(folder) == want
    assert len(want) == 12
    (folder / "card.json").write_text("{}")  # which is not served
    assert revision(folder) == want
    change_tensors(folder / NORMALISER, lambda t: t["observation.state.mean"].add_(1))
    assert revision(folder) != want


def test_a_tokenizer_may_lie_in_the_checkpoint(checkpoints: Checkpoints, vlm: Path, tmp_path: Path) -> None:
    """As a checkpoint moves to a machine without a network."""
    folder = Path(shutil.copytree(checkpoints("smolvla"), tmp_path / "mine"))
    shutil.copytree(vlm, folder / "vlm")
    for file, change in {
        "config.json": lambda c: c.update(vlm_model_name="HuggingFaceTB/SmolVLM2-500M-Video-Instruct"),
        "policy_preprocessor.json": lambda c: [s.get("config", {}).pop("tokenizer_name", "") for s in c["steps"]],
    }.items():
        change_json(folder / file, change)
    LeRobotStage(str(folder), vlm="vlm").warm_up()


def test_fewer_denoising_steps_by_option(checkpoints: Checkpoints) -> None:
    assert load(str(checkpoints("ddim")), options=Options(inference_steps=2)).policy.diffusion.num_inference_steps == 2
    with pytest.raises(ConfigError, match="num_inference_steps"):
        LeRobotStage(str(checkpoints("act")), inference_steps=2)


def test_a_tokenizer_for_a_policy_without_one_is_refused(checkpoints: Checkpoints) -> None:
    with pytest.raises(ConfigError, match="tokenizer"):
        LeRobotStage(str(checkpoints("act")), tokenizer="somewhere")


class TestTheTemplate:
    def test_the_spec_is_the_checkpoints(self, checkpoints: Checkpoints) -> None:
        named = PipelineConfig(name="mine", template="lerobot", options={"checkpoint": str(checkpoints("vqbet"))})
        spec = load_pipeline(named).spec()
        assert [(a.name, a.dtype, a.shape) for a in spec.observations] == [
            ("state", "float32", (4,)),
            ("image", "uint8", (64, 64, 3)),
        ]
        assert (spec.pipeline, spec.action.shape, spec.horizon, spec.execution_horizon) == ("mine", (3,), 4, 4)
        assert not spec.prompt
        assert "queues" in spec.description

    @pytest.mark.parametrize(
        ("kind", "changed", "horizon", "execution_horizon"),
        [
            ("act", {}, 6, 4),
            ("ddim", {}, 7, 4),
            ("tdmpc", {}, 3, 2),
            ("tdmpc", {"n_action_repeats": 2, "n_action_steps": 1}, 2, 2),
            ("tdmpc", {"use_mpc": False, "n_action_steps": 1}, 1, 1),
            ("smolvla", {}, 8, 4),
        ],
    )
    def test_horizons(
        self, checkpoints: Checkpoints, kind: str, changed: dict[str, Any], horizon: int, execution_horizon: int
    ) -> None:
        spec = lerobot("mine", str(checkpoints(kind, **changed))).spec()
        assert (spec.horizon, spec.execution_horizon) == (horizon, execution_horizon)

    def test_the_control_rate_is_the_deployments_or_the_cards(self, folder: Path) -> None:
        assert lerobot("mine", str(folder)).spec().control_hz == 10
        (folder / "card.json").write_text('{"control_hz": 25}')
        assert lerobot("mine", str(folder)).spec().control_hz == 25
        assert lerobot("mine", str(folder), control_hz=5.0).spec().control_hz == 5

    def test_a_type_that_keeps_sessions_in_the_object_says_so(self, checkpoints: Checkpoints) -> None:
        description = lerobot("mine", str(checkpoints("tdmpc"))).spec().description
        assert "one session at a time has the policy" in description
        assert "warm start" in description
        assert "sessions share forward passes" in lerobot("mine", str(checkpoints("act"))).spec().description

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"rtc": True}, "no real-time chunking"),
            ({"execution_horizon": 7}, "execution_horizon"),
            ({"control_hz": -1.0}, "control_hz"),
            ({"inference_delay": 6}, "inference_delay"),
        ],
    )
    def test_options_that_do_not_fit(self, checkpoints: Checkpoints, options: dict[str, Any], says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            lerobot("mine", str(checkpoints("act")), **options)

    def test_a_chunk_is_averaged_or_continued(self, checkpoints: Checkpoints) -> None:
        with pytest.raises(ConfigError, match="averaged"):
            lerobot("mine", str(checkpoints("smolvla")), rtc=True, ensemble=True)

    def test_chunks_relative_to_a_past_state_are_not_continued(self, folder: Path) -> None:
        change_json(folder / "config.json", lambda c: c.update(type="pi0", use_relative_actions=True))
        with pytest.raises(ConfigError, match="relative"):
            lerobot("mine", str(folder), rtc=True)

    def test_what_is_near_is_named(self, checkpoints: Checkpoints) -> None:
        with pytest.raises(CheckpointError, match=r"Did you mean .*act'"):
            lerobot("mine", f"{checkpoints('act')}t")

    def test_unknown_types_are_refused_by_name(self, folder: Path) -> None:
        change_json(folder / "config.json", lambda c: c.update(type="difusion"))
        with pytest.raises(Unsupported, match="Did you mean 'diffusion'"):
            lerobot("mine", str(folder))

    def test_a_type_that_cannot_be_shared_is_refused_with_the_reason(self, folder: Path) -> None:
        change_json(folder / "config.json", lambda c: c.update(type="lingbot_va"))
        with pytest.raises(Unsupported, match="video caches"):
            lerobot("mine", str(folder))

    def test_a_hub_id_without_network_is_refused_with_the_reason(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import huggingface_hub.constants

        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(CheckpointError, match=r"the hub is not reachable$"):
            lerobot("mine", "nobody/nothing-of-this-name")

    def test_an_unknown_option_is_named(self, checkpoints: Checkpoints) -> None:
        with pytest.raises(ConfigError, match="ensemble_decay"):
            registry.build(
                registry.TEMPLATES,
                "lerobot",
                {"name": "x", "checkpoint": str(checkpoints("act")), "ensemble_deca": 1.0},
            )

    @pytest.mark.parametrize("change", ["type", "input_features", "output_features"])
    def test_a_config_that_describes_no_policy(self, folder: Path, change: str) -> None:
        change_json(folder / "config.json", lambda c: c.pop(change))
        with pytest.raises(CheckpointError, match=change):
            lerobot("mine", str(folder))


def test_the_shipped_deployment_serves_the_shipped_checkpoint() -> None:
    (named,) = load_deployment("lerobot-act").pipelines
    pipeline = load_pipeline(named)
    spec, (stage,) = pipeline.spec(), pipeline.stages
    assert (spec.horizon, spec.execution_horizon, spec.control_hz, spec.action.shape) == (10, 5, 25, (4,))
    assert {a.name: a.shape for a in spec.observations} == {"state": (28,), "environment_state": (18,)}
    registry.build(registry.STAGES, stage.factory, stage.options).warm_up()


def test_every_type_of_lerobot_is_served_or_refused_with_a_reason() -> None:
    import lerobot.policies  # noqa: F401  registers them
    from lerobot.configs import PreTrainedConfig

    assert set(PreTrainedConfig.get_known_choices()) == {*FAMILIES, *REFUSED}


def test_only_types_with_real_time_chunking_say_they_have_it() -> None:
    import lerobot.policies as policies
    from lerobot.configs import PreTrainedConfig

    _ = policies
    configurable = {t for t in FAMILIES if hasattr(PreTrainedConfig.get_choice_class(t), "rtc_config")}
    assert {t for t, family in FAMILIES.items() if family.rtc} <= configurable | {"groot"}
