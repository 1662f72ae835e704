"""What a text says of a name that is not known."""

import difflib

import pytest

from omni_loop.errors import nearest


def test_the_nearest_name_else_all() -> None:
    assert nearest("push", ["pusht", "walk"]) == " Did you mean 'pusht'?"
    assert nearest("?", ["b", "a"]) == " Known: a, b."
    assert nearest("?", []) == " Known: none."


def test_a_long_name_is_cut_before_it_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    match = difflib.get_close_matches

    def watched(name: str, names: list[str], n: int, cutoff: float) -> list[str]:
        compared.append(name)
        return match(name, names, n, cutoff)

    monkeypatch.setattr(difflib, "get_close_matches", watched)
    assert nearest("p" * 20_000_000, ["pusht"]) == " Known: pusht."
    assert compared == ["p" * 64]
