from __future__ import annotations

import numpy as np
import pytest
import torch

from omni_loop import registry
from omni_loop.errors import Unsupported
from omni_loop_worlds.imagined import Coverage, Progress, Seen
from omni_loop_worlds.imagined.judge import fitted, scene_coverage
from omni_loop_worlds.scene import pose_points


def seen(pose: np.ndarray, noise: np.ndarray | float = 0.0) -> Seen:
    points = pose_points(torch.as_tensor(pose, dtype=torch.float32)).numpy()
    scene = np.concatenate([[[9.0, 9.0]], points + noise]).astype(np.float32)
    return Seen(1, np.zeros(2, np.float32), np.zeros((96, 96, 3), np.uint8), scene)


def test_coverage_is_the_simulators() -> None:
    pytest.importorskip("gym_pusht")
    from omni_loop_envs.pusht.simulator import PushTSimulator

    table, judge, rng = PushTSimulator(), Coverage(), np.random.default_rng(0)
    table.reset(0)
    covered = []
    for case in range(40):
        spread = (60, 0.6) if case % 2 else (3, 0.02)
        pose = np.array([256, 256, np.pi / 4]) + rng.normal(0, 1, 3) * [spread[0], spread[0], spread[1]]
        table.place(np.array([9, 9, *pose]))
        verdict = judge(seen(pose))
        covered.append(verdict.info["coverage"])
        assert verdict.info["coverage"] == pytest.approx(table.coverage, abs=1e-4)
        assert verdict.success == (table.coverage > 0.95)
        assert verdict.reward == pytest.approx(min(table.coverage / 0.95, 1), abs=1e-4)
        assert verdict.info["misfit"] < 1e-3
    assert max(covered) > 0.95 > min(covered)


def test_points_that_are_no_t_are_fitted_and_said() -> None:
    pose, rng = np.array([200, 300, 1.0]), np.random.default_rng(1)
    noise = rng.normal(0, 4, (8, 2))
    verdict = Coverage()(seen(pose, noise))
    assert 2 < verdict.info["misfit"] < 6
    points = pose_points(torch.as_tensor(pose, dtype=torch.float32)).numpy()
    best = fitted(points + noise)
    assert np.linalg.norm(best - points, axis=1).mean() < 4  # nearer than the noise
    for turn in (-2e-3, 2e-3):  # least squares: no other pose is nearer
        c, s = np.cos(turn), np.sin(turn)
        turned = (best - best.mean(0)) @ np.array([[c, s], [-s, c]]) + best.mean(0)
        for other in (turned, best + np.array([0.1, 0]), best - np.array([0, 0.1])):
            assert np.square(other - points - noise).sum() > np.square(best - points - noise).sum()


def test_the_score_of_a_scene_is_found_by_the_envs_name() -> None:
    one = seen(np.array([240, 260, 0.7]))
    assert one.scene is not None
    assert registry.load(registry.SCENE_SCORES, "pusht") is scene_coverage
    assert scene_coverage(one.scene) == Coverage()(one).info["coverage"] > 0.5


def test_without_a_scene_there_is_no_coverage() -> None:
    bare = Seen(1, np.zeros(2, np.float32), np.zeros((96, 96, 3), np.uint8))
    with pytest.raises(Unsupported, match="reads no T"):
        Coverage()(bare)


def test_progress_is_the_pipelines_own_where_it_says() -> None:
    said = Seen(1, np.zeros(2, np.float32), np.zeros((96, 96, 3), np.uint8), None, 0.4, 0.6)
    verdict = Progress()(said)
    assert (verdict.reward, verdict.success, verdict.info) == (0.4, True, {"progress": 0.4, "done": 0.6})
    assert not Progress(done=0.7)(said).success


def test_progress_is_read_from_the_frame_where_the_pipeline_says_nothing(small_checkpoints: object) -> None:
    judge, frame = Progress(str(small_checkpoints)), np.zeros((96, 96, 3), np.uint8)
    frame[20:40] = 200
    action = np.array([100, 300], np.float32)
    a = judge(Seen(1, action, frame))
    assert 0 <= a.reward <= 1
    assert a == judge(Seen(1, action, frame.copy()))
    assert a != judge(Seen(1, action, frame[::-1].copy()))
