"""What watches for code sees it, and a scan of sources finds each way to it."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import pytest

from omni_loop.testing import audit
from omni_loop.testing.code_scan import findings, sources


def test_sees_what_is_forbidden_and_only_while_it_watches(tmp_path: Path) -> None:
    with audit.watched() as seen:
        eval("1 + 1")
        (tmp_path / "x").touch()
        pickle.loads(pickle.dumps(Path))
    kinds = {event.split()[0] for event in seen}
    assert {"compile", "exec", "pickle.find_class"} <= kinds
    before = len(seen)
    eval("2 + 2")
    assert len(seen) == before


def test_sees_files_and_programs(tmp_path: Path) -> None:
    with audit.watched() as seen, pytest.raises(FileNotFoundError):
        (tmp_path / "none").read_bytes()
    assert any(event.startswith("open ") for event in seen)


def test_watches_its_own_thread_alone() -> None:
    with audit.watched() as seen:
        other = threading.Thread(target=lambda: eval("3 + 3"))
        other.start()
        other.join()
    assert not [event for event in seen if event.startswith("exec")]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("import pickle", "import pickle"),
        ("from pickle import loads", "import from pickle"),
        ("import numpy, joblib", "import joblib"),
        ("eval(x)", "eval()"),
        ("exec(x)", "exec()"),
        ("os.system(x)", "os.system()"),
        ("torch.load(x)", "torch.load() without weights_only"),
        ("torch.load(x, weights_only=False)", "torch.load() without weights_only"),
        ("yaml.load(x)", "yaml.load() without a loader"),
        ("np.load(x, allow_pickle=True)", "np.load(allow_pickle=True)"),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", "trust_remote_code=True"),
        ("subprocess.run(x, shell=True)", "subprocess.run(shell=True)"),
    ],
)
def test_finds_every_way_to_code(line: str, says: str) -> None:
    (found,) = findings(f"pass\n{line}\n", "x.py")
    assert found.startswith("x.py:2: ")
    assert says in found


@pytest.mark.parametrize(
    "line",
    ["from . import pickles", "torch.load(x, weights_only=True)", "yaml.load(x, L)", "model.eval()", "np.load(x)"],
)
def test_leaves_what_is_safe(line: str) -> None:
    assert findings(line, "x.py") == []


def test_the_sources_of_every_package_are_scanned() -> None:
    names = {path.parts[-2] for path in sources()}
    assert {"wire", "policies", "worlds", "envs", "sim_eval"} <= names | {p.parts[-3] for p in sources()}
