# SPDX-License-Identifier: Apache-2.0
"""A coordinator shows real workers and its own calls by HTTP and by its Overview call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession
from control.cards import make_card, make_offer
from metrics.scrapes import Scrape
from transports.pools import PoolSpec
from waiting import until

from kvlink import Worker, WorkerConfig
from kvlink.control import CoordinatorClient
from kvlink.control.overview import Beat, LinkReport, WorkerReport
from kvlink.control.values import JoinRequest
from kvlink.coordinator import Coordinator
from kvlink.coordinator.reports import Reports
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, UnknownRequest
from kvlink.monitoring.fleet_view import STALE_S, plain
from kvlink.monitoring.status_page.serving import serve_status_page


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
