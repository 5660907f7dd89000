# SPDX-License-Identifier: Apache-2.0
"""`kvlink coordinator --http-port`, `kvlink status` and `kvlink top` as processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from metrics.scrapes import Scrape, get
from rich.console import Console
from transports.pools import PoolSpec

from kvlink import Worker, WorkerConfig
from kvlink.cli.tables import bytes_text, seconds_text
from kvlink.cli.top import screen
from kvlink.control import CoordinatorClient
from kvlink.control.overview import FailureCount, LinkReport, Overview, WorkerReport, WorkerView
from kvlink.control.values import CoordinatorStatus
from kvlink.monitoring.fleet_view import plain

KVLINK = [sys.executable, "-m", "kvlink"]


class Served(NamedTuple):
    """A coordinator as an operator starts it."""

    address: str
    url: str


@pytest.fixture
def served() -> Iterator[Served]:
    command = [*KVLINK, "coordinator", "--port", "0", "--http-port", "0", "--lease-s", "9"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        url, address = (process.stdout.readline().split()[-1] for _ in range(2))
        yield Served(address, url)
        process.terminate()
    assert process.returncode == 0


def run(*arguments: str) -> str:
    done = subprocess.run([*KVLINK, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def _reported(address: str) -> bool:
    """Whether both have told of the pull."""
    async with CoordinatorClient(address) as client:
        reports = {view.worker_id: view.report for view in (await client.overview()).workers if view.report}
    received = [link.transfers for link in reports["decode"].links] if len(reports) == 2 else []
    return received == [1] and reports["prefill"].settled == 1


async def test_an_operator_sees_workers_and_links(served: Served) -> None:
    config = WorkerConfig(transports="loopback", coordinator=served.address)

    def work() -> list[Worker]:
        owner, reader = (Worker(PoolSpec().make(), name, config=config) for name in ("prefill", "decode"))
        assert reader.pull(owner.offer("r", [1, 2]), [3, 4]).wait(10)
        return [owner, reader]

    workers = await asyncio.to_thread(work)
    try:
        while not await _reported(served.address):
            await asyncio.sleep(0.1)
        text = await asyncio.to_thread(run, "top", "--coordinator", served.address, "--rounds", "1")
        assert "prefill" in text
        assert "loopback" in text
        look = json.loads(
            await asyncio.to_thread(
                run, "top", "--json", "--coordinator", served.address, "--rounds", "1", "--every", "0.1"
            )
        )
        assert look["links"][0]["transfers"] == 1
        rows = (
            await asyncio.to_thread(run, "status", "--json", "--coordinator", served.address)
        ).splitlines()
        assert {json.loads(row)["worker"] for row in rows[1:]} == {"prefill", "decode"}
        assert json.loads(rows[2])["leases"]["settled"] == 1
        assert "receives" in await asyncio.to_thread(run, "status", "--coordinator", served.address)
        assert Scrape(get(f"{served.url}/metrics")).value("kvlink_coordinator_workers") == 2
        assert "<title>kvlink</title>" in get(served.url)
    finally:
        for worker in workers:
            await asyncio.to_thread(worker.close)


def test_the_screen_shows_what_is_down_silent_and_failing() -> None:
    link = LinkReport("[bold]x[/]", "tcp", connected=False, bytes=5 << 20, p99_s=0.0042)
    report = WorkerReport(links=(link,), num_links=1, expired=3, failures=(FailureCount("StaleBlocks", 9),))
    views = (
        WorkerView(
            "decode",
            1,
            "a:1",
            1,
            ("tcp",),
            report,
            1.0,
            report._replace(links=(link._replace(bytes=0),)),
            1.0,
        ),
        WorkerView("quiet", 1, "a:1", 1, ("tcp",), report, 60.0),
        WorkerView("new", 1, "a:1", 1, ("tcp",)),
        WorkerView("leaving", 1, "a:1", 1, ("tcp",), report, 1.0, draining=True),
    )
    console = Console(width=200, record=True, file=sys.stderr)
    console.print(screen(plain(CoordinatorStatus(workers=4, draining=1), Overview(views)), "here:1"))
    text = console.export_text()
    for words in (
        "[bold]x[/]",
        "tcp down",
        "5.00 MiB/s",
        "4.2 ms",
        "silent 60 s",
        "no report here",
        "reporting, draining",
        "4 workers (1 draining)",
        "StaleBlocks",
    ):
        assert words in text, text


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (200 << 30, "200 GiB")]
)
def test_bytes_have_the_unit_that_fits(number: int, text: str) -> None:
    assert bytes_text(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "-"), (4.2e-6, "4.2 us"), (0.0123, "12.3 ms"), (3.21, "3.21 s")]
)
def test_seconds_have_the_unit_that_fits(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text
