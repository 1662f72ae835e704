"""The contract of world models: derive from :class:`WorldContract` and say how to make the stage and its inputs.

A world stage observes real frames (a RECONDITION with input ``observation``: array ``image`` with a leading axis of
frames, ``executed`` actions) and predicts (a PREDICT with input ``actions``). Its output, ``latents`` or ``frames``,
holds one entry per frame along the first axis. The suite drives it through a real runner and never looks inside.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ..connect.base import as_numpy
from ..errors import InvalidInput, OmniLoopError, StateError
from ..messages import PayloadKind, Scalar
from ..stage import Payload, Stage, StreamingStage
from ..types import Op
from .stage_driver import Ask, Driver

Float = NDArray[np.float32]


class WorldContract:
    """``low`` and ``high`` bound actions; ``max_predict`` is the most frames one tick may predict; ``atol`` is what
    the same history may differ by when it was reached by another road.

    Not every world is steered frame by frame. ``steers``: whether actions are read; a world that follows a prompt only
    counts them. ``stride``: a prediction's actions come in multiples of it. ``together``: a prediction's frames are
    made together, so that each may answer to any of its actions, and depends on how many there are. ``remembers``:
    whether frames before the last one matter. ``watched``: so many frames are shown in parts, where it does so."""

    output = "latents"
    low, high = 0.0, 512.0
    steers, stride, together, remembers = True, 1, False, True
    watched = 4
    max_predict = 16
    rollout_frames = 200
    atol = 1e-5

    def make_stage(self) -> Stage:
        raise NotImplementedError

    def images(self, n: int) -> NDArray[np.uint8]:
        """``uint8[n, h, w, 3]``: consecutive frames, all different."""
        raise NotImplementedError

    def actions(self, n: int, seed: int = 0) -> Float:
        """``float32[n, action_dim]``."""
        rng = np.random.default_rng(seed)
        return rng.uniform(self.low, self.high, (n, self.action_dim)).astype(np.float32)

    @property
    def action_dim(self) -> int:
        return 2

    # How the suite talks to the stage -------------------------------------------------------------------------

    @pytest.fixture
    def driver(self) -> Iterator[Driver]:
        driver = Driver(self.make_stage())
        driver.open("s", seed=5)
        yield driver
        driver.close()

    def seen(self, first: int, n: int, executed: Any = None, fresh: bool | None = None) -> Ask:
        """Observe frames ``first`` .. ``first + n - 1``; actions are a function of the step they start from."""
        fresh = first == 0 if fresh is None else fresh
        if executed is None:
            executed = self.actions(64)[first if fresh else first - 1 : first + n - 1]
        arrays = {"image": self.images(first + n)[first:], "executed": executed}
        params: dict[str, Scalar] = {"first_step": first, "frames": n}
        return Ask({"observation": Payload(PayloadKind.OBSERVATION, arrays)}, Op.RECONDITION, first, params)

    def ahead(self, step: int, actions: Any, frames: int | None = None) -> Ask:
        """Predict under ``actions`` from ``step`` on."""
        count = len(actions) if frames is None else frames
        params: dict[str, Scalar] = {"frames": count, "steps": count, "first_step": step}
        return Ask({"actions": Payload(PayloadKind.ACTIONS, {"actions": actions})}, Op.PREDICT, step, params)

    def frames(self, outputs: Any) -> Float:
        return np.array(as_numpy(outputs[self.output].arrays[self.output]))

    def apart(self, one: Any, other: Any) -> float:
        """The greatest difference of two lists of frames."""
        return float(np.abs(one.astype(np.float64) - other).max())

    # The contract ---------------------------------------------------------------------------------------------

    def test_predicts_one_finite_frame_per_action(self, driver: Driver) -> None:
        driver.tick("s", 0, self.seen(0, 3))
        counts = (self.stride, min(3 * self.stride, self.max_predict), self.max_predict)
        for tick, n in enumerate(counts, start=1):
            frames = self.frames(driver.tick("s", tick, self.ahead(2, self.actions(n))))
            assert len(frames) == n
            assert np.isfinite(frames).all()
            assert all((a != b).any() for a, b in itertools.pairwise(frames))

    def test_an_action_leads_to_the_next_frame_and_to_none_before(self, driver: Driver) -> None:
        """An impulse in action i answers in frame i of the prediction, first of all. Nothing answers to an action that
        is not read."""
        driver.tick("s", 0, self.seen(0, 3))
        actions = self.actions(4)
        still = self.frames(driver.run("s", 1, self.ahead(2, actions)))
        driver.discard("s", 1)
        for i in range(4):
            pushed = actions.copy()
            pushed[i] = self.low + self.high - pushed[i]
            frames = self.frames(driver.run("s", 1, self.ahead(2, pushed)))
            driver.discard("s", 1)
            assert self.together or (frames[:i] == still[:i]).all()
            assert (frames[i] != still[i]).any() == self.steers
            assert self.steers or (frames == still).all()

    @pytest.mark.parametrize("where", ["last of the first call", "first of the second call"])
    def test_an_impulse_at_the_border_of_two_predictions(self, driver: Driver, where: str) -> None:
        driver.open("pushed", seed=5)
        first_of_second = 3 * self.stride
        actions, last = self.actions(2 * first_of_second), where.startswith("last")
        at = first_of_second - 1 if last else first_of_second
        pushed = actions.copy()
        pushed[at] = self.low + self.high - pushed[at]
        both = []
        for session, given in (("s", actions), ("pushed", pushed)):
            driver.tick(session, 0, self.seen(0, 3))
            first = self.frames(driver.tick(session, 1, self.ahead(2, given[:first_of_second])))
            ask = self.ahead(2 + first_of_second, given[first_of_second:])
            both.append(np.concatenate([first, self.frames(driver.tick(session, 2, ask))]))
        before = (0 if last else first_of_second) if self.together else at
        assert (both[0][:before] == both[1][:before]).all()
        assert (both[0][at] != both[1][at]).any() == self.steers

    def test_two_predictions_continue_like_one(self, driver: Driver) -> None:
        """The border is none to the world: only the noise is another."""
        for session in ("one", "two"):
            driver.open(session, seed=5)
            driver.tick(session, 0, self.seen(0, 3))
        n = 2 * self.stride
        actions = self.actions(2 * n if not self.together else n)
        one = self.frames(driver.tick("one", 1, self.ahead(2, actions)))
        two = self.frames(driver.tick("two", 1, self.ahead(2, actions[:n])))
        assert self.apart(one[:n], two) <= self.atol
        for session in ("one", "two"):  # the same noise, from here on
            driver.tick(session, 2, self.seen(3, 1))
        rest = [self.frames(driver.tick(s, 3, self.ahead(3, actions[:n]))) for s in ("one", "two")]
        assert self.apart(rest[0], rest[1]) <= self.atol

    def test_what_is_discarded_leaves_no_trace(self, driver: Driver) -> None:
        driver.tick("s", 0, self.seen(0, 3))
        blocks = driver.blocks
        want = self.frames(driver.run("s", 1, self.ahead(2, self.actions(4 * self.stride))))
        driver.discard("s", 1)
        assert driver.blocks == blocks
        driver.run("s", 1, self.ahead(2, self.actions(5 * self.stride, seed=9)))
        driver.discard("s", 1)
        driver.run("s", 1, self.seen(3, 2))
        driver.discard("s", 1)
        assert driver.blocks == blocks
        assert (self.frames(driver.tick("s", 1, self.ahead(2, self.actions(4 * self.stride)))) == want).all()

    @pytest.mark.parametrize("long", [False, True])
    def test_recondition_frees_what_was_imagined_and_commits_the_real_frames(self, driver: Driver, long: bool) -> None:
        """What follows is as if nothing had been imagined, however much was."""
        driver.open("straight", seed=5)
        for session in ("s", "straight"):
            driver.tick(session, 0, self.seen(0, 9))
        real = driver.blocks // 2
        driver.tick("s", 1, self.ahead(8, self.actions(self.max_predict if long else 2 * self.stride, seed=3)))
        driver.tick("s", 2, self.seen(9, 2))
        after = driver.blocks - real
        driver.tick("straight", 2, self.seen(9, 2))
        straight = driver.blocks - after
        assert after <= straight  # a long imagination may have pushed old real frames out
        assert long or after == straight
        want = self.frames(driver.tick("straight", 3, self.ahead(10, self.actions(3 * self.stride))))
        got = self.frames(driver.tick("s", 3, self.ahead(10, self.actions(3 * self.stride))))
        assert self.apart(got, want) <= self.atol

    def test_recondition_in_the_middle_of_what_was_imagined_keeps_what_lies_before(self, driver: Driver) -> None:
        if not (self.steers or self.remembers):
            pytest.skip("nothing of what was imagined can matter")
        driver.open("other", seed=5 if self.steers else 6)  # imagines otherwise
        for session, seed in (("s", 1), ("other", 2)):
            driver.tick(session, 0, self.seen(0, 3))
            driver.tick(session, 1, self.ahead(2, self.actions(4 * self.stride, seed)))
            driver.tick(session, 2, self.seen(6, 1, executed=self.actions(1)))
        ask = self.ahead(6, self.actions(2 * self.stride))
        frames = [self.frames(driver.tick(s, 3, ask)) for s in ("s", "other")]
        assert (self.apart(frames[0], frames[1]) > self.atol) == self.remembers

    def test_recondition_replaces_real_frames_too(self, driver: Driver) -> None:
        driver.open("straight", seed=5)
        driver.tick("s", 0, self.seen(0, 6))
        driver.tick("s", 1, self.seen(4, 2))
        driver.tick("straight", 0, self.seen(0, 4))
        driver.tick("straight", 1, self.seen(4, 2))
        ask = self.ahead(5, self.actions(2 * self.stride))
        got, want = (self.frames(driver.tick(s, 2, ask)) for s in ("s", "straight"))
        assert self.apart(got, want) <= self.atol

    def test_recondition_from_the_first_step_begins_anew(self, driver: Driver) -> None:
        driver.open("fresh", seed=5)
        driver.tick("s", 0, self.seen(0, 5))
        driver.tick("s", 1, self.ahead(4, self.actions(3 * self.stride)))
        for session in ("s", "fresh"):
            driver.tick(session, 2, self.seen(0, 3))
        ask = self.ahead(2, self.actions(2 * self.stride))
        got, want = (self.frames(driver.tick(s, 3, ask)) for s in ("s", "fresh"))
        assert (got == want).all()

    def test_a_session_may_begin_at_any_step(self, driver: Driver) -> None:
        """Steps count from wherever the client counts; the model does not care."""
        driver.open("later", seed=5)
        executed = self.actions(9)
        for session, first in (("s", 0), ("later", 40)):
            ask = self.seen(0, 3, executed[:2])
            driver.tick(session, 0, Ask(ask.inputs, ask.op, first, {"first_step": first, "frames": 3}))
            ask = self.seen(3, 2, executed[2:4])
            driver.tick(session, 1, Ask(ask.inputs, ask.op, first + 3, {"first_step": first + 3, "frames": 2}))
        ask = self.ahead(0, self.actions(2 * self.stride))
        got, want = (self.frames(driver.tick(s, 2, ask)) for s in ("later", "s"))
        assert (got == want).all()

    def test_noise_is_a_function_of_seed_epoch_and_tick(self, driver: Driver) -> None:
        driver.open("same", seed=5)
        driver.open("other", seed=6)
        frames, ask = {}, self.ahead(2, self.actions(2 * self.stride))
        for session in ("s", "same", "other"):
            driver.tick(session, 0, self.seen(0, 3))
            frames[session] = self.frames(driver.run(session, 1, ask))
            driver.discard(session, 1)
        assert (frames["s"] == frames["same"]).all()
        assert (frames["s"][0] != frames["other"][0]).any()
        later = self.frames(driver.run("s", 2, ask))
        driver.discard("s", 2)
        assert (frames["s"][0] != later[0]).any()
        driver.reset("s")
        driver.tick("s", 0, self.seen(0, 3))
        anew = self.frames(driver.tick("s", 1, ask))
        assert (frames["s"][0] != anew[0]).any()

    def test_sessions_of_one_batch_do_not_touch(self, driver: Driver) -> None:
        driver.open("other", seed=6)
        driver.tick("s", 0, self.seen(0, 3))
        driver.tick("other", 0, self.seen(0, 2))
        ask, more = self.ahead(2, self.actions(3 * self.stride)), self.ahead(1, self.actions(5 * self.stride, seed=2))
        (alone,) = driver.batch(1, {"s": ask})
        beside = driver.batch(1, {"other": more, "s": ask})
        assert not isinstance(alone, Exception)
        assert not isinstance(beside[1], Exception)
        assert self.apart(self.frames(beside[1]), self.frames(alone)) <= self.atol
        broken = Ask({"actions": Payload(PayloadKind.ACTIONS, {"actions": self.actions(1)[:, :1]})}, Op.PREDICT, 1)
        results = driver.batch(1, {"other": broken, "s": ask})
        assert isinstance(results[0], OmniLoopError)
        assert not isinstance(results[1], Exception)
        assert self.apart(self.frames(results[1]), self.frames(alone)) <= self.atol

    def test_nothing_is_padded_or_truncated(self, driver: Driver) -> None:
        driver.tick("s", 0, self.seen(0, 3))
        n = 2 * self.stride
        wide, many = np.zeros((n, self.action_dim + 1), np.float32), self.actions(self.max_predict + self.stride)
        wrong = {
            "too few executed": self.seen(3, 2, self.actions(1)),
            "too many executed": self.seen(3, 2, self.actions(3)),
            "executed of another width": self.seen(3, 2, wide[:2]),
            "executed of one axis": self.seen(3, 2, self.actions(2)[0]),
            "an action before the first frame": self.seen(0, 2, self.actions(2)),
            "no frame": self.seen(3, 0, self.actions(0)),
            "more frames than a tick may hold": self.seen(3, 60, self.actions(60)),
            "actions of another width": self.ahead(2, wide),
            "actions of one axis": self.ahead(2, self.actions(1)[0]),
            "no action": self.ahead(2, self.actions(0)),
            "more frames than actions": self.ahead(2, self.actions(n), frames=n + self.stride),
            "more frames than can be predicted": self.ahead(2, many),
        }
        if self.steers:
            wrong["no actions at all"] = Ask({}, Op.PREDICT, 2, {"frames": n, "steps": n})
        if self.stride > 1:
            wrong["actions that fill no whole stride"] = self.ahead(2, self.actions(n + 1))
        blocks = driver.blocks
        want = self.frames(driver.run("s", 1, self.ahead(2, self.actions(n))))
        driver.discard("s", 1)
        for name, ask in wrong.items():
            with pytest.raises(InvalidInput):
                pytest.fail(f"accepted: {name} {driver.run('s', 1, ask)}")
        for name, ask in {"a gap": self.seen(5, 1), "after a far future": self.seen(60, 1, self.actions(1))}.items():
            with pytest.raises(StateError):
                pytest.fail(f"accepted: {name} {driver.run('s', 1, ask)}")
        assert driver.blocks == blocks
        assert (self.frames(driver.tick("s", 1, self.ahead(2, self.actions(n)))) == want).all()

    def test_what_is_shown_on_the_way_is_of_the_whole_and_changes_nothing(self, driver: Driver) -> None:
        if not isinstance(driver.stage, StreamingStage):
            pytest.skip("this world shows nothing before it is done")
        driver.open("watched", seed=5)
        n = self.watched
        for session in ("s", "watched"):
            driver.tick(session, 0, self.seen(0, 3))
        for tick in (1, 2):
            step = 2 + n * (tick - 1)
            want = self.frames(driver.tick("s", tick, self.ahead(step, self.actions(n))))
            parts, outputs = driver.watch("watched", tick, self.ahead(step, self.actions(n)), self.output)
            driver.commit("watched", tick)
            assert (self.frames(outputs) == want).all()
            assert parts
            firsts = [int(part.meta["first_step"]) for part in parts]
            assert firsts == sorted(firsts)
            for part, first in zip(parts, firsts, strict=True):
                frames = self.frames({self.output: part})
                at = first - step - 1
                assert 0 <= at < at + len(frames) <= n
                same = (frames == want[at : at + len(frames)]).all()
                assert same != bool(part.meta.get("preview", False))

    def test_predicting_before_anything_was_seen_is_refused(self, driver: Driver) -> None:
        with pytest.raises(StateError):
            driver.run("s", 0, self.ahead(0, self.actions(2 * self.stride)))
        driver.tick("s", 0, self.seen(0, 1))
        driver.tick("s", 1, self.ahead(0, self.actions(2 * self.stride)))

    def test_a_rollout_has_no_last_frame(self, driver: Driver) -> None:
        driver.tick("s", 0, self.seen(0, 3))
        n, held = min(8, self.max_predict) // self.stride * self.stride, []
        for tick in range(self.rollout_frames // n):
            frames = self.frames(driver.tick("s", tick + 1, self.ahead(2 + n * tick, self.actions(n, seed=tick))))
            assert np.isfinite(frames).all()
            held.append(driver.blocks)
        settled = held[len(held) // 3 :]
        assert min(settled) == max(settled)
        step = 2 + n * len(held)
        driver.tick("s", 999, self._lone(step + 1))
        assert driver.blocks <= max(settled)
        if self.remembers:
            with pytest.raises(StateError):
                driver.run("s", 1000, self._lone(step // 2))  # long gone

    def _lone(self, first: int) -> Ask:
        ask = self.seen(1, 1, self.actions(1))
        return Ask(ask.inputs, ask.op, first, {"first_step": first, "frames": 1})
