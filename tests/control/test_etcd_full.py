# SPDX-License-Identifier: Apache-2.0
"""A real etcd runs into its quota, and the commands of the operator's guide bring it back."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster, need_etcdctl, start_etcd
from waiting import until

from kvlink.control import CoordinatorClient
from kvlink.control.refusal import Overloaded
from kvlink.control.session import Session
from kvlink.coordinator.coordinator import Coordinator
from kvlink.coordinator.store.etcd import EtcdStore

pytestmark = [pytest.mark.verify, pytest.mark.timeout(180)]

_GUIDE = Path(__file__).parents[2] / "docs" / "operate" / "runbook.md"
_QUOTA = 8 << 20
_TICKET = bytes(100_000)


@pytest.fixture
def small_etcd() -> Iterator[EtcdCluster]:
    need_etcdctl()
    etcd = start_etcd(quota_backend_bytes=str(_QUOTA))
    yield etcd
    etcd.close()


def follow_the_guide(etcd: EtcdCluster) -> str:
    """Runs what the section has, with the addresses of this etcd."""
    section = _GUIDE.read_text().partition("## etcd is full\n")[2].partition("\n## ")[0]
    commands = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)[0]
    commands, replaced = re.subn(r"ETCDCTL_ENDPOINTS=\S+", f"ETCDCTL_ENDPOINTS={etcd.addresses}", commands)
    assert replaced == 1
    line = ["bash", "-euo", "pipefail", "-c", commands]
    done = subprocess.run(line, env=dict(os.environ), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def fill(session: Session) -> int:
    """Offers until etcd takes no more, and forgets each at once."""
    number = 0
    while True:
        name = f"fill-{number}"
        try:
            await session.offer(make_offer(name, ttl_s=2.0)._replace(ticket=_TICKET), timeout_s=20.0)
        except Overloaded as full:
            assert "store is full: etcd at 127.0.0.1" in str(full)
            return number
        finally:
            session.forget(name)
        number += 1


async def test_it_is_refused_shown_and_mended(
    small_etcd: EtcdCluster, caplog: pytest.LogCaptureFixture
) -> None:
    store = EtcdStore(f"etcd://{small_etcd.addresses}/full", lease_s=3.0)
    coordinator = Coordinator(store, lease_s=3.0)
    async with CoordinatorClient(await coordinator.start()) as client:
        session = await Session.join(client, make_card(), lambda slot, nonce: None, 20.0)
        await fill(session)
        assert "NOSPACE" in small_etcd.control("alarm", "list")
        for number in range(50):
            with pytest.raises(Overloaded):
                await client.offer(make_offer(f"r{number}"))
        assert not coordinator.readiness.health().is_healthy
        assert len([line for line in caplog.messages if "etcd is full" in line]) == 1
        assert not [record for record in caplog.records if record.exc_info]
        await until(lambda: not store._mirror.requests)  # what is over is deleted all the same
        assert await store.beat("prefill", 1)
        assert session.num_rejoins == 0

        follow_the_guide(small_etcd)
        assert small_etcd.control("alarm", "list") == ""
        await client.offer(make_offer("after"))
        assert await client.claim("after", timeout_s=10.0) == [make_offer("after").ticket]
        assert coordinator.readiness.health().is_healthy
        assert await fill(session) * len(_TICKET) > _QUOTA / 2, "defragmenting has freed it"
        await session.close()
    await coordinator.close()
