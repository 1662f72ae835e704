"""Stages that hold more than memory give it back when their runner ends, however it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_loop.connect.local import LocalConnector
from omni_loop.errors import ConfigError, StageFailed
from omni_loop.runner.local import LocalRunner
from omni_loop.runner.process import ProcessRunner
from omni_loop.runner.runner import RunnerSettings, build
from omni_loop.runner.state import Budget
from omni_loop.stage import ClosingStage, Stage

from .runner_toys import Holder, Toy

pytestmark = pytest.mark.timeout(300)  # importing torch in a process takes long on a busy machine


def broken() -> Toy:
    raise RuntimeError("it cannot be built")


def test_a_holder_is_a_closing_stage_and_a_toy_is_not(tmp_path: Path) -> None:
    holder = Holder(str(tmp_path / "note"))
    assert isinstance(holder, ClosingStage)
    assert isinstance(holder, Stage)
    assert not isinstance(Toy(), ClosingStage)
    holder.close()


@pytest.mark.parametrize("kind", [LocalRunner, ProcessRunner])
async def test_a_stage_is_closed_once_when_its_runner_ends(
    kind: type[LocalRunner | ProcessRunner], tmp_path: Path, toys: str
) -> None:
    note = tmp_path / "note"
    runner = kind("r", [("p/toy", f"{toys}:Holder", {"note": str(note)})], stop_s=120)
    await runner.start()
    assert not note.exists()
    await runner.stop()
    assert note.read_text() == "closed -9\n"


@pytest.mark.parametrize("others", [[("p/broken", broken, {})], []])
def test_a_stage_is_closed_when_the_runner_cannot_start(tmp_path: Path, others: list[object]) -> None:
    note = tmp_path / "note"
    stages = [("p/toy", Holder, {"note": str(note), "fails": not others}), *others]
    with pytest.raises(StageFailed, match=r"it cannot (be built|warm up)"):
        build(stages, LocalConnector(), RunnerSettings())  # type: ignore[arg-type]
    assert note.read_text() == "closed -9\n"


def test_a_stage_is_closed_when_there_is_no_room_for_its_state(tmp_path: Path) -> None:
    note = tmp_path / "note"
    with pytest.raises(ConfigError, match="budget_bytes is 1"):
        build([("p/toy", Holder, {"note": str(note)})], LocalConnector(), RunnerSettings(budget=Budget(nbytes=1)))
    assert note.read_text() == "closed -9\n"


def test_a_runner_nobody_stopped_ends_with_the_program(toys: str) -> None:
    code = (
        "import asyncio, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from omni_loop.runner.process import ProcessRunner\n"
        "async def main():\n"
        f"    runner = ProcessRunner('r', [('p/toy', '{toys}:toy', {{}})])\n"
        "    await runner.start()\n"
        "    print(runner.pid)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True)
    assert not Path(f"/proc/{ended.stdout.strip()}").exists()
