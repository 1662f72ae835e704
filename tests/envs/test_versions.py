"""Every env says which versions decide what happens in it, wherever its simulator is."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from omni_loop import registry
from omni_loop.env import versions_of

PUSHT = {"id": "gym_pusht/PushT-v0", "import": "gym_pusht", "observations": {"state": ""}, "success": "is_success"}
REACH = {
    "id": "FetchReach-v4", "import": "gymnasium_robotics", "observations": {"state": "observation"},
    "success": "is_success",
}  # fmt: skip


@pytest.mark.parametrize(
    ("env", "options", "packages"),
    [
        ("pusht", {}, ["gym-pusht", "pymunk", "shapely"]),
        ("imagined", {}, ["gym-pusht", "pymunk", "shapely"]),
        ("metaworld", {"images": False}, ["metaworld", "mujoco"]),
        ("fetch-push", {"images": False}, ["gymnasium-robotics", "mujoco"]),
        ("aloha", {}, ["gym-aloha", "dm_control", "mujoco"]),
        ("so101", {}, ["lerobot_env_so101", "mujoco"]),
        ("gymnasium", {**PUSHT, "kwargs": {"obs_type": "state"}, "max_steps": 9}, ["gym-pusht", "pymunk"]),
        ("gymnasium", {**REACH, "max_steps": 9}, ["gymnasium-robotics", "mujoco"]),
        ("lerobot", {"type": "pusht", "obs_type": "state"}, ["lerobot", "gym-pusht", "pymunk", "shapely"]),
        ("lerobot", {"type": "aloha"}, ["lerobot", "gym-aloha", "dm_control", "mujoco"]),
    ],
)
def test_an_env_names_what_decides(env: str, options: dict[str, Any], packages: list[str]) -> None:
    for package in packages:
        if not versions_of([package]):
            pytest.skip(f"{package} is not installed")
    made = registry.build(registry.ENVS, env, options)
    try:
        assert made.versions == {package: metadata.version(package) for package in packages}
    finally:
        made.close()


def test_a_worker_says_what_its_env_says() -> None:
    worker = registry.build(registry.ENVS, "worker", {"env": "pusht"})
    try:
        assert dict(worker.versions).items() >= versions_of(["gym-pusht", "pymunk", "shapely"]).items() != set()
    finally:
        worker.close()


def test_a_module_is_as_good_as_its_package_and_one_that_nobody_packaged_has_none() -> None:
    assert versions_of(["gym_pusht", "yaml", "nobodys_module"]) == {
        "gym-pusht": metadata.version("gym-pusht"),
        "PyYAML": metadata.version("PyYAML"),
    }
