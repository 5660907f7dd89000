# SPDX-License-Identifier: Apache-2.0
"""A flood by one caller leaves room for the others, and for what the same caller asks for next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
from control.cards import make_card
from transports.pools import wide

from kvlink import Worker
from kvlink.control import AgentClient, Security, WorkerAgent
from kvlink.control.limits import MAX_CONNECTS, MAX_CONNECTS_OF_ONE, MAX_HELLOS
from kvlink.control.refusal import Overloaded
from kvlink.control.rpc.peer_address import caller_number, serving
from kvlink.control.security.policy import Trust


class _Apart(Security):
    """Its clients have connections of their own, as those of other processes do."""

    def workers(self, tenant: str | None = None) -> Trust:
        trust = super().workers(tenant)
        return _OwnConnection(trust.security, trust.wanted, trust.tokens, trust.host_tokens)


class _OwnConnection(Trust):
    def dial(self, address: str, options: Any) -> Any:
        return super().dial(address, [*options, ("grpc.use_local_subchannel_pool", 1)])


class Slow:
    """A transport that admits nobody yet."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.callers: list[int] = []

    def __call__(
        self, transport: str, hellos: list[bytes], takes_keys: bool, caller: int
    ) -> tuple[int, list[bytes]]:
        self.callers.append(caller)
        assert self.go_on.wait(60)
        return 1, hellos


@asynccontextmanager
async def serving_slowly() -> AsyncIterator[tuple[Slow, str]]:
    slow = Slow()
    agent = WorkerAgent(slow, lambda slot, nonce: True, lambda slot, nonce: True)
    agent.publish(make_card())
    yield slow, await agent.start()
    slow.go_on.set()
    await agent.close()


def connects(client: AgentClient, number: int) -> list[asyncio.Future[Any]]:
    return [asyncio.ensure_future(client.connect("prefill", 1, "tcp", [b""])) for _ in range(number)]


@pytest.mark.verify
async def test_a_worker_admits_a_bounded_number_of_readers_at_a_time_and_of_one_caller_fewer() -> None:
    async with (
        serving_slowly() as (slow, address),
        AgentClient(address, 60.0, _Apart()) as flooder,
        AgentClient(address, 60.0, _Apart()) as another,
        AgentClient(address, 60.0, _Apart()) as third,
    ):
        flood = connects(flooder, MAX_CONNECTS_OF_ONE + 5)
        refused, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        for call in refused:
            with pytest.raises(Overloaded, match=f"{MAX_CONNECTS_OF_ONE} of them for this caller; retry"):
                call.result()
        honest = connects(another, MAX_CONNECTS - MAX_CONNECTS_OF_ONE)
        assert await flooder.card() == make_card(), "other calls are answered meanwhile"
        late = connects(third, 1)
        with pytest.raises(
            Overloaded, match=f"already admitting {MAX_CONNECTS} readers, 0 of them for this caller"
        ):
            await late[0]
        slow.go_on.set()
        results = await asyncio.gather(*flood, *honest, return_exceptions=True)
    assert sum(isinstance(result, Overloaded) for result in results) == 5
    assert len(set(slow.callers)) == 2


class Call(NamedTuple):
    """Has the part of gRPC's context that counts."""

    address: str
    identities: tuple[bytes, ...] | None = None

    def peer(self) -> str:
        return self.address

    def peer_identities(self) -> tuple[bytes, ...] | None:
        return self.identities


def number(*of: Any) -> int:
    serving(Call(*of))
    return caller_number()


def test_processes_of_this_host_and_other_hosts_are_told_apart() -> None:
    assert number("ipv4:127.0.0.1:1") != number("ipv4:127.0.0.1:2")
    assert number("ipv6:%5B::1%5D:1") != number("ipv6:%5B::1%5D:2")
    assert number("ipv4:10.0.0.1:1") == number("ipv4:10.0.0.1:2") == number("ipv6:%5B::ffff:10.0.0.1%5D:3")
    assert number("ipv4:10.0.0.1:1") != number("ipv4:10.0.0.2:1")
    assert number("ipv4:10.0.0.1:1", (b"a",)) != number("ipv4:10.0.0.1:1", (b"b",))
    assert 0 <= number("ipv4:10.0.0.1:1") < 1 << 64


@pytest.fixture
def pair() -> Iterator[tuple[Worker, Worker]]:
    pool = wide(num_blocks=8)
    with Worker(pool.make(), "owner") as owner, Worker(pool.make(), "reader") as reader:
        yield owner, reader


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_hellos_of_one_caller_shut_no_reader_out(pair: tuple[Worker, Worker], transport: str) -> None:
    owner, reader = pair
    (way,) = (way for way in owner.card.transports if way.name == transport)
    hello = reader._engine.open(transport, way.address, "owner", 0).hellos()[0]
    async with AgentClient(owner.card.agent, 60.0, _Apart()) as flooder:
        for _ in range(80):
            await flooder.connect("owner", owner.card.epoch, transport, [hello] * MAX_HELLOS)
        with Worker(wide(num_blocks=8).make(), "honest", transports=transport) as honest:
            pull = honest.pull(owner.offer("r", [1, 2]), [1, 2])
            assert await asyncio.to_thread(pull.wait, 20)
            assert [peer.transport for peer in honest.peers()] == [transport]
