# SPDX-License-Identifier: Apache-2.0
"""Lanes: a test belongs to the lane named after its folder under tests/. What was skipped is said by name.

REQUIRE_LANES=unit,netns makes the run fail when one of these lanes ran no test at all.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
_RAN = pytest.StashKey[Counter[str]]()
_SKIPPED = pytest.StashKey["defaultdict[str, Counter[str]]"]()


def _lane(path: Path) -> str:
    below = path.relative_to(_TESTS).parts
    return below[0] if len(below) > 1 else "tests"


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_RAN] = Counter()
    config.stash[_SKIPPED] = defaultdict(Counter)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _lane(item.path) == "netns":
            item.add_marker(pytest.mark.netns)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        item.config.stash[_SKIPPED][_lane(item.path)][report.longrepr[2].removeprefix("Skipped: ")] += 1
    elif report.when == "call":
        item.config.stash[_RAN][_lane(item.path)] += 1
    return report


def _lanes_missing(config: pytest.Config) -> list[str]:
    required = filter(None, os.environ.get("REQUIRE_LANES", "").split(","))
    return [lane for lane in required if not config.stash[_RAN][lane]]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _lanes_missing(session.config) and not session.exitstatus:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    ran, skipped = config.stash[_RAN], config.stash[_SKIPPED]
    terminalreporter.section("lanes")
    for lane in sorted({*ran, *skipped}):
        terminalreporter.line(f"{lane}: {ran[lane]} ran, {skipped[lane].total()} skipped")
        for reason, count in skipped[lane].items():
            terminalreporter.line(f"  SKIPPED {count}: {reason}")
    for lane in _lanes_missing(config):
        terminalreporter.line(f"MISSING {lane}: REQUIRE_LANES names it and none of its tests ran", red=True)
