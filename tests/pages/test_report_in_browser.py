# SPDX-License-Identifier: Apache-2.0
"""The report in a real browser: what is seen at once, on a phone and in the dark, and with a keyboard alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.result_rows import contest_rows, page_of, pull_row, rows
from pages.browsing import has_no_sideways_scroll, marks, violations, visited
from playwright.async_api import Browser

pytestmark = marks
_CROSSED = """[...document.querySelectorAll(".mark")].filter(mark => mark.getBoundingClientRect().right + 1 <
  mark.parentElement.querySelector(".bar i").getBoundingClientRect().right).map(mark => mark.outerHTML)"""


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
async def test_the_report(browser: Browser, tmp_path: Path, scheme: str, width: int) -> None:
    page_of(tmp_path, [*rows(), *contest_rows(100, 400), pull_row()])
    page, complaints = await visited(browser, (tmp_path / "report.html").as_uri(), scheme, width)
    assert await page.get_by_text("4.0 times as fast as NIXL").first.is_visible()
    assert await page.get_by_text("other processes took 12.5% of all CPU time").first.is_visible()
    assert await page.get_by_text("Where the time of a handoff goes").first.is_visible()
    assert not await page.get_by_text("make peers").is_visible()
    assert await violations(page) == []
    for number in range(await page.locator("summary").count()):
        await page.locator("summary").nth(number).press("Enter")
    assert await page.get_by_text("make peers").is_visible()
    assert await has_no_sideways_scroll(page)
    assert await violations(page) == []
    assert await page.evaluate(_CROSSED) == [], "a bar is longer than its limit"
    assert complaints == []
    await page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)
