# SPDX-License-Identifier: Apache-2.0
"""Several coordinators over one etcd, and load that knows of every ticket what became of it."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

from control.cards import make_card, make_offer
from control.etcd_cluster import EtcdCluster, start_etcd
from control.processes import CoordinatorProcess

from kvlink.control import CoordinatorClient, Session
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.values import JoinRequest
from kvlink.errors import CoordinatorUnavailable, UnknownRequest

_CLAIM_S = 60.0


class Fleet:
    """Coordinator processes that share a store."""

    def __init__(self, etcd: EtcdCluster, num_replicas: int, lease_s: float = 10.0, name: str = "") -> None:
        store = f"etcd://{etcd.addresses}/{name or 'tests'}"
        self.etcd = etcd
        self.replicas = [CoordinatorProcess(lease_s, store) for _ in range(num_replicas)]

    @property
    def addresses(self) -> str:
        return ",".join(replica.address for replica in self.replicas)

    def close(self) -> None:
        for replica in self.replicas:
            replica.kill()


@contextmanager
def three_of_each() -> Iterator[Fleet]:
    """Coordinators, and members of their etcd."""
    with closing(start_etcd(3)) as etcd, closing(Fleet(etcd, 3)) as fleet:
        yield fleet


@dataclass
class Load:
    """Workers that offer without pause, and readers that claim by id, each ticket by two of them at once."""

    addresses: str
    num_workers: int = 4
    readers_each: int = 2
    brought: Counter[bytes] = field(default_factory=Counter)
    """How many claims brought each ticket."""
    num_offered: int = 0
    num_empty: int = 0
    """Claims that were told that another had it."""
    failed: list[BaseException] = field(default_factory=list)
    slowest_s: float = 0.0
    stop: bool = False

    async def __aenter__(self) -> Load:
        self._sessions, self._clients = [], []
        for number in range(self.num_workers):
            client = CoordinatorClient(self.addresses, timeout_s=20.0)
            card = make_card(f"w{number}", process=number + 1)
            self._sessions.append(await Session.join(client, card, lambda slot, nonce: None, 20.0))
            self._clients.append(client)
        self._readers = [CoordinatorClient(self.addresses, timeout_s=20.0) for _ in range(self.readers_each)]
        self._lanes = [
            asyncio.create_task(self._lane(session, lane)) for session in self._sessions for lane in range(4)
        ]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stop = True
        await asyncio.wait_for(asyncio.gather(*self._lanes), 2 * _CLAIM_S)
        for session in self._sessions:
            await session.close()
        for client in (*self._clients, *self._readers):
            await client.close()

    async def _lane(self, session: Session, lane: int) -> None:
        number, run = 0, os.urandom(4).hex()
        try:
            while not self.stop:
                number += 1
                await self._hand_off(session, f"{run}-{session.card.worker_id}-{lane}-{number}")
        except BaseException as error:
            self.failed.append(error)
            raise

    async def _hand_off(self, session: Session, request_id: str) -> None:
        offer = make_offer(request_id, session.card.worker_id, session.card.epoch, ttl_s=120.0)
        started = time.monotonic()
        winner = asyncio.create_task(self._claim(random.choice(self._readers), request_id))
        await session.offer(offer, timeout_s=_CLAIM_S)
        self.num_offered += 1
        assert await winner == offer.ticket
        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
        session.forget(request_id)
        if random.random() < 0.2:  # somebody else comes too late, and must not get it, too
            try:
                await random.choice(self._readers).claim(request_id, timeout_s=0.0)
                self.brought[offer.ticket] += 1
            except UnknownRequest:
                self.num_empty += 1
            except CoordinatorUnavailable:  # now or never: nobody asked again
                pass

    async def _claim(self, client: CoordinatorClient, request_id: str) -> bytes:
        (ticket,) = await client.claim(request_id, timeout_s=_CLAIM_S)
        self.brought[ticket] += 1
        return ticket

    @property
    def asked(self) -> str:
        """The coordinator that a reader waits at."""
        return self._readers[0].next_address

    async def goes_on(self, count: int = 200) -> None:
        """So many more handoffs end well from now on."""
        wanted = self.num_offered + count
        deadline = time.monotonic() + _CLAIM_S
        while self.num_offered < wanted and not self.failed:
            assert time.monotonic() < deadline, f"only {self.num_offered} of {wanted}"
            await asyncio.sleep(0.02)
        self.check()

    def check(self) -> None:
        """No ticket was lost: its claim would have failed. None was doubled."""
        assert not self.failed, self.failed
        assert max(self.brought.values(), default=1) == 1


async def everyone_refuses(addresses: str) -> str:
    """Joins in vain, and returns the sentence."""
    async with CoordinatorClient(addresses) as client:
        try:
            request = JoinRequest(make_card("late", process=99))
            await client._channel.attempt(CoordinatorCalls.JOIN, request, 30.0)
        except CoordinatorUnavailable as error:
            assert (type(error), error.telling) == (CoordinatorUnavailable, 1), "metrics bear its name"
            return str(error)
    raise AssertionError("it could join")
