"""Schemathesis over the OpenAPI: whatever is sent, the admin answers as its schema says, and never with a 5xx."""

from __future__ import annotations

import asyncio

import pytest

from .conftest import Start

schemathesis = pytest.importorskip("schemathesis")


async def test_the_schema_holds(running: Start) -> None:
    from omni_loop.testing.rows.config import admin_failures

    async with running() as up:
        tried, failures = await asyncio.to_thread(admin_failures, up.url, 20)
    assert not failures, failures
    assert tried >= 7
