# SPDX-License-Identifier: Apache-2.0
"""Metrics of the coordinator, the port that serves them, and kvlink top."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import pytest
from aiohttp import ClientSession
from control.cards import make_card, make_offer
from metrics.scrapes import Scrape, get
from rich.console import Console
from transports.pools import PoolSpec
from waiting import until

from kvlink import Worker, WorkerConfig, __version__
from kvlink.cli.tables import bytes_text, seconds_text
from kvlink.cli.top import screen
from kvlink.control import CoordinatorClient
from kvlink.control.overview import Beat, FailureCount, LinkReport, Overview, WorkerReport, WorkerView
from kvlink.control.values import CoordinatorStatus, JoinRequest
from kvlink.coordinator import Coordinator
from kvlink.coordinator.coordinator import serve
from kvlink.coordinator.reports import Reports
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, UnknownRequest
from kvlink.monitoring.fleet_view import STALE_S, plain
from kvlink.monitoring.status_page import serving
from kvlink.monitoring.status_page.serving import serve_status_page
from kvlink.runtime.log import JsonFormatter


@pytest.fixture
async def coordinator() -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(MemoryStore(60.0), lease_s=0.6)  # beats come often, and nobody is lost
    await coordinator.start()
    yield coordinator
    await coordinator.close()


@pytest.fixture
async def client(coordinator: Coordinator) -> AsyncIterator[CoordinatorClient]:
    async with CoordinatorClient(coordinator.address) as client:
        yield client


async def test_calls_refusals_and_counts(coordinator: Coordinator, client: CoordinatorClient) -> None:
    await client.join(make_card())
    await client.offer(make_offer("r"))
    with pytest.raises(UnknownRequest):
        await client.claim("nothing", timeout_s=0.0)
    async with client.handoffs() as stream:
        refused = await asyncio.gather(
            stream.offer(make_offer("q", worker_id="nobody")), return_exceptions=True
        )
    assert isinstance(refused[0], Exception)
    watching = client.watch()
    await anext(watching)
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url, ClientSession(url) as session:
        answer = await session.get("/metrics")
        assert answer.headers["Content-Type"].startswith("text/plain")
        found = Scrape(await answer.text())
        with pytest.raises(ConfigError, match="--http-port"):
            async with serve_status_page(coordinator, "127.0.0.1", int(url.rpartition(":")[2])):
                pass
    assert found.value("kvlink_coordinator_workers") == 1
    assert found.value("kvlink_coordinator_live_tickets") == 1
    assert found.value("kvlink_coordinator_offers_total") == 1
    assert found.value("kvlink_coordinator_call_seconds_count", method="Join") == 1
    assert found.value("kvlink_coordinator_call_seconds_count", method="Claim") == 1
    assert found.value("kvlink_coordinator_refusals_total", method="Claim", reason="UNKNOWN") == 1
    assert found.value("kvlink_coordinator_refusals_total", method="Handoffs", reason="NOT_JOINED") == 1
    assert found.value("kvlink_coordinator_feed_lag") == 0
    assert len(coordinator.counts.feeds) == 1
    await watching.aclose()  # type: ignore[attr-defined]
    await until(lambda: not coordinator.counts.feeds)


@pytest.mark.verify
async def test_workers_report_with_their_beats(coordinator: Coordinator, client: CoordinatorClient) -> None:
    config = WorkerConfig(transports="loopback", coordinator=coordinator.address)

    def work() -> tuple[Worker, Worker]:
        owner, reader = (Worker(PoolSpec().make(), name, config=config) for name in ("prefill", "decode"))
        assert reader.pull(owner.offer("r", [1, 2]), [3, 4]).wait(10)
        owner.offer("held", [5])
        return owner, reader

    owner, reader = await asyncio.to_thread(work)
    try:
        shown = {}
        for _ in range(100):
            shown = plain(await client.status(), await client.overview())
            if shown["links"] and shown["workers"][1]["leases"]["pinned_blocks"] == 1:
                break
            await asyncio.sleep(0.1)
        decode, prefill = shown["workers"]
        assert (decode["worker"], prefill["worker"]) == ("decode", "prefill")
        (link,) = shown["links"]
        assert (link["from"], link["to"], link["transport"]) == ("prefill", "decode", "loopback")
        assert (link["transfers"], link["failed"], link["connected"]) == (1, 0, True)
        assert link["bytes"] == reader.stats().links[0].counts.num_bytes
        assert (prefill["leases"]["granted"], prefill["leases"]["active_leases"]) == (2, 1)
        assert not decode["stale"]
    finally:
        await asyncio.to_thread(owner.close)
        await asyncio.to_thread(reader.close)
    await until(lambda: not coordinator._reports._latest)


def test_of_a_large_fleet_each_shows_its_busiest_links() -> None:
    reports = Reports()
    cards = [make_card(f"w{index:03}") for index in range(500)]
    links = tuple(LinkReport(f"p{index}", "tcp", bytes=100 - index) for index in range(32))
    for card in cards:
        reports.note("", Beat(card.worker_id, card.epoch, WorkerReport(num_links=32, links=links)))
    views = reports.views({"": cards})
    assert len(views) == 500
    assert all(view.report and view.report.links == links[:4] for view in views)
    assert reports.views({"": cards[:3]})[0].report.links == links  # type: ignore[union-attr]


def test_rates_are_differences_of_reports() -> None:
    now = 100.0
    reports = Reports(lambda: now)
    card, link = make_card("w"), LinkReport("p", "tcp", True)

    def row() -> dict[str, float]:
        (view,) = reports.views({"": [card]})
        (found,) = plain_of(view)["links"]
        return found

    def plain_of(view: object) -> dict[str, list[dict[str, float]]]:
        from kvlink.control.overview import Overview
        from kvlink.control.values import CoordinatorStatus

        return plain(CoordinatorStatus(), Overview((view,)))  # type: ignore[arg-type]

    reports.note("", Beat("w", 1, WorkerReport(links=(link._replace(bytes=1000, transfers=10),))))
    assert row()["bytes_per_s"] == 0, "one report says nothing about a rate"
    now += 2.0
    reports.note("", Beat("w", 1, WorkerReport(links=(link._replace(bytes=5000, transfers=30),))))
    assert (row()["bytes_per_s"], row()["transfers_per_s"]) == (2000, 10)
    now += STALE_S + 1
    assert row()["bytes_per_s"] == 0, "a worker that is silent is not known to receive"
    reports.note("", Beat("w", 2, WorkerReport(links=(link,))))
    assert len(reports._latest) == 2, "another epoch is another worker"
    reports.forget("", "w", 2)
    reports.forget("", "w", 1)
    assert reports.views({"": [card]})[0].report is None


async def test_a_beat_without_a_report_is_taken(coordinator: Coordinator, client: CoordinatorClient) -> None:
    await client.join(JoinRequest(make_card("old")).card)
    stream = client.keep_alive()
    await stream.send(Beat("old", 1))
    assert (await stream.receive()) is not None
    (view,) = (await client.overview()).workers
    assert (view.worker_id, view.report) == ("old", None)
    (row,) = plain(await client.status(), await client.overview())["workers"]
    assert row["leases"] is None
    stream.cancel()


async def test_the_page_is_read_only_and_lets_no_foreign_script_in(coordinator: Coordinator) -> None:
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url, ClientSession(url) as session:
        answer = await session.get("/")
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'sha256-" in policy
        assert "unsafe" not in policy
        text = await answer.text()
        assert "http://www.w3.org/" in text
        assert text.count("src=") == 0, "nothing is loaded from elsewhere"
        for path in ("/", "/metrics", "/stats.json"):
            assert (await session.post(path)).status == 405
        assert (await session.get("/../../etc/passwd")).status == 404
        assert (await (await session.get("/stats.json")).json())["workers"] == []


@pytest.fixture
async def url() -> AsyncIterator[str]:
    coordinator = Coordinator()
    await coordinator.start()
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url:
        yield url
    await coordinator.close()


Visit = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def visit(url: str) -> AsyncIterator[Visit]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    yield reader, writer
    writer.close()


async def status_of(url: str, request: bytes) -> bytes:
    async with visit(url) as (reader, writer):
        writer.write(request)
        return (await reader.readline()).split(b" ")[1]


async def test_bad_requests_are_a_few_lines_of_json_without_tracebacks(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    long = b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n"
    for _ in range(30):
        assert await status_of(url, long) == b"400"
    assert len(caplog.records) == 10
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert max(map(len, lines)) < 600
    for line in map(json.loads, lines):
        assert (line["logger"], line["level"], line["event"]) == ("kvlink.http", "warning", "bad request")
        assert line["status"] == 400
    assert "Traceback" not in "".join(lines)
    assert caplog.records[0].exc_info is None


async def test_a_fault_of_ours_keeps_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Coordinator):
        async def status(self):  # type: ignore[no-untyped-def]
            raise ZeroDivisionError

    coordinator = Broken()
    await coordinator.start()
    async with serve_status_page(coordinator, "127.0.0.1", 0) as url, ClientSession(url) as session:
        for _ in range(20):
            assert (await session.get("/metrics")).status == 500
    await coordinator.close()
    logged = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(logged) == 10
    assert all(record.exc_info and record.levelno == logging.ERROR for record in logged)


async def test_slow_clients_make_room_for_who_asks(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    async with visit(url) as oldest, visit(url) as second, visit(url) as third:
        for _, writer in (oldest, second, third):
            writer.write(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
            await writer.drain()
        assert await status_of(url, b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n") == b"200"
        with suppress(ConnectionError):
            assert await oldest[0].read() == b"", "hung up on"
        third[1].write(b"x\r\nHost: x\r\n\r\n")
        assert (await third[0].readline()).split(b" ")[1] == b"200", "the others may go on"


async def test_the_page_is_one_answer_that_loads_nothing_from_elsewhere(url: str) -> None:
    async with ClientSession() as session, session.get(f"{url}/") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
    assert "page.css" not in page
    assert "page.js" not in page
    assert "<main>" in page
    assert not re.search(r"""(?:src|href)=["']?(?:https?:)?//""", page)
    [script] = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy


@pytest.mark.parametrize(
    ("store", "shown"),
    [
        ("memory", "memory"),
        ("etcd://a:2379,b:2379/prod", "etcd://a:2379,b:2379/prod"),
        ("etcd://root:secret@a:2379,u:secret@b:2379/prod", "etcd://a:2379,b:2379/prod"),
    ],
)
async def test_the_page_knows_what_serves_and_no_password(store: str, shown: str) -> None:
    coordinator = Coordinator(store_name=store)
    address = await coordinator.start()
    async with (
        serve_status_page(coordinator, "127.0.0.1", 0) as url,
        ClientSession() as session,
        session.get(f"{url}/stats.json") as answer,
    ):
        about = (await answer.json())["about"]
    await coordinator.close()
    assert about == {"address": address, "version": __version__, "store": shown, "tls": False, "problem": ""}


def test_the_command_names_its_store_to_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Coordinator] = []

    async def started(coordinator: Coordinator, host: str, port: int) -> str:
        made.append(coordinator)
        raise ConfigError("stop here")

    monkeypatch.setattr(Coordinator, "start", started)
    with pytest.raises(ConfigError, match="stop here"):
        asyncio.run(serve(store="etcd://127.0.0.1:1/prod"))
    assert made[0].about().store == "etcd://127.0.0.1:1/prod"


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
