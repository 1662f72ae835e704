"""What is known before weights are, and what is said of folders that are not right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from omni_loop import registry
from omni_loop.config import PipelineConfig, load_deployment
from omni_loop.errors import CheckpointError, ConfigError
from omni_loop.loop.graph import compile_pipeline
from omni_loop.loop.pipeline import Pipeline, load_pipeline
from omni_loop.types import Op, SessionSpec

from . import tiny

COSMOS_INDEX = {
    "_class_name": "Cosmos2_5_PredictBasePipeline",
    "transformer": ["diffusers", "CosmosTransformer3DModel"],
}
VAE = {"temperal_downsample": [False, True, True]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """JSON alone, as of a published checkpoint."""
    made = tmp_path / "Cosmos"
    for part, config in {"transformer": {"patch_size": [1, 2, 2]}, "vae": VAE}.items():
        (made / part).mkdir(parents=True)
        (made / part / "config.json").write_text(json.dumps(config))
    (made / "model_index.json").write_text(json.dumps(COSMOS_INDEX))
    return made


def made(template: str, folder: Path, **options: Any) -> Pipeline:
    given = {"checkpoint": str(folder), **options}
    return load_pipeline(PipelineConfig(name="world", template=template, options=given))


def spec(template: str, folder: Path, **options: Any) -> SessionSpec:
    return compile_pipeline(made(template, folder, **options)).spec


def test_the_spec_needs_no_weights(folder: Path) -> None:
    plain = spec("cosmos", folder)
    assert plain.ops == (Op.RECONDITION, Op.PREDICT)
    assert plain.frame is not None
    assert plain.frame.shape == plain.observations[0].shape == (704, 1280, 3)
    assert (plain.max_predict, plain.prompt, plain.control_hz) == (88, True, 16.0)
    assert plain.action.shape == (1,)
    assert "not read" in plain.action.description
    small = spec("cosmos", folder, height=64, width=96, frames=17, context=1, action_dim=7, fps=10)
    assert (small.max_predict, small.action.shape, small.control_hz) == (16, (7,), 10.0)
    (folder / "transformer" / "config.json").write_text(json.dumps({"action_dim": 7}))
    steered = spec("cosmos", folder, height=256, width=320, frames=13, context=1)
    assert (steered.max_predict, steered.action.shape) == (12, (7,))
    assert "not read" not in steered.action.description
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "WanImageToVideoPipeline"}))
    assert spec("wan", folder).max_predict == 80


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"height": 700}, "height is 700.*16"),
        ({"width": 0}, "width is 0"),
        ({"context": 2}, "context is 2.*1 or 5"),
        ({"frames": 92}, "frames is 92"),
        ({"frames": 5}, "more than 5"),
        ({"action_dim": 0}, "action_dim is 0"),
        ({"frames": 0}, "frames is 0"),
        ({"width": -1}, "width is -1"),
        ({"steps": 0}, "steps is 0"),
        ({"fps": 0}, "fps is 0"),
        ({"guidance": -1.0}, "guidance is -1"),
        ({"guidance": float("nan")}, "guidance is nan"),
        ({"history": -1}, "history is -1"),
        ({"prompts": 0}, "prompts is 0"),
        ({"text_length": 0}, "text_length is 0"),
        ({"dtype": "bfloat61"}, "Did you mean 'bfloat16'"),
        ({"stepss": 4}, "steps"),
        ({"steps": "4"}, "steps"),
    ],
)
def test_sizes_that_cannot_be_are_named(folder: Path, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        made("cosmos", folder, **options)


@pytest.mark.parametrize("template", ["cosmos", "wan"])
@pytest.mark.parametrize("options", [{"frames": 0}, {"steps": 0}, {"width": -1}, {"fps": 0}, {"height": 705}])
def test_what_no_folder_can_make_right_is_said_without_one(
    template: str, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))} is {next(iter(options.values()))}"):
        made(template, tmp_path / "nowhere", **options)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        made(template, tmp_path / "nowhere")


def test_a_long_name_is_shortened(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read") as caught:
        made("cosmos", tmp_path / ("x" * 5000))
    assert len(caught.value.text) < 200


def test_a_steered_checkpoint_takes_one_frame_and_predict25(folder: Path) -> None:
    (folder / "transformer" / "config.json").write_text(json.dumps({"action_dim": 7}))
    with pytest.raises(ConfigError, match="conditioned on 1 frame"):
        made("cosmos", folder)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "Cosmos2VideoToWorldPipeline"}))
    with pytest.raises(ConfigError, match=r"Predict2\.5"):
        made("cosmos", folder, context=1)


def test_folders_that_are_not_right(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'nowhere': model_index\.json is missing") as caught:
        made("cosmos", tmp_path / "nowhere")
    assert str(tmp_path) not in caught.value.text
    with pytest.raises(CheckpointError, match="Cosmos2_5_PredictBasePipeline"):
        made("wan", folder)
    (folder / "vae" / "config.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"vae/config\.json cannot be read"):
        made("cosmos", folder)
    (folder / "vae" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"vae/config\.json is missing"):
        made("cosmos", folder)


@pytest.mark.parametrize("name", ["cosmos-predict2.5", "wan-i2v"])
def test_shipped_deployments_say_that_weights_are_missing(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (named,) = load_deployment(name).pipelines
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_pipeline(named)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda f: (f / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"x"), "transformer cannot"),
        (lambda f: (f / "transformer" / "diffusion_pytorch_model.safetensors").unlink(), "transformer cannot"),
        (lambda f: shutil.rmtree(f / "text_encoder"), "'text_encoder' is missing"),
        (lambda f: index(f, vae=["os", "system"]), "components are of diffusers or transformers"),
        (lambda f: index(f, vae=["diffusers", "AutoencoderKLWam"]), "no class 'AutoencoderKLWam'"),
        (lambda f: index(f, vae=[None, None]), "names no 'vae'"),
    ],
)
def test_weights_that_are_not_right(folders: dict[str, Path], tmp_path: Path, damage: Any, named: str) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    from omni_loop_worlds.diffusers.cosmos import CosmosStage

    broken = tmp_path / "broken"
    shutil.copytree(folders["cosmos2"], broken)
    damage(broken)
    with pytest.raises(CheckpointError, match=named) as caught:
        CosmosStage(str(broken), frames=13, **tiny.COSMOS)
    assert str(tmp_path) not in caught.value.text


def index(folder: Path, **entries: Any) -> None:
    file = folder / "model_index.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def test_a_text_encoder_of_another_folder(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    from omni_loop_worlds.diffusers.wan import WanStage

    lean, text = tmp_path / "lean", tmp_path / "text"
    shutil.copytree(folders["wan22"], lean)
    text.mkdir()
    for part in ("text_encoder", "tokenizer"):
        shutil.move(lean / part, text / part)
    one = WanStage(str(lean), frames=9, text_encoder=str(text), **tiny.WAN)
    other = WanStage(str(folders["wan22"]), frames=9, **tiny.WAN)
    assert (one.prompts("a cat") == other.prompts("a cat")).all()
    assert one.revision == other.revision
    assert WanStage(str(folders["wan22"]), frames=9, **{**tiny.WAN, "steps": 3}).revision != one.revision


def test_templates_are_registered() -> None:
    assert {"cosmos", "wan"} <= set(registry.names(registry.TEMPLATES))
