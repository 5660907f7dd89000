# SPDX-License-Identifier: Apache-2.0
"""Handoffs and the demo between two hosts over providers of libfabric, also over a link that is cut."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from netns.hosts import Host
from netns.test_two_hosts import FROM, INTO, Deployment
from transports.processes import eventually

from kvlink import _core
from kvlink.demo.processes import Child
from kvlink.demo.route import Cluster, Route, Row
from kvlink.demo.servers import NUM_NEW_TOKENS, PROMPTS
from kvlink.errors import PeerUnreachable, TransferError, TransferTimeout

_WHY_NOT, _FIX = _core.probe("fabric")
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=f"{_WHY_NOT}. {_FIX}")


@pytest.mark.parametrize("provider", ["sockets", "tcp;ofi_rxm"])
def test_pulls_survive_a_cut_link(hosts: tuple[Host, Host], provider: str) -> None:
    deployment = Deployment(hosts, transports="fabric", fabric_provider=provider)
    assert deployment.pull()["transport"] == "fabric"
    ticket = deployment.owner.offer(FROM)
    hosts[0].link("down")
    with pytest.raises((TransferTimeout, PeerUnreachable)):
        deployment.reader.do("pull", ticket=ticket.to_text(), into=INTO, timeout_s=1.0)
    hosts[0].link("up")

    def has_healed() -> bool:
        try:
            return deployment.pull(timeout_s=5.0)["transport"] == "fabric"
        except TransferError:
            return False

    eventually(has_healed, within_s=60)


def demonstrate(hosts: tuple[Host, Host], transport: str, provider: str, fault: str = "") -> Row:
    """`kvlink demo` with prefill and the coordinator on one host and decode on the other."""
    with Cluster() as cluster, closing(Child("coordinator")) as coordinator:
        cluster.start()
        prefill, decode = cluster.hosts(transport)
        for child, host in ((coordinator, hosts[0]), (prefill, hosts[0]), (decode, hosts[1])):
            env = {"KVLINK_HOST": host.address, "KVLINK_INSECURE": "1", "KVLINK_FABRIC_PROVIDER": provider}
            kind = "netns.demo_host:DemoHost"
            child.call("host", "open", kind=kind, namespace=host.namespace, env=env | {"KVLINK_FAULT": fault})
        assert len({Path(f"/proc/{pid}/ns/net").readlink() for pid in ("self", prefill.pid, decode.pid)}) == 3
        at = coordinator.call("host", "coordinator")["address"]
        return Route(transport, prefill, decode, lambda: None).try_out(at, cluster.expected)


@pytest.mark.parametrize("provider", ["sockets", "tcp;ofi_rxm"])
def test_the_demo_has_equal_tokens_on_two_hosts(hosts: tuple[Host, Host], provider: str) -> None:
    row = demonstrate(hosts, "fabric", provider)
    assert (row.good, row.error) == (True, "")
    assert (row.path, row.processes, row.tokens) == ("fabric", 2, len(PROMPTS) * NUM_NEW_TOKENS)
    assert f"prefill-fabric over fabric (1 lane(s) {provider}, not encrypted)" in row.explanation


def test_the_demo_sees_a_wrong_byte(hosts: tuple[Host, Host]) -> None:
    row = demonstrate(hosts, "fault+fabric", "tcp;ofi_rxm", fault="corrupt-data@every:1")
    assert not row.good
    assert "the bytes differ from those offered in 20 of 20 timed pulls" in row.error
