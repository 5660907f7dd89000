# SPDX-License-Identifier: Apache-2.0
"""Lanes: a test belongs to the lane named after its folder under tests/. What was skipped is said by name.

Tests that `tiers` leaves outside the gate are marked `verify`, unless a lane of their own is named by another mark.
REQUIRE_LANES=unit,netns makes the run fail when one of these lanes ran no test at all.
"""

from __future__ import annotations

import logging
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers
from tiers import OUTSIDE_MARKS, is_outside

# No test fails for being slow, and none because its inputs are slow to make. All is said: Hypothesis has other defaults
# where CI is set, and kept examples of an earlier run would come first.
hypothesis.settings.register_profile(
    "patient",
    deadline=None,
    derandomize=False,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile("same", hypothesis.settings.get_profile("patient"), derandomize=True)

# Hypothesis also draws constants found in loaded modules of the checkout, so that draws would depend on which tests ran
# before and on where the checkout is.
providers._get_local_constants = lambda: providers._local_constants  # none

# The gate draws the same inputs each time; a lane draws others, and says by which seed.
SEED = os.environ.get("KVLINK_TEST_SEED")
hypothesis.settings.load_profile("patient" if SEED else "same")


def pytest_configure(config: pytest.Config) -> None:
    random.seed(SEED or 0)
    if SEED and config.pluginmanager.has_plugin("hypothesispytest"):
        config.option.hypothesis_seed = SEED


def pytest_report_header() -> str:
    return (
        f"KVLINK_TEST_SEED={SEED}"
        if SEED
        else "inputs are drawn from a fixed seed; KVLINK_TEST_SEED draws others"
    )


_RAN = ("passed", "failed", "error", "xfailed", "xpassed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in _markers(item):
            item.add_marker(marker)


def _markers(item: pytest.Item) -> set[str]:
    """The transport suite over verbs runs where the softroce lane does; real stores are outside the gate."""
    lane = _lane(item.nodeid)
    parameters = getattr(getattr(item, "callspec", None), "params", {}).values()
    names = {each for each in parameters if isinstance(each, str)}
    over_verbs = lane == "transports" and "verbs" in names
    markers = {"softroce" if over_verbs else lane} & {"engines", "netns", "softroce", "gpu"}
    own = {mark.name for mark in item.iter_markers()} & OUTSIDE_MARKS
    fixtures = {*getattr(item, "fixturenames", ()), *(names & {"etcd"})}
    if not markers and not own and is_outside(lane, (), fixtures):
        markers = {"verify"}
    return markers


@pytest.fixture(autouse=True)
def _log_as_found() -> Iterator[None]:
    """Restores the library's log after each test, because tests that count lines would see more."""
    log = logging.getLogger("kvlink")
    found = log.level, log.propagate, log.handlers[:]
    yield
    level, log.propagate, log.handlers[:] = found
    log.setLevel(level)


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and not session.exitstatus and _lanes_missing(reporter):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran, skipped = _ran(terminalreporter), Counter(map(_skip, terminalreporter.stats.get("skipped", ())))
    terminalreporter.section("lanes")
    for lane in sorted({*ran, *(lane for lane, _ in skipped)}):
        terminalreporter.line(f"{lane}: {ran[lane]} ran")
        for (where, reason), count in skipped.items():
            if where == lane:
                terminalreporter.line(f"  SKIPPED {count} of {lane}: {reason}")
    for lane in _lanes_missing(terminalreporter):
        terminalreporter.line(f"MISSING {lane}: REQUIRE_LANES names it and none of its tests ran", red=True)


def _lane(nodeid: str) -> str:
    folders = Path(nodeid.partition("::")[0]).parent.parts
    return folders[1] if len(folders) > 1 else "tests"


def _ran(reporter: pytest.TerminalReporter) -> Counter[str]:
    return Counter(_lane(report.nodeid) for kind in _RAN for report in reporter.stats.get(kind, ()))


def _skip(report: pytest.TestReport | pytest.CollectReport) -> tuple[str, str]:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return _lane(report.nodeid), reason.removeprefix("Skipped: ")


def _lanes_missing(reporter: pytest.TerminalReporter) -> list[str]:
    required = [lane.strip() for lane in os.environ.get("REQUIRE_LANES", "").split(",")]
    ran = _ran(reporter)
    return [lane for lane in required if lane and not ran[lane]]
