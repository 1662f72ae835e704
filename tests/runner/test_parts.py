"""Stages run on parts beside their sessions' order, and stages that a discard ends between two passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from omni_loop.errors import Reason
from omni_loop.messages import Commit, Discard, PayloadKind, Receipt, RunStage
from omni_loop.stage import Outputs, Payload, StageItem, StateSpec, one_by_one
from omni_loop.types import Op, StageKind

from .batch_toys import Bed, Clock, Stepped, Walk, error_of

DISCARD = ("p/s",)


class Showing(Stepped):
    """Shows what is left after every pass; with the parameter ``bad`` something that is not finite."""

    def parts(self, job: Walk) -> Sequence[Outputs]:
        value = np.float32("nan") if job.item.params.get("bad") else np.float32(job.left)
        return [{"left": Payload(PayloadKind.LATENTS, {"latents": value[None]})}]


class Look:
    """Without state: doubles. Each run takes ``pass_ms`` of the bed's clock."""

    kind, revision = StageKind.DECODE, "look-1"

    def __init__(self, clock: Clock, pass_ms: float = 0.0) -> None:
        self.clock, self.pass_ms = clock, pass_ms
        self.runs: list[list[float]] = []

    def state_specs(self) -> Mapping[str, StateSpec]:
        return {}

    def run(self, items: Sequence[StageItem]) -> Sequence[Outputs | Exception]:
        self.clock.now += int(self.pass_ms * 1e6)
        self.runs.append([float(item.inputs["x"].arrays["latents"][0]) for item in items])
        return one_by_one(self._one, items)

    def _one(self, item: StageItem) -> Outputs:
        x = np.asarray(item.inputs["x"].arrays["latents"])
        return {"y": Payload(PayloadKind.LATENTS, {"y": 2 * x})}

    def warm_up(self) -> None:
        pass


def bed(pass_ms: float = 10.0, look_ms: float = 10.0) -> tuple[Bed, Showing, Look]:
    clock = Clock()
    stage, look = Showing(clock, pass_ms), Look(clock, look_ms)
    made = Bed({"p/s": lambda: stage, "p/look": lambda: look}, clock=clock)
    made.open("x", "y")
    stage.log.clear()
    return made, stage, look


def watched(made: Bed, session: str, passes: int, tick: int = 1) -> RunStage:
    return replace(made.run(session, tick, "p/s", passes=passes), streams=("left",))


def look_at(receipt: Receipt, part: int) -> RunStage:
    key = receipt.key
    return RunStage(key.session, key.epoch, key.tick, "p/look", Op.INFER, 0, {"x": receipt}, part=part)


def clean(made: Bed, session: str, tick: int = 1) -> None:
    made.connector.cleanup_session(session)
    made.now(Commit(session, 0, tick, ("p/s",)))


def test_every_pass_but_the_last_is_shown_when_somebody_wants_it() -> None:
    made, _, _ = bed()
    plain = made.add(made.run("y", 1, "p/s", passes=4))
    shown = made.add(watched(made, "x", 4))
    made.work()
    assert [(p.request, p.part) for p in made.parts] == [(shown, 1), (shown, 2), (shown, 3)]
    lefts = [made.connector.get(p.outputs["left"]).arrays["latents"][0] for p in made.parts]
    assert lefts == [3, 2, 1]
    assert [p.outputs["left"].key.part for p in made.parts] == [1, 2, 3]
    assert made.y(plain)
    clean(made, "x")
    clean(made, "y")
    made.close()


def test_a_part_is_run_beside_its_session_and_takes_a_share_of_the_time() -> None:
    made, _, look = bed()
    drawn = made.add(watched(made, "x", 40))
    asked: dict[int, int] = {}
    meanwhile: list[list[float]] = []
    while made.batcher.wait_s() == 0.0:
        if drawn not in made.answers:
            meanwhile = list(look.runs)
        known = len(made.parts)
        made.step()
        for part in made.parts[known:]:
            asked[made.add(look_at(part.outputs["left"], part.part))] = part.part
    assert meanwhile[0] == [39]  # the first at once
    assert all(len(run) == 1 for run in meanwhile)
    assert 3 <= len(meanwhile) <= 6  # a tenth of the time of 40 passes, at 10 ms like a pass
    assert sum(len(made.done(request).outputs) for request in asked) == 39
    assert sum(map(len, look.runs)) == 39  # the rest when nothing else was due
    clean(made, "x")
    made.close()


def test_parts_wait_for_nobody_when_nothing_else_is_due() -> None:
    made, _, look = bed()
    key = made.run("x", 1, "p/s").inputs["observation"].key
    parts = []
    for number in range(1, 5):
        payload = Payload(PayloadKind.LATENTS, {"latents": np.full(1, number, np.float32)})
        receipt = made.connector.put(replace(key, edge="a", part=number), payload)
        parts.append(made.add(look_at(receipt, number)))
    made.work()
    assert look.runs == [[1, 2, 3, 4]] or [r for run in look.runs for r in run] == [1, 2, 3, 4]
    assert [made.connector.get(made.done(p).outputs["y"]).arrays["y"][0] for p in parts] == [2, 4, 6, 8]
    made.connector.cleanup_session("x")
    made.close()


def test_the_whole_makes_parts_that_wait_superfluous() -> None:
    made, _, look = bed()
    key = made.run("x", 1, "p/s").inputs["observation"].key
    receipt = made.connector.put(
        replace(key, edge="a"), Payload(PayloadKind.LATENTS, {"latents": np.zeros(1, np.float32)})
    )
    part = made.add(look_at(receipt, 1))
    whole = made.add(replace(look_at(receipt, 1), part=0))
    made.work()
    assert not made.done(part).outputs
    assert made.done(whole).outputs
    assert look.runs == [[0.0]]
    made.connector.cleanup_session("x")
    made.now(Commit("x", 0, 1, ("p/look",)))
    made.close()


def test_a_part_that_is_not_finite_fails_its_item_alone() -> None:
    made, _, _ = bed()
    bad = made.add(replace(watched(made, "x", 4), params={"passes": 4, "bad": True}))
    good = made.add(watched(made, "y", 4))
    made.work()
    assert error_of(made.answers[bad])[1] == Reason.BAD_OUTPUT
    assert made.y(good)
    clean(made, "y")
    made.connector.cleanup_session("x")
    made.close()


def test_a_stage_with_state_is_not_run_on_a_part() -> None:
    made, _, _ = bed()
    refused = made.add(replace(made.run("x", 1, "p/s"), part=1))
    nowhere = made.add(replace(made.run("x", 1, "p/none"), part=1))
    made.work()
    assert "has state, so that it cannot run on parts" in made.failed(refused).text
    assert error_of(made.answers[nowhere])[1] == Reason.UNKNOWN_NAME
    made.connector.cleanup_session("x")
    made.close()


@pytest.mark.parametrize("steps", range(4))
def test_a_discard_ends_a_stage_between_two_passes(steps: int) -> None:
    made, stage, _ = bed()
    run, other = made.add(made.run("x", 1, "p/s", passes=50)), made.add(made.run("y", 1, "p/s", passes=3))
    for _ in range(steps):
        made.step()
    discard = made.add(Discard("x", 0, 1, DISCARD))
    made.work()
    assert error_of(made.answers[run])[1] == Reason.CANCELLED
    assert made.done(discard)
    assert made.y(other)
    assert sum("x" in passed for passed in stage.log) <= steps
    again = made.add(made.run("x", 1, "p/s", passes=3))
    made.work()
    assert made.y(again) == made.y(other)  # no trace of the first
    for session in "xy":
        clean(made, session)
    made.close()


def test_a_discard_behind_a_commit_ends_nothing() -> None:
    made, _, _ = bed()
    run = made.add(made.run("x", 1, "p/s", passes=5))
    made.step()
    commit, discard = made.commit("x", 1, "p/s"), made.add(Discard("x", 0, 1, DISCARD))
    made.work()
    assert made.y(run)
    assert made.done(commit)
    assert made.done(discard)
    made.connector.cleanup_session("x")
    made.close()
