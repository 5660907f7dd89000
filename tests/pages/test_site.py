# SPDX-License-Identifier: Apache-2.0
"""The documentation's site in a browser."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from pages.browsing import has_no_sideways_scroll, marks, visited
from playwright.async_api import Browser, expect

pytest.importorskip("furo", reason="no furo: make test-pages, with Python 3.11 or later")
pytestmark = [*marks, pytest.mark.timeout(1_200)]  # the first test builds the site
ROOT = Path(__file__).resolve().parents[2]
OLDER = "https://docs.example/0.1/"
WHERE_TO_ASK = "https://docs.example/ask"
PAGES = (
    "index",
    "404",
    "getting-started/concepts",
    "benchmarks/results",
    "reference/errors",
    "servers/vllm",
    "servers/routers",
)
PROGRAMS = ":is(.highlight-sh, .highlight-none, .highlight-python) pre"
CUT_OFF = "blocks => blocks.filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText)"
BROKEN_WORDS = """headings => headings.map(each => each.firstChild).filter(text => {
  const range = document.createRange();
  range.selectNodeContents(text);
  return !/[ -]/.test(text.textContent) && range.getClientRects().length > 1;
}).map(text => text.textContent)"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Says nothing of each request."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ROOT / "docs", folder]
    env = {"KVLINK_DOCS_VERSIONS": f"0.1={OLDER}", "KVLINK_DOCS_SUPPORT": WHERE_TO_ASK}
    subprocess.run(build, check=True, env=os.environ | env)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


async def test_the_menu_leads_to_other_releases_and_to_support(browser: Browser, site: str) -> None:
    page, complaints = await visited(browser, f"{site}/design/leases.html")
    older = page.get_by_role("link", name="0.1", exact=True)
    assert not await older.is_visible()
    await page.get_by_text("Other releases").click()
    await expect(older).to_be_visible()
    assert await older.get_attribute("href") == OLDER
    assert await page.get_by_role("link", name="Ask or report").get_attribute("href") == WHERE_TO_ASK
    await page.get_by_role("link", name="Support", exact=True).click()
    await page.wait_for_url(f"{site}/support.html")
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
async def test_pages_fit_a_phone_and_a_desk(browser: Browser, site: str, width: int, scheme: str) -> None:
    for name in PAGES:
        page, complaints = await visited(browser, f"{site}/{name}.html", scheme, width)
        assert await has_no_sideways_scroll(page), name
        assert await page.locator(PROGRAMS).evaluate_all(CUT_OFF) == []
        assert await page.locator("h1, h2, h3").evaluate_all(BROKEN_WORDS) == []
        broken = "images => images.filter(each => each.complete && !each.naturalWidth).map(each => each.src)"
        assert await page.locator("img").evaluate_all(broken) == []
        assert complaints == [], name
        await page.close()


async def faults_of_blocks(browser: Browser, site: str, without: str | None = None) -> list[str]:
    """Copies each command of Quickstart and chooses another engine, as a reader does. Returns what did not work."""
    page, faults = await visited(browser, f"{site}/getting-started/quickstart.html", without=without)
    await page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    blocks, sglang = page.locator("div.highlight"), page.get_by_text("sglang.launch_server").first
    assert await blocks.count() > 4
    if await sglang.is_visible():
        faults.append("SGLang is shown beside vLLM")
    await page.get_by_text("SGLang", exact=True).and_(page.locator("label")).click()
    if not await sglang.is_visible() or await page.get_by_text("vllm serve").first.is_visible():
        faults.append("SGLang is not shown alone")
    for block in [each for each in await blocks.all() if await each.is_visible()]:
        command = (await block.locator("pre").inner_text()).strip()
        if await (button := block.locator("button.copybtn")).count() != 1:
            faults.append(f"no button for {command}")
            continue
        await block.hover()
        await button.click()
        if (await page.evaluate("navigator.clipboard.readText()")).strip() != command:
            faults.append(f"not copied: {command}")
    await page.close()
    return faults


async def test_commands_can_be_copied_and_engines_chosen(browser: Browser, site: str) -> None:
    assert await faults_of_blocks(browser, site) == []


@pytest.mark.parametrize(
    ("without", "found"),
    [
        ("**/copybutton.js*", "no button for kvlink bench pull"),
        ("**/clipboard.min.js*", "no button for kvlink bench pull"),
        ("**/sphinx-design*.css*", "SGLang is shown beside vLLM"),
    ],
)
async def test_a_script_or_style_that_is_missing_is_found(
    browser: Browser, site: str, without: str, found: str
) -> None:
    faults = await faults_of_blocks(browser, site, without)
    assert any(fault.startswith(found) for fault in faults), faults
