# SPDX-License-Identifier: Apache-2.0
"""The documentation's site in a browser, as two versions beside each other."""

from __future__ import annotations

import json
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
pytestmark = marks
ROOT = Path(__file__).resolve().parents[2]
NEW, OLD = "0.2.0", "0.1.0"
WHERE_TO_ASK = "https://docs.example/ask"
PAGES = ("index", "404", "getting-started/concepts", "benchmarks/results", "reference/errors", "servers/vllm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", ROOT / "docs", folder / NEW]
    env = {"KVLINK_DOCS_ADDRESS": "", "KVLINK_DOCS_REPOSITORY": "", "KVLINK_DOCS_SUPPORT": WHERE_TO_ASK}
    subprocess.run(build, check=True, env=os.environ | env)
    (folder / OLD).symlink_to(NEW)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Says nothing of each request."""


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    (folder / "versions.json").write_text(json.dumps([NEW, OLD]))
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        serving = Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


async def test_another_version_is_chosen_and_the_page_stays(browser: Browser, site: str) -> None:
    page, complaints = await visited(browser, f"{site}/{OLD}/design/leases.html")
    menu = page.get_by_label("Version")
    await expect(menu).to_be_visible()
    assert await menu.locator("option").all_inner_texts() == [NEW, OLD]
    assert await menu.locator("option:checked").inner_text() == OLD
    await menu.select_option(NEW)
    await page.wait_for_url(f"{site}/{NEW}/design/leases.html")
    await expect(menu.locator("option:checked")).to_have_text(NEW)
    assert complaints == []


async def test_without_a_list_of_versions_there_is_no_menu(browser: Browser, folder: Path) -> None:
    page, complaints = await visited(browser, (folder / NEW / "index.html").as_uri())
    await expect(page.get_by_role("link", name="Ask for help")).to_be_visible()
    assert not await page.get_by_label("Version").is_visible()
    assert complaints == []


async def test_support_names_the_address(browser: Browser, site: str) -> None:
    page, _ = await visited(browser, f"{site}/{NEW}/")
    assert await page.get_by_role("link", name="Ask for help").get_attribute("href") == WHERE_TO_ASK
    await page.get_by_role("link", name="Support", exact=True).click()
    await page.wait_for_url(f"{site}/{NEW}/support.html")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
async def test_pages_fit_a_phone_and_a_desk(browser: Browser, site: str, width: int, scheme: str) -> None:
    for name in PAGES:
        page, complaints = await visited(browser, f"{site}/{NEW}/{name}.html", scheme, width)
        assert await has_no_sideways_scroll(page), name
        broken = "images => images.filter(each => each.complete && !each.naturalWidth).map(each => each.src)"
        assert await page.locator("img").evaluate_all(broken) == []
        assert complaints == [], name
        await page.close()
