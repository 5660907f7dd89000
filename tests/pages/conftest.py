# SPDX-License-Identifier: Apache-2.0
"""A browser for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from pages.browsing import ARGUMENTS, CHROMIUM
from playwright.async_api import Browser, async_playwright


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        opened = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        await opened.close()
