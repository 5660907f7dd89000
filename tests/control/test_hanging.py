# SPDX-License-Identifier: Apache-2.0
"""A coordinator is stopped for two leases: its idle workers and their tickets are at the other one in time."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from contextlib import closing

import pytest
from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster
from control.fleet import Fleet

from kvlink.control import CoordinatorClient, Session
from kvlink.types import Joined

pytestmark = [pytest.mark.verify, pytest.mark.claims_move_on]

LEASE_S = 6.0
NUM_WORKERS = 10


async def test_no_worker_goes_down_and_every_ticket_is_claimed(etcd: EtcdCluster) -> None:
    with closing(Fleet(etcd, 2, LEASE_S, "hanging")) as fleet:
        hangs, stays = fleet.replicas
        sessions = [await joined(fleet, hangs.address, number) for number in range(NUM_WORKERS)]
        for number, session in enumerate(sessions):
            await session.offer(make_offer(f"r{number}", session.card.worker_id, ttl_s=120.0))
        async with CoordinatorClient(stays.address) as healthy:
            lost: Counter[str] = Counter()
            watching = asyncio.create_task(note_lost(healthy, lost))
            await asyncio.sleep(LEASE_S / 2)
            hangs.send(signal.SIGSTOP)
            await asyncio.sleep(2 * LEASE_S)
            assert not lost
            assert [session.num_rejoins for session in sessions] == [1] * NUM_WORKERS
            for number in range(NUM_WORKERS):
                ticket = make_offer(f"r{number}", f"w{number}").ticket
                assert await healthy.claim(f"r{number}", timeout_s=5.0) == [ticket]
            hangs.send(signal.SIGCONT)
            watching.cancel()
        for session in sessions:
            await session.close()
            await session._client.close()


async def joined(fleet: Fleet, at: str, number: int) -> Session:
    client = CoordinatorClient(fleet.addresses)
    while client.next_address != at:
        client._channel.avoid(client.next_address)
    card = make_card(f"w{number}", process=number + 1)
    return await Session.join(client, card, lambda slot, nonce: None)


async def note_lost(client: CoordinatorClient, lost: Counter[str]) -> None:
    async for change in client.watch():
        if change.what is Joined.DOWN:
            lost[change.card.worker_id] += 1
