"""The gate: every planted bug is found by the check that is named for it, which passes on the product as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from omni_loop.errors import OmniLoopError
from omni_loop.testing.board import Broken
from omni_loop.testing.rows import bed, long

from .mutants import MUTANTS as STATE_MUTANTS
from .mutants import Mutant
from .session_mutants import SESSION_MUTANTS

MUTANTS = (*STATE_MUTANTS, *SESSION_MUTANTS)
CHECKS: dict[str, Callable[[], None]] = {mutant.found_by: mutant.check for mutant in MUTANTS}
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug may leave somebody without an answer."""
    monkeypatch.setattr(bed, "ANSWER_S", 10.0)
    monkeypatch.setattr(long, "SCALED", long.SCALED / 5)


@pytest.mark.parametrize("name", CHECKS)
def test_the_product_as_it_is_passes(name: str) -> None:
    CHECKS[name]()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.bug.replace(" ", "-"))
def test_a_planted_bug_is_found(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutant.owner, mutant.name, mutant.change(getattr(mutant.owner, mutant.name)))
    with pytest.raises((Broken, AssertionError, OmniLoopError, pytest.fail.Exception)) as found:
        mutant.check()
    print(f"{mutant.bug}: {type(found.value).__name__}: {found.value}")
    del found  # its frames hold what is broken


def test_there_are_enough_of_them() -> None:
    assert len({mutant.bug for mutant in MUTANTS}) == len(MUTANTS)
    assert len(STATE_MUTANTS) >= 16
    assert len(SESSION_MUTANTS) >= 12
