# SPDX-License-Identifier: Apache-2.0
"""The status page in a real browser: what it shows, in light and dark, and that foreign text stays text."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from control.cards import make_card
from playwright.async_api import Browser, Page, async_playwright

from kvlink.control import CoordinatorClient
from kvlink.control.overview import Beat, FailureCount, LinkReport, WorkerReport
from kvlink.coordinator import Coordinator
from kvlink.monitoring.status_page.serving import serve_status_page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
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
EVIL = "<img src=x onerror=\"window.pwned='yes'\"><script>window.pwned='yes'</script>"
MIB = 1 << 20


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(lease_s=600)
    await coordinator.start()
    yield coordinator
    await coordinator.close()


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        context = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield context
        await context.close()


async def opened(browser: Browser, url: str, scheme: str = "light") -> tuple[Page, list[str]]:
    """The page after its first stats, and what it complains of."""
    page = await browser.new_page(color_scheme=scheme, viewport={"width": 1280, "height": 900})  # type: ignore[arg-type]
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    await page.goto(url)
    await page.wait_for_function("document.getElementById('state').textContent !== 'waiting'")
    return page, complaints


async def join(coordinator: Coordinator, *names: str) -> None:
    async with CoordinatorClient(coordinator.address) as client:
        for name in names:
            await client.join(make_card(name))


def note(coordinator: Coordinator, worker: str, link: LinkReport, *failures: FailureCount) -> None:
    report = WorkerReport(
        7,
        0.25,
        4096,
        120,
        1000,
        400,
        390,
        2,
        1,
        1,
        num_links=1,
        links=(link,),
        failures=failures,
        transfers=link.transfers,
        received_bytes=link.bytes,
    )
    coordinator._reports.note("", Beat(worker, 1, report))


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_workers_links_leases_and_errors(
    coordinator: Coordinator, browser: Browser, scheme: str, tmp_path: Path
) -> None:
    now = 0.0
    coordinator._reports._clock = lambda: now
    await join(coordinator, "prefill-0", "decode-0", "decode-1")
    link = LinkReport("prefill-0", "verbs", True, 3, 10, 0, 4, 1, 0.0021, 0.0089)
    note(coordinator, "decode-0", link)
    now += 2.0
    note(
        coordinator,
        "decode-0",
        link._replace(bytes=6 * MIB, transfers=30),
        FailureCount("StaleBlocks", 4),
    )
    coordinator.counts.refused("Claim", "EXPIRED")
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, complaints = await opened(browser, url, scheme)
        assert await page.inner_text("#state") == "live"
        assert "3.00 MiB/s" in await page.inner_text("#cards")
        assert "3.00 MiB/s" in await page.inner_text("#matrix td")
        assert "p99 8.9 ms" in await page.inner_text("#matrix td")
        assert "10 transfers/s" in await page.inner_text("#cards")
        title = await page.get_attribute("#matrix td", "title")
        assert title is not None
        assert "30 transfers, 6.00 MiB" in title
        assert "no report here" in await page.inner_text("#workers")
        assert "1 of 3 report to this coordinator" in await page.inner_text("#workers-note")
        assert "120 of 1,000" in await page.inner_text("#leases")
        assert "StaleBlocks" in await page.inner_text("#errors")
        assert "1 EXPIRED" in await page.inner_text("#calls")
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(15, 19, 21)") == (scheme == "dark")
        wide = await page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert wide, "the page does not scroll sideways"
        assert complaints == []
        shot = await page.screenshot(path=tmp_path / f"{scheme}.png", full_page=True)
        assert len(shot) > 10_000


async def test_foreign_text_stays_text(coordinator: Coordinator, browser: Browser) -> None:
    await join(coordinator, EVIL, "decode")
    for _ in range(2):
        note(coordinator, "decode", LinkReport(EVIL, EVIL, True, bytes=MIB), FailureCount(EVIL[:60], 3))
    note(coordinator, EVIL, LinkReport("decode", EVIL))
    coordinator.counts.refused(EVIL, EVIL)
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, complaints = await opened(browser, url)
        await page.wait_for_timeout(300)
        assert await page.evaluate("window.pwned") is None
        assert await page.locator("img").count() == 0
        assert await page.locator("script").count() == 1
        for table in ("#workers", "#matrix", "#leases", "#errors", "#calls"):
            assert EVIL[:30] in await page.inner_text(table), table
        assert complaints == []
        # Even markup that got in would not run: the page's policy lets only its own script run.
        refused = re.compile("inline event handler .*Content Security Policy")
        async with page.expect_console_message(lambda message: bool(refused.search(message.text))):
            await page.evaluate("html => document.body.insertAdjacentHTML('beforeend', html)", EVIL)
        assert await page.evaluate("window.pwned") is None


async def test_nothing_joined_and_nobody_answering(coordinator: Coordinator, browser: Browser) -> None:
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, complaints = await opened(browser, url)
        assert "No worker has joined" in await page.inner_text("#workers")
        assert complaints == []
    await page.wait_for_selector("#state.away", timeout=20_000)
    assert "does not answer" in await page.inner_text("#state")


async def test_a_large_fleet_is_a_list_of_its_busiest_links(
    coordinator: Coordinator, browser: Browser
) -> None:
    names = [f"decode-{index:03}" for index in range(60)]
    await join(coordinator, *names)
    for index, name in enumerate(names):
        note(coordinator, name, LinkReport("prefill", "tcp", True, bytes=index))
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, complaints = await opened(browser, url)
        assert "the busiest 50 of 60" in await page.inner_text("#links-note")
        assert await page.locator("#workers tbody tr").count() == 60
        assert complaints == []
