# SPDX-License-Identifier: Apache-2.0
"""Opens pages in a real browser, and asks axe-core what people with disabilities cannot use there."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from playwright.async_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
marks = [
    pytest.mark.verify,
    pytest.mark.skipif(
        CHROMIUM is None, reason="no chromium: .ci/system-packages python3 page (or apt-get install chromium)"
    ),
]

ARGUMENTS = [
    "--no-sandbox",  # tests run as root in containers
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


async def visited(
    browser: Browser, url: str, scheme: str = "light", width: int = 1280, without: str | None = None
) -> tuple[Page, list[str]]:
    """The page, and what it complains of. Files whose address matches `without` are missing."""
    page = await browser.new_page(color_scheme=scheme, viewport={"width": width, "height": 900})  # type: ignore[arg-type]
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    if without is not None:
        await page.route(without, lambda route: route.abort())
    await page.goto(url)
    return page, complaints


async def has_no_sideways_scroll(page: Page) -> bool:
    return bool(await page.evaluate("document.documentElement.scrollWidth <= innerWidth"))


async def violations(page: Page) -> list[str]:
    """Returns what axe-core finds against WCAG 2.2 A and AA, and its best practices: rule and place."""
    axe = pytest.importorskip("axe_playwright_python.async_playwright", reason="no axe-core: make test-pages")
    found: Any = await axe.Axe().run(page)
    return [
        f"{rule['id']}: {node['target']} {node.get('failureSummary', '')}"
        for rule in found.response["violations"]
        for node in rule["nodes"]
    ]
