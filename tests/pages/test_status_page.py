# SPDX-License-Identifier: Apache-2.0
"""The status page and the report in a browser."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from bench.result_rows import contest_rows, page_of, pull_row, rows
from control.cards import make_card
from pages.browsing import has_no_sideways_scroll, marks, violations, visited
from playwright.async_api import Browser, Page

from kvlink import __version__
from kvlink.control import CoordinatorClient
from kvlink.control.overview import Beat, FailureCount, LinkReport, WorkerReport
from kvlink.coordinator import Coordinator
from kvlink.monitoring.status_page.serving import serve_status_page

pytestmark = marks

EVIL = "<img src=x onerror=\"window.pwned='yes'\"><script>window.pwned='yes'</script>"
MIB = 1 << 20


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(lease_s=600)
    await coordinator.start()
    yield coordinator
    await coordinator.close()


async def opened(
    browser: Browser, url: str, scheme: str = "light", width: int = 1280
) -> tuple[Page, list[str]]:
    """The page after its first stats, and what it complains of."""
    page, complaints = await visited(browser, url, scheme, width)
    await page.wait_for_selector("#state >> text=live")
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
        assert "3.00 MiB/s" in await page.inner_text("#matrix tbody td")
        assert "p99 8.9 ms" in await page.inner_text("#matrix tbody td")
        assert "10 transfers/s" in await page.inner_text("#cards")
        title = await page.get_attribute("#matrix tbody td", "title")
        assert title is not None
        assert "30 transfers, 6.00 MiB" in title
        assert "no report here" in await page.inner_text("#workers")
        assert "1 of 3 report to this coordinator" in await page.inner_text("#workers-note")
        assert "120 of 1,000" in await page.inner_text("#leases")
        assert "StaleBlocks" in await page.inner_text("#errors")
        assert "1 EXPIRED" in await page.inner_text("#calls")
        ground = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(15, 19, 21)") == (scheme == "dark")
        assert await has_no_sideways_scroll(page)
        assert await violations(page) == []
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
        assert await violations(page) == []
        assert complaints == []
    await page.wait_for_selector("#state.away", timeout=20_000)
    assert "does not answer" in await page.inner_text("#state")


async def test_the_head_says_what_serves(coordinator: Coordinator, browser: Browser) -> None:
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, _ = await opened(browser, url)
        said = " ".join((await page.inner_text("#about")).split())
        assert said.startswith(
            f"address {coordinator.address} version {__version__} store memory TLS off up "
        )
        assert await page.title() == f"kvlink {coordinator.address}"
        assert not await page.is_visible("#problem")


LARGE = 1000


async def fill(coordinator: Coordinator) -> None:
    """A large fleet, of which decode-0700 fails now, decode-0500 failed before, and decode-0600 is silent."""
    now = 0.0
    coordinator._reports._clock = lambda: now
    names = [f"decode-{index:04}" for index in range(LARGE)]
    await join(coordinator, *names)
    for turn in (1, 2):
        now = 20.0 * (turn - 1)
        for index, name in enumerate(names):
            failed = {500: 9, 700: 5 * turn}.get(index, 0)
            link = LinkReport("prefill", "tcp", True, bytes=turn * index, transfers=turn, failed=failed)
            if (turn, index) != (2, 600):
                note(coordinator, name, link, *[FailureCount("StaleBlocks", failed)] * (failed > 0))


async def first_cells(page: Page, table: str, number: int = 3) -> list[str]:
    return (await page.locator(f"#{table} tbody th").all_inner_texts())[:number]


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390)])
async def test_a_large_fleet_shows_trouble_first(
    coordinator: Coordinator, browser: Browser, scheme: str, width: int, tmp_path: Path
) -> None:
    await fill(coordinator)
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, complaints = await opened(browser, url, scheme, width)
        assert await first_cells(page, "workers") == ["decode-0700", "decode-0600", "decode-0500"]
        assert (await first_cells(page, "links"))[0] == "prefill"
        assert "decode-0700" in await page.locator("#links tbody tr").first.inner_text()
        assert "decode-0700" in await page.inner_text("#errors")
        assert await page.locator("#workers tbody tr").count() == 15
        assert await has_no_sideways_scroll(page)
        assert await violations(page) == []
        assert complaints == []
        await page.screenshot(path=tmp_path / f"{scheme}-{width}.png", full_page=True)


async def test_a_large_fleet_is_sorted_filtered_and_turned_by_keyboard(
    coordinator: Coordinator, browser: Browser
) -> None:
    await fill(coordinator)
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, complaints = await opened(browser, url)
        section = page.locator("section", has=page.locator("#workers"))
        await section.get_by_role("searchbox", name="Filter workers").focus()
        await page.keyboard.type("decode-09")
        assert await section.locator("nav span").inner_text() == "1 to 15 of 100"
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "scroll"
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.textContent") == "worker"
        await page.keyboard.press("Enter")
        await page.keyboard.press("Enter")
        assert await page.locator("#workers th[aria-sort]").get_attribute("aria-sort") == "descending"
        assert (await first_cells(page, "workers"))[0] == "decode-0999"
        first = await page.locator("#workers tbody tr").first.element_handle()
        while await first.evaluate("row => row.isConnected"):  # until the next refresh
            await page.wait_for_timeout(100)
        assert await page.evaluate("document.activeElement.textContent") == "worker", (
            "a refresh keeps the focus"
        )
        await section.get_by_role("button", name="Next").press("Enter")
        assert (await first_cells(page, "workers"))[0] == "decode-0984"
        await section.get_by_role("searchbox").fill("")
        await section.get_by_label("only with trouble").check()
        assert await section.locator("nav span").inner_text() == "1 to 3 of 3"
        await section.get_by_role("searchbox").fill("nothing like it")
        assert "Nothing matches" in await page.inner_text("#workers")
        assert complaints == []


async def test_a_paused_page_does_not_change(coordinator: Coordinator, browser: Browser) -> None:
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        page, _ = await opened(browser, url)
        pause = page.get_by_role("button", name="Pause")
        await pause.press("Enter")
        assert await page.inner_text("#state") == "paused"
        await join(coordinator, "late")
        await page.wait_for_timeout(2500)
        assert "late" not in await page.inner_text("#workers")
        await pause.press("Enter")
        await page.wait_for_selector("#workers >> text=late")
        assert await page.inner_text("#state") == "live"


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
