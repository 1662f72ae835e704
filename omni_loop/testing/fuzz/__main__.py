"""``python -m omni_loop.testing.fuzz COUNT [SEED]``: a campaign; what it finds joins the corpus of the checkout."""

from __future__ import annotations

import random
import sys

from ..rows.codec_fuzz import CORPUS, corpus
from .campaign import Campaign, write_corpus

MOST_BYTES = 1024  # of one that is kept; a longer one is found again


def main(count: int, seed: int) -> None:
    known = corpus()
    campaign = Campaign(seed, known)
    try:
        print(campaign.run(count))
    finally:
        old = [(name, raw) for name, raws in known.items() for raw in raws]
        CORPUS.parent.mkdir(parents=True, exist_ok=True)
        write_corpus(CORPUS, {*old, *((name, raw) for name, raw in campaign.found if len(raw) <= MOST_BYTES)})
        print(f"{len(campaign.found)} inputs found; the corpus is {CORPUS}")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else random.getrandbits(31))
