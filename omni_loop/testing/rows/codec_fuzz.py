"""Row B1: whatever bytes come, the codec gives a sound value or a typed refusal, at once and in little memory."""

from __future__ import annotations

from pathlib import Path

from ..fuzz.campaign import Campaign, Corpus, read_corpus

INPUTS, SCALED = 1_000_000, 20_000
CORPUS = Path(__file__).parents[3] / "tests" / "fuzz" / "corpus" / "codec.jsonl"


def measure(seed: int, full: bool) -> float:
    """Inputs that were decoded."""
    return Campaign(seed, corpus()).run(INPUTS if full else SCALED).inputs


def corpus() -> Corpus:
    """What earlier campaigns found, where this is a checkout; an installed package makes do with its own seeds."""
    return read_corpus(CORPUS) if CORPUS.is_file() else {}
