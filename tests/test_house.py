"""The repository itself: what is shipped, and how large files are."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("torch", "pydantic", "yaml", "typer", "rich", "msgspec", "zarr", "diffusers", "gymnasium", "fastapi")
GENERATED = {"loop_pb2.py", "loop_pb2_grpc.py"}


class Shipped:
    """What a wheel would hold: ``folders`` by package name, ``files`` relative to the root."""

    def __init__(self) -> None:
        given: dict[str, Any] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(ROOT)
            patch.setattr(setuptools, "setup", given.update)
            runpy.run_path("setup.py")
            distribution = setuptools.Distribution(given | {"script_name": "setup.py"})
            distribution.parse_config_files()
            build = distribution.get_command_obj("build_py")
            build.ensure_finalized()
            data = [Path(source) / name for _, source, _, names in build.data_files for name in names]
            self.files = {Path(path).as_posix() for path in [*build.get_source_files(), *data]}
        self.folders: dict[str, str] = given["package_dir"]


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    return Shipped()


def test_the_wheel_holds_every_file_of_every_package(shipped: Shipped) -> None:
    paths = [path for folder in shipped.folders.values() for path in (ROOT / folder).rglob("*")]
    there = {p.relative_to(ROOT).as_posix() for p in paths if p.is_file() and "__pycache__" not in p.parts}
    assert len(there) > 50
    assert not there - shipped.files


def test_every_package_says_that_it_is_typed(shipped: Shipped) -> None:
    folders = [folder for folder in shipped.folders.values() if folder != "configs"]
    assert {f"{folder}/py.typed" for folder in folders} <= shipped.files


def test_files_stay_small(shipped: Shipped) -> None:
    own = [p for p in shipped.files if p.endswith(".py") and Path(p).name not in GENERATED]
    large = {p: n for p in own if (n := (ROOT / p).read_text(encoding="utf-8").count("\n")) > 400}
    assert not large


def test_pages_that_are_named_are_there_and_every_page_is_named() -> None:
    pages = {f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md")}
    for page in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", *sorted(pages)):
        named = set(re.findall(r"docs/[a-z_]+\.md", (ROOT / page).read_text(encoding="utf-8")))
        assert named <= pages, page
        if page == "README.md":
            assert pages <= named


@pytest.mark.parametrize("module", ["omni_loop.client", "omni_loop.types", "omni_loop.registry", "omni_loop.cli"])
def test_a_robot_loads_no_more_than_numpy_grpc_and_protobuf(module: str) -> None:
    code = f"import {module}, sys; print(*[m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == ""
