# SPDX-License-Identifier: Apache-2.0
"""Clients of agents that come and go."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from control.cards import make_card

from kvlink.control import AgentClients, WorkerAgent
from kvlink.errors import ConfigError, CoordinatorError


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def agent() -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent(lambda *_: (1, []), lambda *_: True, lambda *_: True)
    await agent.start()
    agent.publish(make_card(epoch=4))
    yield agent
    await agent.close()


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
