# SPDX-License-Identifier: Apache-2.0
"""Handoffs between two hosts over providers of libfabric, and over a link that is cut."""

from __future__ import annotations

import pytest
from netns.hosts import Host
from netns.test_two_hosts import FROM, INTO, Deployment
from transports.processes import eventually

from kvlink import _core
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
