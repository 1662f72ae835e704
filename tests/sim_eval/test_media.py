"""Episodes that cannot be drawn or replayed: it is said, and costs nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_loop import registry
from omni_loop.env import EVALUATION_SEED
from omni_loop.errors import EnvFailed, MissingExtra
from omni_loop_sim_eval import commands, media, report, summary
from omni_loop_sim_eval.media import Media
from omni_loop_sim_eval.replay import ReplayMismatch, replay
from omni_loop_sim_eval.runner import run_suite

from .pages import read
from .test_commands import call, server  # noqa: F401  (a fixture)
from .test_episodes import run_one
from .toy import GOAL, ToyEnv, ToyServer, toy_suite

S = EVALUATION_SEED


class Odd(ToyEnv):
    """Draws by ``drawing(self)``, which may raise."""

    drawing: Callable[[Odd], None] = staticmethod(lambda env: None)
    made = 0

    def __init__(self, max_steps: int = 60) -> None:
        super().__init__(max_steps)
        type(self).made += 1
        self.seed = -1

    def _reset(self, seed: int) -> None:
        super()._reset(seed)
        self.seed = seed

    def _render(self) -> NDArray[np.uint8]:
        type(self).drawing(self)
        return super()._render()


@contextmanager
def odd(**attributes: object) -> Iterator[type[Odd]]:
    """The env ``odd``, of a class of its own."""
    kind = type("Odd", (Odd,), {k: staticmethod(v) if callable(v) else v for k, v in attributes.items()})
    with registry.registered(registry.ENVS, "odd", kind):
        yield kind


def seen(tmp_path: Path, **fields: object) -> tuple[Media, str]:
    """What is collected of a run of ``odd``, and what its page says."""
    run = run_suite(toy_suite(env="odd", max_steps=20, videos="all", **fields), ToyServer().connect)
    found, numbers = media.collect(run, tmp_path), summary.summarise(run)
    numbers["predictions"] = {"n": found.compared, "psnr_by_horizon": found.horizon}
    return found, read(report.render(run, numbers, found)).said()


def undrawn(env: Odd) -> None:
    raise AttributeError("Unexpected mode: None")


def test_an_env_that_cannot_be_drawn_costs_neither_page_nor_table(
    server: ToyServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "load_suite", lambda name: toy_suite(env="odd", max_steps=20))
    with odd(drawing=undrawn):
        code, said = call("eval", "--episodes", "3", "--out", str(tmp_path))
    assert code == 0, said
    why = f"Not shown: seed {S}, seed {S + 1}: AttributeError: Unexpected mode: None"
    assert "2/3" in said
    assert why in said
    assert "Traceback" not in said
    assert why in read((tmp_path / "report.html").read_text()).said()
    assert json.loads((tmp_path / "summary.json").read_text())["successes"] == 2


def test_one_episode_that_cannot_be_drawn_leaves_the_others(tmp_path: Path) -> None:
    def frail(env: Odd) -> None:
        if env.seed == S + 1:
            raise EnvFailed("the simulator is gone")

    with odd(drawing=frail) as kind:
        found, said = seen(tmp_path, episodes=3, predictions={"episodes": 0})
        assert kind.made == 4, "preflight, run, until it failed, and another one from there on"
    assert [v.path.name for v in found.videos] == [f"success-seed-{seed}.mp4" for seed in (S, S + 2)]
    assert found.missing == [f"Not shown: seed {S + 1}: env_failed: the simulator is gone"]
    assert found.missing[0] in said


def test_reasons_are_said_once_with_some_of_their_episodes(tmp_path: Path) -> None:
    with odd(drawing=undrawn):
        tasks = [{"name": name} for name in ("a", "b", "c", "d")]
        found, _ = seen(tmp_path, episodes=2, tasks=tasks, predictions={"episodes": 0})
    assert len(found.missing) == 1
    assert found.missing[0].startswith(f"Not shown: a seed {S}, a seed {S + 1}, b seed {S}")
    assert "and 3 more: AttributeError" in found.missing[0]


def test_a_machine_that_cannot_draw_is_asked_once(tmp_path: Path) -> None:
    asked: list[int] = []

    def missing(env: Odd) -> None:
        asked.append(env.seed)
        raise MissingExtra("images need OSMesa")

    with odd(drawing=missing):
        found, said = seen(tmp_path, episodes=3)
    assert (asked, found.missing) == ([S], ["No videos: images need OSMesa"])
    assert "No videos: images need OSMesa" in said


def test_an_env_that_does_not_close_costs_no_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(env: Odd) -> None:
        raise RuntimeError("closed twice")

    with odd() as kind:
        run = run_suite(toy_suite(env="odd", episodes=1), ToyServer().connect)
        monkeypatch.setattr(kind, "_close", stuck)
        found = media.collect(run, tmp_path)
    assert [v.title for v in found.videos] == ["Success", "Predicted beside real"]
    assert found.missing == ["Not shown: the end of the env: RuntimeError: closed twice"]


def test_an_env_that_does_not_repeat_itself_is_a_finding(
    server: ToyServer,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Drifting(ToyEnv):
        resets = 0

        def _reset(self, seed: int) -> None:
            super()._reset(seed)
            type(self).resets += 1
            self.position = self.position + 15 * self.resets

    monkeypatch.setattr(commands, "load_suite", lambda name: toy_suite(env="drifting", max_steps=5))
    with registry.registered(registry.ENVS, "drifting", Drifting):
        code, said = call("eval", "--episodes", "3", "--out", str(tmp_path))
    assert code == 0, said
    page = read((tmp_path / "report.html").read_text()).said()
    for text in (
        "does not repeat itself: of 2 episodes replayed",
        "2 went another way",
        f"seed {S} replayed to success",
    ):
        assert text in page, text
        assert text in " ".join(said.split()), text
    assert "<video" not in (tmp_path / "report.html").read_text()


def test_a_replay_that_ends_early_went_another_way() -> None:
    result = run_one(ToyServer())

    class Nearer(ToyEnv):
        def _reset(self, seed: int) -> None:
            super()._reset(seed)
            self.position = (self.position + GOAL) / 2

    with pytest.raises(ReplayMismatch, match=f"seed {S} ended at step 4 with success=True when replayed.* were 7"):
        replay(Nearer(), result)


def test_predicted_frames_of_another_shape_cost_their_episode_alone(tmp_path: Path) -> None:
    with registry.registered(registry.ENVS, "odd", ToyEnv):
        found, said = seen(tmp_path, frame_key="position")
    why = "bad_config: frame_key 'position' is float32[2], predicted frames are uint8[32, 32, 3]"
    assert found.missing == [f"Not shown: seed {S}, seed {S + 1}: {why}"]
    assert len(found.videos) == 2
    assert why in said
