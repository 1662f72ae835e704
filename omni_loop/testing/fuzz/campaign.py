"""Many inputs, each held to the contract of its target, to its time and to its memory."""

from __future__ import annotations

import base64
import json
import random
import re
import tracemalloc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

from ...errors import OmniLoopError
from ...wire import codec
from ..board import Broken, expect
from ..memory import MIB, reset_resident, resident_peak
from . import targets
from .lines import Lines
from .mutator import Mutator
from .targets import Target

MOST_S = 0.010  # of processor time for one input
MOST_BYTES = 64 * MIB  # besides what was held before
TRACED = 64  # one input of so many is traced for memory; all count for the process's peak
KEPT = 4096  # inputs of one target that are mutated further
_SLICE = 1024  # inputs between two looks at the process's peak

_QUOTED = re.compile(r"(?<![a-z])'[^']*'?|\"[^\"]*\"?")
_PHRASE = re.compile(r"[a-z ]{9,24}")  # tells refusals of one kind from another

Corpus = Mapping[str, Sequence[bytes]]


@dataclass
class Report:
    """``novel``: inputs that ran a line of the codec no input before had run, or were refused in new words."""

    inputs: int = 0
    accepted: int = 0
    refused: int = 0
    slowest_s: float = 0.0
    novel: int = 0


class Campaign:
    """Seeded: the same corpus, seed and code draw the same inputs. ``corpus`` is added to the targets' own seeds."""

    def __init__(self, seed: int, corpus: Corpus | None = None, wanted: Sequence[Target] = targets.TARGETS) -> None:
        self.report = Report()
        self.found: list[tuple[str, bytes]] = []  # what reached something new
        self._seed = seed
        self._draw = random.Random(seed)
        self._mutator = Mutator(self._draw)
        self._targets = wanted
        self._seeds = targets.seeds()
        self._pools = {name: [*raws, *(corpus or {}).get(name, ())] for name, raws in self._seeds.items()}
        self._lines = Lines("omni_loop/wire/")
        self._refusals: set[tuple[str, str]] = set()

    def run(self, count: int) -> Report:
        """The pools as they are, then ``count`` drawn inputs. Raises :class:`~..board.Broken` with the first input that
        breaks its contract."""
        with self._lines.watched():
            for target in self._targets:
                for raw in self._pools[target.name]:
                    self._take(target, raw, traced=False)
            base = reset_resident()
            for number in range(count):
                self._one(number)
                if number % _SLICE == 0:
                    grown = resident_peak() - base
                    expect(grown < MOST_BYTES, f"the process grew by {grown >> 20} MiB within {number} inputs")
        return self.report

    def _one(self, number: int) -> None:
        draw = self._draw
        target = self._targets[int(draw.random() * len(self._targets))]
        pool = self._pools[target.name]
        first = pool if draw.random() < 0.5 else self._seeds[target.name]  # found ones are mostly refused ones
        raw = first[int(draw.random() * len(first))]
        other = pool[int(draw.random() * len(pool))]
        raw = self._mutator.mutate(raw, other, target.kind)
        before = self._lines.count + len(self._refusals)
        self._take(target, raw, traced=number % TRACED == 0)
        if self._lines.count + len(self._refusals) > before:
            self.report.novel += 1
            self.found.append((target.name, raw))
            if len(pool) < KEPT:
                pool.append(raw)

    def _take(self, target: Target, raw: bytes, traced: bool) -> None:
        report = self.report
        report.inputs += 1
        began = thread_time()
        try:
            refusal = hold(target, raw)
            took = thread_time() - began
            if took > MOST_S:  # a collection, or the first image: what is slow is slow again
                took = min(_timed(target, raw) for _ in range(3))
                expect(took <= MOST_S, f"it took {1e3 * took:.1f} ms")
            if traced:
                used = traced_bytes(target, raw)
                expect(used < MOST_BYTES, f"it took {used >> 20} MiB")
        except Broken as e:
            number = report.inputs
            raise Broken(f"{target.name}, input {number} of seed {self._seed}: {e} (base64 {_shown(raw)})") from e
        report.slowest_s = max(report.slowest_s, took)
        report.accepted += refusal is None
        report.refused += refusal is not None
        if refusal is not None:
            phrase = _PHRASE.search(_QUOTED.sub("", refusal))
            self._refusals.add((target.name, phrase.group() if phrase else ""))


def hold(target: Target, raw: bytes) -> str | None:
    """The words of the refusal, None when ``raw`` is accepted. Raises :class:`~..board.Broken` for anything but a
    sound value or a typed error that can be sent."""
    try:
        value = target.run(raw)
    except target.errors as error:
        return check_refusal(error)
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {str(error)[:200]}") from error
    targets.check_value(value)
    return None


def check_refusal(error: OmniLoopError) -> str:
    """Its words: it can be sent, and shows no insides."""
    text = codec.encode_error(error).text
    expect(bool(text) or not error.text, "a refusal without words")
    expect("Traceback" not in text and 'File "' not in text, f"a refusal that shows code: {text}")
    return text


def traced_bytes(target: Target, raw: bytes) -> int:
    """Most bytes held besides, while ``raw`` is decoded."""
    tracemalloc.start()
    try:
        hold(target, raw)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _timed(target: Target, raw: bytes) -> float:
    began = thread_time()
    hold(target, raw)
    return thread_time() - began


def _shown(raw: bytes) -> str:
    text = base64.b64encode(raw[:2048]).decode()
    return text if len(raw) <= 2048 else f"{text}..., {len(raw)} bytes"


def read_corpus(path: Path) -> dict[str, list[bytes]]:
    """Inputs by target, of lines ``{"target", "input"}`` in base64."""
    found: dict[str, list[bytes]] = {}
    for line in path.read_text().splitlines():
        values = json.loads(line)
        found.setdefault(values["target"], []).append(base64.b64decode(values["input"]))
    return found


def write_corpus(path: Path, inputs: Iterable[tuple[str, bytes]]) -> None:
    lines = [json.dumps({"target": name, "input": base64.b64encode(raw).decode()}) for name, raw in sorted(inputs)]
    path.write_text("".join(f"{line}\n" for line in lines))
