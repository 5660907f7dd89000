# SPDX-License-Identifier: Apache-2.0
"""A worker's metrics say what it did."""

from __future__ import annotations

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
from contextlib import ExitStack

import pytest
from metrics.scrapes import Scrape, get
from prometheus_client import CollectorRegistry, generate_latest
from transports.pools import PoolSpec

from kvlink import Worker, WorkerConfig
from kvlink.errors import ConfigError, StaleBlocks
from kvlink.monitoring.metrics import serving
from kvlink.monitoring.metrics.worker import WorkerCollector

LINK = {"worker": "decode", "peer": "prefill", "transport": "loopback"}


def scrape(*workers: Worker) -> Scrape:
    registry = CollectorRegistry()
    registry.register(WorkerCollector(workers))
    return Scrape(generate_latest(registry).decode())


def pull(owner: Worker, reader: Worker, name: str, num_blocks: int = 2) -> None:
    ticket = owner.offer(name, range(num_blocks))
    assert reader.pull(ticket, range(num_blocks)).wait(10)


def test_good_transfers(owner: Worker, reader: Worker) -> None:
    for index in range(3):
        pull(owner, reader, f"r{index}")
    held = owner.offer("held", range(5))
    found = scrape(owner, reader)
    assert found.value("kvlink_transfer_seconds_count", **LINK) == 3
    transfer = reader.pull(held, range(5))
    assert transfer.wait(10)
    after = scrape(owner, reader)
    assert after.value("kvlink_received_bytes_total", **LINK) == found.value(
        "kvlink_received_bytes_total", **LINK
    ) + (transfer.stats.num_bytes)
    assert after.value("kvlink_read_operations_total", **LINK) > 0
    assert after.value("kvlink_read_descriptors_total", **LINK) > 0
    for phase in ("plan", "read", "validate", "settle"):
        assert after.value("kvlink_phase_seconds_count", phase=phase, transport="loopback") == 4
    assert after.value("kvlink_phase_seconds_count", phase="offer", worker="prefill") == 1, (
        "one in 16 is timed"
    )
    assert after.value("kvlink_phase_seconds_count", phase="connect", worker="decode") == 1
    assert after.value("kvlink_connected", **LINK) == 1
    assert after.value("kvlink_queued_transfers", **LINK) == 0
    assert after.value("kvlink_stale_reads_total", **LINK) == 0
    assert "kvlink_failed_transfers_total" not in after


def test_leases(owner: Worker, reader: Worker) -> None:
    pull(owner, reader, "done")
    owner.offer("held", range(5))
    owner.offer("withdrawn", [6])
    owner.abort("withdrawn")
    found = scrape(owner)
    values = {
        name: found.value(f"kvlink_{name}", worker="prefill")
        for name in ("active_leases", "pinned_blocks", "pool_blocks", "granted_leases_total")
    }
    assert values == {
        "active_leases": 1,
        "pinned_blocks": 5,
        "pool_blocks": PoolSpec().layout().num_blocks,
        "granted_leases_total": 3,
    }
    assert found.value("kvlink_settled_leases_total") == 1
    assert found.value("kvlink_aborted_leases_total") == 1
    assert found.value("kvlink_expired_leases_total") == 0
    assert found.value("kvlink_oldest_lease_seconds") > 0
    assert {event.request_id for event in owner.events()} == {"done", "withdrawn"}, "a scrape takes no events"


def test_a_stale_read_is_counted_and_adds_no_bytes(owner: Worker, reader: Worker) -> None:
    pull(owner, reader, "first")
    bytes_before = scrape(reader).value("kvlink_received_bytes_total", **LINK)
    ticket = owner.offer("gone", range(2))
    owner.abort("gone")
    with pytest.raises(StaleBlocks):
        reader.pull(ticket, range(2)).wait(10)
    found = scrape(reader)
    assert found.value("kvlink_stale_reads_total", **LINK) == 1
    assert found.value("kvlink_failed_transfers_total", reason="StaleBlocks", **LINK) == 1
    assert found.value("kvlink_received_bytes_total", **LINK) == bytes_before
    assert found.value("kvlink_transfer_seconds_count", **LINK) == 1


def test_soft_leases_and_their_stale_reads_are_counted_apart(owner: Worker, reader: Worker) -> None:
    pull(owner, reader, "first")
    tickets = [owner.offer_soft("chat", range(2)) for _ in range(3)]
    assert owner.revoke([1]) == 3
    owner.offer_soft("chat", range(2))
    for ticket in tickets:
        with pytest.raises(StaleBlocks):
            reader.pull(ticket, range(2)).wait(10)
    found = scrape(owner, reader)
    assert found.value("kvlink_soft_leases", worker="prefill") == 1
    assert found.value("kvlink_granted_soft_leases_total", worker="prefill") == 4
    assert found.value("kvlink_ended_soft_leases_total", worker="prefill", how="evicted") == 3
    assert found.value("kvlink_ended_soft_leases_total", worker="prefill", how="displaced") == 0
    assert found.value("kvlink_stale_reads_by_end_total", lease="soft", why="evicted", **LINK) == 3
    assert found.value("kvlink_stale_reads_total", **LINK) == 0
    assert "kvlink_failed_transfers_total" not in found
    assert found.value("kvlink_active_leases", worker="prefill") == 0
    aborted = owner.offer("gone", range(2))
    owner.abort("gone")
    with pytest.raises(StaleBlocks):
        reader.pull(aborted, range(2)).wait(10)
    found = scrape(reader)
    assert found.value("kvlink_stale_reads_by_end_total", lease="pinned", why="aborted", **LINK) == 1
    assert found.value("kvlink_failed_transfers_total", reason="StaleBlocks", **LINK) == 1
    assert found.value("kvlink_stale_reads_total", **LINK) == 1


def test_a_pull_that_never_starts_is_counted_by_reason(owner: Worker, reader: Worker) -> None:
    ticket = owner.offer("r", range(2))
    owner.close()
    with pytest.raises(Exception, match="prefill"):
        reader.pull(ticket, range(2), timeout_s=1.0).wait(10)
    found = scrape(reader)
    assert found.value("kvlink_unstarted_pulls_total", worker="decode") == 1


def test_names_follow_prometheus(owner: Worker, reader: Worker) -> None:
    pull(owner, reader, "r")
    with pytest.raises(Exception, match="offered by"):
        owner.set_ready("nothing", 1)
    units = (
        "seconds",
        "bytes",
        "leases",
        "slots",
        "blocks",
        "transfers",
        "connected",
        "joined",
        "draining",
        "info",
    )
    for family in scrape(owner, reader).families.values():
        assert re.fullmatch(r"kvlink(_[a-z]+)+", family.name)
        assert family.documentation
        if family.type in ("gauge", "histogram"):
            assert family.name.endswith(units), family.name
        assert all(
            sample.name.endswith("_total") == (family.type == "counter")
            for sample in family.samples
            if family.type != "histogram"
        )


@pytest.mark.verify
def test_a_port_of_its_own(free_port: int) -> None:
    config = WorkerConfig(transports="loopback", metrics_port=free_port)
    url = f"http://127.0.0.1:{free_port}/metrics"
    with Worker(PoolSpec().make(), "served", config=config):
        assert Scrape(get(url)).value("kvlink_pool_blocks", worker="served") > 0
        with pytest.raises(ConfigError, match="KVLINK_METRICS_PORT"):
            Worker(PoolSpec().make(), "second", config=config)
    with pytest.raises(urllib.error.URLError):
        get(url)


@pytest.mark.verify
def test_strangers_at_the_port_take_a_few_threads_and_go(
    free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 1.0)
    config = WorkerConfig(transports="loopback", metrics_port=free_port)
    with Worker(PoolSpec().make(), "served", config=config), ExitStack() as strangers:
        threads_before = threading.active_count()
        sockets = [
            strangers.enter_context(socket.create_connection(("127.0.0.1", free_port)))
            for _ in range(4 * serving.MAX_CONNECTIONS)
        ]
        assert sockets[0].recv(1) == b"", "where there are too many, the oldest makes room"
        assert "kvlink_pool_blocks" in get(f"http://127.0.0.1:{free_port}/metrics"), "who asks is answered"
        assert threading.active_count() <= threads_before + serving.MAX_CONNECTIONS
        for each in sockets:
            assert each.recv(1) == b"", "the others when they have said nothing for a while"
        while threading.active_count() > threads_before:
            time.sleep(0.01)
        assert "kvlink_pool_blocks" in get(f"http://127.0.0.1:{free_port}/metrics")


@pytest.mark.verify
def test_a_stranger_who_dribbles_is_hung_up_on(
    free_port: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each byte is in time, the question never ends."""
    monkeypatch.setattr(serving, "_CONNECTION_S", 1.0)
    config = WorkerConfig(transports="loopback", metrics_port=free_port)
    with (
        Worker(PoolSpec().make(), "served", config=config),
        socket.create_connection(("127.0.0.1", free_port)) as stranger,
    ):
        threads_before = threading.active_count()
        stranger.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        stranger.settimeout(0.05)
        deadline = time.monotonic() + 20
        with contextlib.suppress(ConnectionError):
            while not hung_up_on(stranger):
                assert time.monotonic() < deadline, "it may go on for ever"
                stranger.sendall(b"x")
        while threading.active_count() > threads_before:
            time.sleep(0.01)
        assert "kvlink_pool_blocks" in get(f"http://127.0.0.1:{free_port}/metrics")
    assert "Traceback" not in capfd.readouterr().err


def hung_up_on(visitor: socket.socket) -> bool:
    try:
        return visitor.recv(1) == b""
    except TimeoutError:
        return False


@pytest.mark.verify
def test_the_port_may_be_at_another_address_than_peers_come_to(free_port: int) -> None:
    config = WorkerConfig(transports="loopback", metrics_port=free_port, metrics_host="127.0.0.2")
    with Worker(PoolSpec().make(), "served", config=config):
        assert "kvlink_pool_blocks" in get(f"http://127.0.0.2:{free_port}/metrics")
        with pytest.raises(urllib.error.URLError):
            get(f"http://127.0.0.1:{free_port}/metrics")


def test_without_prometheus_client_only_who_asks_hears_of_it() -> None:
    program = """
import sys
sys.modules["prometheus_client"] = None
from kvlink import Worker, WorkerConfig
from transports.pools import PoolSpec
from kvlink.errors import ConfigError
Worker(PoolSpec().make(), "a", config=WorkerConfig()).close()
try:
    Worker(PoolSpec().make(), "b", config=WorkerConfig(metrics_port=9999))
except ConfigError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        env={"PYTHONPATH": "tests"},
    )
    assert "pip install 'kvlink[metrics]'" in done.stdout, done.stderr


def test_paths_beyond_the_bound_share_one_row() -> None:
    from kvlink.transfer.path_stats import MAX_PATHS, OTHERS, AllPathStats, Path

    stats = AllPathStats()
    stats.is_live = lambda path: path.worker_id.startswith("w")
    for index in range(MAX_PATHS + 3):
        stats.of_path(f"w{index}", "tcp")
    counts = stats.counts()
    assert len(counts) == MAX_PATHS + 1
    assert Path(OTHERS, "tcp") in counts
    assert stats.path(f"w{MAX_PATHS}", "tcp") == Path(OTHERS, "tcp")
    assert stats.path("w0", "tcp") == Path("w0", "tcp")
