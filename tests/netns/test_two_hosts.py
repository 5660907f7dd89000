# SPDX-License-Identifier: Apache-2.0
"""Handoffs between two hosts, over a link that is slow, lossy, cut, or gone."""

from __future__ import annotations

import subprocess
import time

import pytest
from netns.hosts import Host
from transports.pools import wide
from transports.processes import RemoteWorker, eventually

from kvlink.errors import PeerUnreachable, TransferError, TransferTimeout

Hosts = tuple[Host, Host]

POOL = wide(num_blocks=512)
FROM, INTO = list(range(0, 512, 2)), list(range(255, -1, -1))  # 4 MiB
SEED = 7


class Deployment:
    """An owner on one host and a reader on the other, connected by a first pull."""

    def __init__(self, hosts: Hosts, **config: str) -> None:
        self.owner = RemoteWorker(hosts[0].start(), "prefill", POOL, **config)
        self.reader = RemoteWorker(hosts[1].start(), "decode", POOL, **config)
        self.owner.do("fill", seed=SEED)

    def pull(self, timeout_s: float = 20.0) -> dict[str, object]:
        ticket = self.owner.offer(FROM)
        taken: dict[str, object] = self.reader.do(
            "pull", ticket=ticket.to_text(), into=INTO, timeout_s=timeout_s
        )
        assert self.reader.do("differing", into=INTO, seed=SEED, blocks=FROM) == 0
        return taken


def test_hosts_find_tcp_and_say_why_not_shared_memory(hosts: Hosts) -> None:
    taken = Deployment(hosts).pull()
    assert taken["transport"] == "tcp"
    assert taken["bytes"] == len(FROM) * (16 << 10)
    refused = taken["refused"]
    assert isinstance(refused, dict)
    assert "network namespace" in refused["shm"]
    assert "pid namespace" in refused["cma"]
    assert "loopback" in refused


def test_a_cut_link_fails_within_the_deadline_and_heals(hosts: Hosts) -> None:
    deployment = Deployment(hosts)
    deployment.pull()
    ticket = deployment.owner.offer(FROM)
    hosts[0].link("down")
    started = time.monotonic()
    with pytest.raises((TransferTimeout, PeerUnreachable)):
        deployment.reader.do("pull", ticket=ticket.to_text(), into=INTO, timeout_s=1.0)
    assert time.monotonic() - started < 10  # far from the kernel's own patience of minutes
    hosts[0].link("up")
    eventually(lambda: _healed(deployment), within_s=60)


def _healed(deployment: Deployment) -> bool:
    try:
        deployment.pull(timeout_s=5.0)
    except TransferError:
        return False
    return True


def test_a_link_cut_in_the_middle_of_a_pull(hosts: Hosts) -> None:
    deployment = Deployment(hosts)
    deployment.pull()
    hosts[0].shape("tbf", "rate", "8mbit", "burst", "64k", "latency", "200ms")  # 4 MiB take 4.2 s
    deployment.owner.do("fill", seed=SEED + 1)
    ticket = deployment.owner.offer(FROM)
    deployment.reader.peer.send(  # type: ignore[attr-defined]
        "pull", name="decode", ticket=ticket.to_text(), into=INTO, timeout_s=6.0
    )
    time.sleep(0.2)
    hosts[1].link("down")
    with pytest.raises((TransferTimeout, PeerUnreachable)):
        deployment.reader.peer.answer()  # type: ignore[attr-defined]
    assert (
        deployment.reader.do("differing", into=INTO, seed=SEED + 1, blocks=FROM) > 0
    )  # it was in the middle


def test_a_slow_link_carries_the_same_bytes(hosts: Hosts) -> None:
    deployment = Deployment(hosts)
    hosts[0].shape("tbf", "rate", "200mbit", "burst", "64k", "latency", "200ms")
    for _ in range(3):
        assert deployment.pull()["transport"] == "tcp"


def test_a_delayed_and_lossy_link_carries_the_same_bytes(hosts: Hosts) -> None:
    deployment = Deployment(hosts)
    hosts[0].shape("netem", "delay", "5ms", "2ms", "loss", "1%")
    for _ in range(3):
        deployment.pull()


def test_a_host_that_vanishes_ends_the_pull(hosts: Hosts) -> None:
    deployment = Deployment(hosts)
    deployment.pull()
    ticket = deployment.owner.offer(FROM)
    subprocess.run(["ip", "-n", hosts[0].namespace, "link", "del", hosts[0].device], check=True)
    with pytest.raises((TransferTimeout, PeerUnreachable)):
        deployment.reader.do("pull", ticket=ticket.to_text(), into=INTO, timeout_s=1.0)


def test_a_host_that_swallows_what_it_gets_is_given_up_long_before_the_deadline(hosts: Hosts) -> None:
    """Nothing refuses: the owner gets longer than one that does, but not all the time there is."""
    deployment = Deployment(hosts)
    ticket = deployment.owner.offer(FROM)
    hosts[0].run("ip", "route", "add", "blackhole", f"{hosts[1].address}/32")
    started = time.monotonic()
    with pytest.raises(PeerUnreachable, match="does not answer GetCard"):
        deployment.reader.do("pull", ticket=ticket.to_text(), into=INTO, timeout_s=60.0)
    assert 8 < time.monotonic() - started < 30


def test_blocks_come_back_when_the_readers_host_is_cut_off(hosts: Hosts) -> None:
    deployment = Deployment(hosts)
    deployment.pull()
    ticket = deployment.owner.offer(FROM, ttl_s=0.5)
    hosts[1].link("down")
    assert deployment.owner.fate_of(ticket.request_id) == "expired"
