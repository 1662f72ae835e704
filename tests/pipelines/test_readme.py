"""The examples of the README run as they are written, but for the port."""

import re
from pathlib import Path

import pytest

from omni_loop.config import Deployment, SnapshotConfig, parse, validate
from omni_loop.serve.background import BackgroundServer

from .conftest import READY_S

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
ADDRESS = "127.0.0.1:50051"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


EXAMPLES = [block for block in blocks("python") if ADDRESS in block]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    """All that the examples ask for: what the first two start, and what the third adds to it."""
    (written,) = blocks("yaml")
    mine = validate(Deployment, parse(written, "mine.yaml"), "mine.yaml")
    assert mine.snapshots.folder
    folder = SnapshotConfig(folder=str(tmp_path_factory.mktemp("snapshots")))
    deployment = mine.model_copy(update={"pipelines": ("pusht", *mine.pipelines), "snapshots": folder})
    with BackgroundServer(deployment, READY_S) as server:
        yield server


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


@pytest.mark.parametrize("example", range(3), ids=["policy", "world", "branches"])
def test_an_example_runs(
    trained: None, server: BackgroundServer, capsys: pytest.CaptureFixture[str], example: int
) -> None:
    pytest.importorskip("gym_pusht")
    exec(compile(EXAMPLES[example].replace(ADDRESS, server.address), "<README>", "exec"), {"__name__": "example"})
    said = capsys.readouterr().out
    assert (r"success", r"(8, 96, 96, 3)", r"5 (8, 96, 96, 3)")[example] in said
