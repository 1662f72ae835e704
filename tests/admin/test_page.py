"""The live page in Chromium: a session appears with its latency and both pictures, and leaves when it is closed."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from omni_loop.client import connect_async

from .conftest import Start, arrays

playwright = pytest.importorskip("playwright.async_api")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
expect = playwright.expect
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; $CHROMIUM may say where one is")


@asynccontextmanager
async def browsing(url: str) -> AsyncIterator[tuple[Any, list[str]]]:
    """A page, and what its console complains about."""
    complaints: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = await browser.new_page(viewport={"width": 960, "height": 420})
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            await page.goto(url)
            yield page, complaints
        finally:
            await browser.close()


async def test_the_live_page(running: Start) -> None:
    async with running() as up, connect_async(up.server.address) as client, browsing(up.url) as (page, complaints):
        await expect(page.locator("#state")).to_have_text("0 sessions")
        session = await client.open("toy", seed=1)
        await expect(page.locator(".session b")).to_have_text(session.id)
        await session.infer(arrays(7), 0, frames=3)
        await session.infer(arrays(200), 2, frames=3)
        for which in ("observed", "predicted"):
            await expect(page.locator(f"figcaption.{which}")).to_have_text(f"{which}, step 2")
            await expect(page.locator(f"img.{which}")).to_have_js_property("naturalWidth", 8)
        await expect(page.locator(".latency")).to_contain_text("ms")
        await session.close()
        await expect(page.locator(".session")).to_have_count(0)
        assert complaints == []


async def test_a_server_that_is_gone_is_said(running: Start) -> None:
    async with running() as up, browsing(up.url) as (page, _):
        await expect(page.locator("#state")).to_have_text("0 sessions")
        await up.server.endpoints[0].stop(1.0)
        await expect(page.locator("#state")).to_contain_text("not reachable")
