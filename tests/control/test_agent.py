# SPDX-License-Identifier: Apache-2.0
"""Agents of workers, and the clients that call them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator

import pytest
from control.cards import make_card

from kvlink.control import AgentClient, AgentClients, Renewal, SettleOrder, WorkerAgent
from kvlink.control.values import WorkerEpoch
from kvlink.errors import (
    AccessDenied,
    ConfigError,
    CoordinatorError,
    CoordinatorUnavailable,
    KVLinkError,
    TransportUnavailable,
    UnknownRequest,
)


def accept(transport: str, hellos: list[bytes], takes_keys: bool, caller: int) -> tuple[int, list[bytes]]:
    assert threading.current_thread() is not threading.main_thread(), "may block, so not on the event loop"
    assert transport == "tcp"
    return 2**31 - 1, [hello[::-1] for hello in hellos]


@pytest.fixture
async def agent() -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent(
        accept,
        lambda slot, nonce: (slot, nonce) == (7, 70),
        lambda slot, nonce: slot == 7,
        drain=lambda: 3,
    )
    await agent.start()
    agent.publish(make_card(epoch=4))
    yield agent
    await agent.close()


@pytest.fixture
async def client(agent: WorkerAgent) -> AsyncIterator[AgentClient]:
    async with AgentClient(agent.address, timeout_s=5.0) as client:
        yield client


async def test_it_hands_out_its_card(client: AgentClient, agent: WorkerAgent) -> None:
    assert await client.card() == make_card(epoch=4)
    assert repr(agent) == f"WorkerAgent({agent.address}, 'prefill' epoch 4)"


async def test_it_carries_hellos_and_replies(client: AgentClient) -> None:
    reply = await client.connect("prefill", 4, "tcp", [b"12", b"", bytes(64 << 10)])
    assert reply == (2**31 - 1, (b"21", b"", bytes(64 << 10)), (), ())


async def test_it_settles_seats(client: AgentClient) -> None:
    assert await client.settle(SettleOrder("prefill", 4, 7, 70)) is True
    assert await client.settle(SettleOrder("prefill", 4, 7, 71)) is False


async def test_it_renews_seats(client: AgentClient) -> None:
    assert await client.renew(Renewal("prefill", 4, [(7, 70), (8, 80), (9, 90)])) == [8, 9]
    assert await client.renew(Renewal("prefill", 4, [])) == []
    with pytest.raises(ConfigError, match="number of seats"):
        await client.renew(Renewal("prefill", 4, [(7, 70)] * 1025))


async def test_it_drains_for_those_who_mean_this_process(client: AgentClient) -> None:
    assert await client.drain(WorkerEpoch("prefill", 4)) == 3
    with pytest.raises(UnknownRequest, match="for epoch 3, and 4 is running"):
        await client.drain(WorkerEpoch("prefill", 3))


async def test_another_epoch_or_worker_is_refused_by_name(client: AgentClient, agent: WorkerAgent) -> None:
    with pytest.raises(
        UnknownRequest, match="worker 'prefill' restarted: the call is for epoch 3, and 4 is running"
    ):
        await client.connect("prefill", 3, "tcp", [b""])
    with pytest.raises(UnknownRequest, match="belongs to worker 'prefill', but the call is for 'decode'"):
        await client.settle(SettleOrder("decode", 4, 7, 70))
    agent.publish(make_card(epoch=5))
    with pytest.raises(UnknownRequest, match="for epoch 4, and 5 is running"):
        await client.connect("prefill", 4, "tcp", [b""])


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (TransportUnavailable("no shm here", "Mount it"), TransportUnavailable),
        (AccessDenied("not yours"), AccessDenied),
        (ConfigError("malformed hello"), ConfigError),
        (KeyError("a bug"), CoordinatorError),
    ],
)
async def test_what_the_worker_raises_reaches_the_reader(error: Exception, seen: type[KVLinkError]) -> None:
    def refuse(transport: str, hellos: list[bytes], takes_keys: bool, caller: int) -> tuple[int, list[bytes]]:
        raise error

    agent = WorkerAgent(refuse, lambda slot, nonce: False, lambda slot, nonce: False)
    agent.publish(make_card())
    async with AgentClient(await agent.start()) as client:
        with pytest.raises(seen) as caught:
            await client.connect("prefill", 1, "shm", [b""])
    assert type(caught.value) is seen
    assert str(error).strip("'") in str(caught.value)
    await agent.close()


async def test_a_worker_that_is_still_starting_is_asked_again() -> None:
    agent = WorkerAgent(accept, lambda slot, nonce: False, lambda slot, nonce: False)
    async with AgentClient(await agent.start()) as client:
        with pytest.raises(CoordinatorUnavailable, match="starting or closing"):
            await client.card()
        agent.publish(make_card())
        assert await client.card() == make_card()
    await agent.close()
    await agent.close()


async def test_a_worker_that_is_gone_is_said_to_be(agent: WorkerAgent) -> None:
    await agent.close()
    async with AgentClient(agent.address) as client:
        with pytest.raises(
            CoordinatorUnavailable, match=f"worker agent at {agent.address} does not answer GetCard"
        ):
            await client.card()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_one_address_has_one_client(agent: WorkerAgent) -> None:
    clients = AgentClients()
    assert clients[agent.address] is clients[agent.address]
    assert clients[agent.address] is not clients["127.0.0.1:1"]
    assert await clients[agent.address].card() == make_card(epoch=4)
    await clients.close()


async def test_those_that_nobody_asks_for_are_closed(agent: WorkerAgent) -> None:
    clock = Clock()
    clients = AgentClients(clock=clock)
    unused, used = clients["127.0.0.1:1"], clients[agent.address]
    for port in range(2, 12):
        clock.now += 100.0
        assert clients[agent.address] is used
        assert clients[f"127.0.0.1:{port}"] is not unused
    assert len(clients) == 5, "the agent's, and of the others those of the last 300 seconds"
    assert await used.card() == make_card(epoch=4)
    with pytest.raises(CoordinatorError, match="closed"):
        await unused.card()
    await clients.close()


async def test_closing_closes_all_and_once_more_does_nothing(agent: WorkerAgent) -> None:
    clients = AgentClients()
    client = clients[agent.address]
    await clients.close()
    await clients.close()
    assert len(clients) == 0
    with pytest.raises(CoordinatorError, match="closed"):
        await client.card()


async def test_what_is_no_address_is_refused_and_not_kept() -> None:
    clients = AgentClients()
    with pytest.raises(ConfigError):
        clients["nowhere"]
    assert len(clients) == 0
