"""The two clients offer the same calls with the same arguments."""

import inspect

import pytest

from omni_loop.client import AsyncClient, AsyncSession, Client, Session


def calls(kind: type) -> dict[str, list[tuple[str, object, object]]]:
    return {
        name: [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]
        for name, member in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_")
    }


@pytest.mark.parametrize(
    ("blocking", "awaited", "more"), [(Client, AsyncClient, ()), (Session, AsyncSession, ("resuming", "stream"))]
)
def test_the_same_calls(blocking: type, awaited: type, more: tuple[str, ...]) -> None:
    theirs = calls(awaited)
    assert {name: theirs[name] for name in theirs if name not in more} == calls(blocking)
    assert set(more) < set(theirs)
