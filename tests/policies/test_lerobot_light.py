"""What is known of LeRobot checkpoints without LeRobot: a server's start and ``check config`` are quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONFIG = {
    "type": "act",
    "chunk_size": 100,
    "n_action_steps": 50,
    "input_features": {
        "observation.state": {"type": "STATE", "shape": [14]},
        "observation.images.top": {"type": "VISUAL", "shape": [3, 480, 640]},
        "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 480, 640]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [14]}},
}
LOOK = """
import sys
from omni_loop.config import PipelineConfig
from omni_loop.loop.pipeline import load_pipeline
spec = load_pipeline(PipelineConfig(name="aloha", template="lerobot", options={"checkpoint": sys.argv[1]})).spec()
print([(a.name, a.dtype, a.shape) for a in spec.observations], spec.action.shape, spec.horizon, spec.execution_horizon)
print(sorted({"torch", "lerobot", "transformers", "huggingface_hub"} & set(sys.modules)))
"""


def test_a_spec_is_read_without_heavy_libraries(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    for name in ("policy_preprocessor.json", "policy_postprocessor.json"):
        (tmp_path / name).write_text('{"steps": []}')
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.splitlines() == [
        "[('state', 'float32', (14,)), ('images.top', 'uint8', (480, 640, 3))] (14,) 100 50",
        "[]",
    ]
