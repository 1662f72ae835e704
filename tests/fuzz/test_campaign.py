"""The fuzzer itself: it repeats what a seed drew, and finds what is wrong with a target."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
import pytest

from omni_loop.errors import InvalidInput
from omni_loop.testing.board import Broken
from omni_loop.testing.fuzz import targets
from omni_loop.testing.fuzz.campaign import MOST_BYTES, Campaign, hold, read_corpus, traced_bytes, write_corpus
from omni_loop.testing.fuzz.targets import TARGETS, Target, check_value
from omni_loop.testing.rows.codec_fuzz import corpus
from omni_loop.testing.toy_core import SPEC
from omni_loop.types import Observation
from omni_loop.wire import codec
from omni_loop.wire import loop_pb2 as pb

BY_NAME = {target.name: target for target in TARGETS}
BUSY_S = 0.012


@pytest.mark.parametrize("name", BY_NAME)
def test_the_committed_corpus_keeps_the_contract(name: str) -> None:
    inputs = corpus().get(name, [])
    for raw in inputs:
        hold(BY_NAME[name], raw)
    if inputs:
        assert max(traced_bytes(BY_NAME[name], raw) for raw in inputs[:20]) < MOST_BYTES


def test_the_corpus_is_there() -> None:
    inputs = corpus()
    assert sum(map(len, inputs.values())) > 100
    assert len(inputs) >= 5


def test_the_seeds_of_every_target_are_taken() -> None:
    seeds = targets.seeds()
    assert seeds.keys() == BY_NAME.keys()
    for name, raws in seeds.items():
        assert hold(BY_NAME[name], raws[0]) is None, name


def test_a_seed_draws_the_same_again() -> None:
    runs = []
    for seed in (5, 5, 6):
        campaign = Campaign(seed)
        campaign.run(3000)
        runs.append((campaign.found, campaign.report.accepted))
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert runs[0][0], "something new was found"


def test_a_campaign_takes_and_refuses() -> None:
    report = Campaign(1).run(5000)
    assert report.inputs > 5000
    assert min(report.accepted, report.refused) > report.inputs / 20


def infer(run: Any) -> list[Target]:
    return [Target("infer", pb.InferRequest, run)]


def decoded(raw: bytes) -> Observation:
    value: Observation = BY_NAME["infer"].run(raw)
    return value


def untyped(raw: bytes) -> Any:
    value = decoded(raw)
    if value.captured_ns > 100:
        raise KeyError("captured_ns")
    return value


def not_finite(raw: bytes) -> Any:
    value = decoded(raw)
    if value.step > 3:
        return Observation(1, 0, {**value.arrays, "agent_pos": np.full((2, 2), np.nan, np.float32)})
    return value


def slow(raw: bytes) -> Any:
    value = decoded(raw)
    if value.previews:
        until = thread_time() + BUSY_S
        while thread_time() < until:
            pass
    return value


def hungry(raw: bytes) -> Any:
    np.empty(MOST_BYTES + 1, np.uint8)  # not touched: only who asks for it knows
    return decoded(raw)


def leaky(raw: bytes) -> Any:
    raise InvalidInput('Traceback: File "x.py"')


@pytest.mark.parametrize(
    ("run", "says"),
    [
        (untyped, "KeyError: 'captured_ns'"),
        (not_finite, "agent_pos with nan was accepted"),
        (slow, r"it took \d+\.\d ms"),
        (hungry, "MiB"),
        (leaky, "a refusal that shows code"),
    ],
)
def test_what_is_wrong_with_a_target_is_found(run: Any, says: str) -> None:
    with pytest.raises(Broken, match=says) as found:
        Campaign(3, wanted=infer(run)).run(20_000)
    assert "of seed 3" in str(found.value)


def test_a_refusal_that_is_not_the_targets_own_is_found() -> None:
    """A server's codec must not answer a stranger's bytes as if a stage had failed."""
    from omni_loop.errors import StageFailed

    def wrong(raw: bytes) -> Any:
        raise StageFailed("what a client may be told")

    with pytest.raises(Broken, match="StageFailed"):
        hold(infer(wrong)[0], b"")


@pytest.mark.parametrize(
    "value",
    [
        codec.Predict(0, None, 1, 0.0),
        codec.Predict(1, np.full((1, 2), 513, np.float32), 0, 0.0),
        codec.Predict(1, None, 1, float("nan")),
        codec.Plan(1, SPEC.max_predict + 1, 1, 1, "cem", 0.0, None, None, 0.0),
        Observation(1, 0, {}),
    ],
)
def test_values_that_break_their_promises_are_found(value: Any) -> None:
    with pytest.raises(Broken):
        check_value(value)


def test_a_corpus_is_read_as_it_was_written(tmp_path: Path) -> None:
    inputs = [("infer", b"\xff\0"), ("plan", b""), ("infer", b"a")]
    write_corpus(tmp_path / "c.jsonl", inputs)
    assert read_corpus(tmp_path / "c.jsonl") == {"infer": [b"a", b"\xff\0"], "plan": [b""]}


def test_every_process_draws_the_same_inputs() -> None:
    """Neither hashes of texts nor addresses have a say, so that a seed that was printed finds its input again."""
    script = (
        "from hashlib import sha256\n"
        "from omni_loop.testing.fuzz.campaign import Campaign\n"
        "campaign = Campaign(5)\n"
        "report = campaign.run(1500)\n"
        "print(sha256(b'|'.join(raw for _, raw in campaign.found)).hexdigest(), report.accepted, report.novel)\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1]
