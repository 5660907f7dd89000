# SPDX-License-Identifier: Apache-2.0
"""Where a worker listens, what peers are told, and what is said when that cannot lead anywhere."""

from __future__ import annotations

import logging
import socket
from dataclasses import replace
from typing import Any, cast

import pytest
from control.cards import make_card
from waiting import closed_port

from kvlink import BlockPool, Worker, WorkerConfig
from kvlink.config.addresses import is_loopback, is_wildcard, joined, numeric, plain_host, split_address
from kvlink.control import Security
from kvlink.doctor import Verdict, network
from kvlink.errors import ConfigError, KVLinkError, PeerUnreachable
from kvlink.layout import Geometry, dense
from kvlink.types import WorkerCard
from kvlink.worker.directory import ControlDirectory
from kvlink.worker.reachability import advertised_host, loopback_hint, loopback_problem

MAPPED = "::ffff:127.0.0.1"


def pool() -> BlockPool:
    return BlockPool.allocate(dense(Geometry(1, 1, 64, 8)))


@pytest.mark.parametrize(
    ("host", "loopback", "wildcard"),
    [
        ("127.0.0.1", True, False),
        ("127.3.2.1", True, False),
        ("localhost", True, False),
        ("LocalHost", True, False),
        ("::1", True, False),
        ("[::1]", True, False),
        (MAPPED, True, False),
        ("[::ffff:127.0.0.1]", True, False),
        ("0.0.0.0", False, True),
        ("::", False, True),
        ("[::]", False, True),
        ("::ffff:0.0.0.0", False, True),
        ("", False, True),
        ("10.0.0.1", False, False),
        ("::ffff:10.0.0.1", False, False),
        ("fe80::1%eth0", False, False),
        ("node-7", False, False),
        ("localhost.example", False, False),
    ],
)
def test_loopback_and_wildcards_in_every_notation(host: str, loopback: bool, wildcard: bool) -> None:
    assert (is_loopback(host), is_wildcard(host)) == (loopback, wildcard)


def test_brackets_come_off_hosts_and_go_onto_addresses() -> None:
    assert [plain_host(host) for host in ("[::1]", " ::1 ", "a", "[a")] == ["::1", "::1", "a", "[a"]
    assert joined("::1", 7400) == "[::1]:7400"
    assert split_address(joined("10.0.0.1", 1)) == ("10.0.0.1", 1)
    config = WorkerConfig(host="[::1]", advertise="[fd00::1]", metrics_host="[::]")
    assert (config.host, config.advertise, config.metrics_host) == ("::1", "fd00::1", "::")


@pytest.mark.parametrize("transports", ["shm", "tcp", ""])
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "::ffff:0.0.0.0"])
def test_a_worker_does_not_listen_on_every_address(host: str, transports: str) -> None:
    with pytest.raises(ConfigError, match="means every address of this host") as refused:
        Worker(pool(), "everywhere", transports=transports, config=WorkerConfig(host=host, insecure=True))
    assert "KVLINK_ADVERTISE" in str(refused.value)
    check = network.advertised_address(WorkerConfig(host=host))
    assert (check.verdict, "ip -brief address" in check.fix) == (Verdict.FAIL, True)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1:7400", "a b", "http://a"])
def test_hosts_that_nobody_can_dial_are_not_advertised(host: str) -> None:
    with pytest.raises(ConfigError, match="KVLINK_ADVERTISE="):
        WorkerConfig(advertise=host)


def test_what_is_advertised() -> None:
    assert advertised_host(WorkerConfig(host="10.0.0.1")) == "10.0.0.1"
    assert advertised_host(WorkerConfig(host="10.0.0.1", advertise="node-7.example")) == "node-7.example"


@pytest.mark.parametrize(
    ("host", "advertise", "coordinator", "named"),
    [
        ("127.0.0.1", "", "", ""),
        ("127.0.0.1", "", "127.0.0.1:7400,[::1]:7400", ""),
        ("10.0.0.1", "", "10.0.0.9:7400", ""),
        ("127.0.0.1", "10.0.0.1", "10.0.0.9:7400", ""),
        ("127.0.0.1", "", "10.0.0.9:7400", "KVLINK_HOST=127.0.0.1"),
        ("[::1]", "", "127.0.0.1:7400, coordinator.svc:7400", "KVLINK_HOST=::1"),
        (MAPPED, "", "10.0.0.9:7400", f"KVLINK_HOST={MAPPED}"),
        ("10.0.0.1", "localhost", "10.0.0.9:7400", "KVLINK_ADVERTISE=localhost"),
    ],
)
def test_loopback_with_a_coordinator_elsewhere(
    host: str, advertise: str, coordinator: str, named: str
) -> None:
    config = WorkerConfig(host=host, advertise=advertise, coordinator=coordinator)
    reason, fix = loopback_problem(config)
    assert reason.startswith(named) if named else not reason
    check = network.advertised_address(config)
    assert (check.verdict, check.fix) == (Verdict.FAIL if named else Verdict.PASS, fix)


def test_joining_a_coordinator_elsewhere_from_loopback_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    config = WorkerConfig(host="127.0.0.1", coordinator="192.0.2.1:7400", transports="shm")
    with caplog.at_level(logging.WARNING, "kvlink"), pytest.raises(ConfigError, match="without TLS"):
        Worker(pool(), "alone", config=config)
    assert "KVLINK_HOST=127.0.0.1 is loopback" in caplog.records[0].getMessage()


def test_a_pull_goes_to_the_advertised_address() -> None:
    with (
        Worker(pool(), "owner", transports="tcp", config=WorkerConfig(advertise=MAPPED)) as owner,
        Worker(pool(), "reader", transports="tcp") as reader,
    ):
        assert owner.card.agent.startswith(f"[{MAPPED}]:")
        assert MAPPED.encode() in owner.card.transports[0].address
        ticket = owner.offer("r", [1])
        assert ticket.agent == owner.card.agent
        reader.pull(ticket, into=[2]).wait()


def test_a_worker_that_listens_on_every_address_advertises_one() -> None:
    config = WorkerConfig(host="0.0.0.0", advertise="localhost", insecure=True)
    assert network.advertised_address(config).verdict is Verdict.PASS
    with (
        Worker(pool(), "owner", transports="tcp", config=config) as owner,
        Worker(pool(), "reader", transports="tcp") as reader,
    ):
        assert owner.card.agent.startswith("localhost:")
        assert b"0.0.0.0" not in owner.card.transports[0].address
        reader.pull(owner.offer("r", [1]), into=[2]).wait()


@pytest.mark.parametrize(
    ("listens", "advertised"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "127.0.0.1"), ("::", "::1"), ("", "::1")],
)
def test_an_advertised_name_means_an_address_of_the_family_that_listens(
    monkeypatch: pytest.MonkeyPatch, listens: str, advertised: str
) -> None:
    """In a container localhost has both, ::1 first."""
    both = [(0, 0, 0, "", (address, 0)) for address in ("::1", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    assert numeric("localhost", "KVLINK_ADVERTISE", listens) == advertised


def test_a_name_that_has_no_address_is_not_advertised() -> None:
    with pytest.raises(ConfigError, match=r"KVLINK_ADVERTISE=nowhere\.invalid: .*; set an address"):
        Worker(pool(), "alone", transports="tcp", config=WorkerConfig(advertise="nowhere.invalid"))


def test_readers_are_told_of_the_owners_host_where_its_address_is_loopback() -> None:
    config = WorkerConfig(ticket_keys="none")
    with Worker(pool(), "owner") as owner, Worker(pool(), "reader", config=config) as reader:
        ticket = owner.offer("r", [1])
        with (
            closed_port() as nobody,
            pytest.raises(PeerUnreachable, match=r"is loopback: .* set its KVLINK_HOST"),
        ):
            reader.pull(replace(ticket, agent=nobody), into=[2]).wait()
        with pytest.raises(KVLinkError, match="set its KVLINK_HOST"):
            reader.pull(replace(ticket, agent=reader.card.agent), into=[2]).wait()
    assert loopback_hint("10.0.0.1:7400") == ""
    assert "KVLINK_HOST" in loopback_hint("[::1]:7400")


class Coordinator:
    """Knows every worker, and counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def worker(self, worker_id: str, epoch: int) -> WorkerCard:
        self.asked.append(worker_id)
        return make_card(worker_id, epoch)


async def test_so_many_cards_of_owners_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvlink.worker.directory._MAX_CARDS", 2)
    coordinator = Coordinator()
    directory = ControlDirectory(cast(Any, coordinator), Security(), cast(Any, None))
    for name in ("a", "b", "c", "b", "c", "a"):
        assert (await directory.card(name, 1, "", fresh=False)).worker_id == name
    assert coordinator.asked == ["a", "b", "c", "a"]
    await directory.card("a", 1, "", fresh=True)
    assert coordinator.asked[4:] == ["a"]
    with pytest.raises(ConfigError, match="names no agent of a; pass coordinator="):
        await ControlDirectory(None, Security(), cast(Any, None)).card("a", 1, "", fresh=False)
    await directory.close()
