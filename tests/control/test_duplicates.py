# SPDX-License-Identifier: Apache-2.0
"""Two processes under one worker_id: the one that runs keeps it, and a restarted one does not wait for it."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.certificates import Pki
from waiting import closed_port, until

from kvlink.config.addresses import split_address
from kvlink.control import AgentClient, CoordinatorClient, Security, Session, WorkerAgent
from kvlink.control.refusal import Refused, Replaced, WorkerIdTaken
from kvlink.coordinator import Coordinator, incumbents
from kvlink.coordinator.incumbents import Incumbents
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import AccessDenied
from kvlink.types import HostIdentity, WorkerCard


def ignore(slot: int, settle_nonce: int) -> None:
    pass


@asynccontextmanager
async def agent(security: Security | None = None, port: int = 0) -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent(lambda *_: (1, []), lambda *_: False, lambda *_: False, security=security)
    await agent.start(port=port)
    yield agent
    await agent.close()


def second(agent: str = "127.0.0.1:2") -> WorkerCard:
    return make_card(epoch=9, process=2, agent=agent)


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


async def test_the_process_that_runs_stays_and_the_second_is_told_to_come_again(
    client: CoordinatorClient, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    async with agent() as healthy:
        session = await Session.join(client, make_card(agent=healthy.address), ignore)
        healthy.publish(session.card)
        await session.offer(make_offer("r"))
        with pytest.raises(
            WorkerIdTaken,
            match=f"'prefill' runs already: the agent of its epoch 1.*{healthy.address} answers",
        ) as refused:
            await client.join(second("10.0.0.9:7401"))
        assert refused.value.retryable
        (warning,) = lines(caplog, logging.WARNING)
        assert f"worker=prefill stays={healthy.address} refused=10.0.0.9:7401" in warning
        assert coordinator.counts.refusals["Join", "TAKEN"] == 1
        assert await client.claim("r") == [make_offer("r").ticket]
        assert (await client.worker("prefill")).epoch == 1
        await session.close()
    assert (await client.join(second())).epoch == 9, "it left: its name is free"


async def test_many_such_joins_are_a_few_lines(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with agent() as healthy:
        card = make_card(agent=healthy.address)
        await client.join(card)
        healthy.publish(card)
        for _ in range(15):
            with pytest.raises(WorkerIdTaken):
                await client.join(second())
    assert len(lines(caplog, logging.WARNING)) == 10


async def test_a_process_that_died_is_followed_at_once(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with closed_port() as nobody:
        await client.join(make_card(agent=nobody))
        assert (await client.join(second())).epoch == 9
        (line,) = [line for line in lines(caplog, logging.INFO) if line.startswith("another process takes")]
        assert f"worker=prefill agent=127.0.0.1:2 before={nobody} because=" in line
    assert lines(caplog, logging.WARNING) == []


async def test_another_process_at_the_old_address_is_not_the_old_one(client: CoordinatorClient) -> None:
    async with agent() as reused:
        await client.join(make_card(agent=reused.address))
        reused.publish(make_card("decode", process=7, agent=reused.address))
        assert (await client.join(second())).epoch == 9


HERE, THERE = HostIdentity("boot", 1, 2, 3, 4), HostIdentity("another boot", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("answers", "address", "host", "is_taken"),
    [
        ("the first", "10.0.0.7:1", HERE, True),
        ("the first", "127.0.0.1:1", HERE, True),
        ("the first", "127.0.0.1:1", THERE, True),
        ("the second", "10.0.0.7:1", HERE, False),
        ("the second", "10.0.0.7:1", THERE, False),
        ("the second", "127.0.0.1:1", HERE, False),
        ("the second", "127.0.0.1:1", THERE, True),
        ("nobody yet", "10.0.0.7:1", HERE, False),
        ("nobody yet", "127.0.0.1:1", THERE, True),
    ],
)
async def test_a_process_at_the_address_of_another_is_asked_for(
    answers: str, address: str, host: HostIdentity, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Service, a NAT or loopback on two hosts: the address alone does not say that the first process has ended."""
    first, newcomer = make_card(agent=address), replace(second(address), host=host)

    async def ask(address: str, tenant: str, waits: bool) -> WorkerCard:
        if answers == "nobody yet":
            await asyncio.Event().wait()
        return first if answers == "the first" else newcomer

    monkeypatch.setattr(incumbents, "_OWN_ANSWER_S", 0.0 if answers == "nobody yet" else 30.0)
    deciding = Incumbents(await started_store(first), Security(), ask).check_gone(newcomer)
    with pytest.raises(Refused, match="runs already") if is_taken else nullcontext():
        await deciding


async def test_a_process_that_comes_back_asks_nobody() -> None:
    async def ask(address: str, tenant: str, waits: bool) -> WorkerCard:
        raise AssertionError

    await Incumbents(await started_store(), Security(), ask).check_gone(make_card())


async def test_a_restart_on_a_fixed_port_joins_although_its_own_agent_answers(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incumbents, "_OWN_ANSWER_S", 0.0)
    async with agent() as first:
        await client.join(make_card(agent=first.address))
        first.publish(make_card(agent=first.address))
    async with agent(port=split_address(first.address)[1]) as again:
        assert again.address == first.address
        assert (await client.join(second(again.address))).epoch == 9


async def test_a_restart_at_the_same_address_does_not_wait_for_itself(client: CoordinatorClient) -> None:
    async with agent() as starting:
        await client.join(make_card(agent=starting.address))
        assert (await client.join(second(starting.address))).epoch == 9
        assert starting._server.counts.refusals["GetCard", "NOT_READY"] == 1


async def test_another_process_does_not_take_the_name_by_the_address_of_the_first(
    client: CoordinatorClient,
) -> None:
    async with agent() as healthy:
        card = make_card(agent=healthy.address)
        await client.join(card)
        healthy.publish(card)
        with pytest.raises(WorkerIdTaken):
            await client.join(second(healthy.address))


async def test_who_does_not_answer_in_time_has_lost_the_name() -> None:
    async def silent(address: str, tenant: str, waits: bool) -> WorkerCard:
        await asyncio.Event().wait()
        raise AssertionError

    await Incumbents(await started_store(), Security(), silent, answer_s=0.0).check_gone(second())


async def test_an_agent_that_is_starting_is_asked_again(client: CoordinatorClient) -> None:
    """Two pods that start at one time: the first has joined, and its agent is told in a moment."""
    async with agent() as starting:
        card = make_card(agent=starting.address)
        await client.join(card)
        joining = asyncio.create_task(client.join(second()))
        await until(lambda: starting._server.counts.refusals["GetCard", "NOT_READY"])
        starting.publish(card)
        with pytest.raises(WorkerIdTaken):
            await joining


async def test_who_says_that_it_comes_back_takes_no_name_from_a_process_that_runs(
    client: CoordinatorClient,
) -> None:
    async with agent() as healthy:
        await client.join(make_card(agent=healthy.address))
        healthy.publish(make_card(agent=healthy.address))
        with pytest.raises(WorkerIdTaken):
            await client.join(second(), rejoin=True)
        with pytest.raises(Replaced):
            await client.join(make_card(process=2), rejoin=True)
    assert (await client.join(second(), rejoin=True)).epoch == 9, "a coordinator has lost its last epochs"


async def test_under_tls_a_coordinator_may_ask_an_agent_who_it_is_and_nothing_else(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    coordinator = Coordinator(security=pki.coordinator())
    async with (
        CoordinatorClient(await coordinator.start(), security=pki.worker()) as client,
        agent(pki.worker()) as healthy,
        AgentClient(healthy.address, security=pki.coordinator(), tenant="acme") as asking,
    ):
        card = make_card(agent=healthy.address)
        await client.join(card)
        healthy.publish(card)
        with pytest.raises(WorkerIdTaken):
            await client.join(second())
        with pytest.raises(AccessDenied, match="belongs to tenant 'acme'"):
            await asking.connect("prefill", 1, "tcp", [b""])
        async with agent(pki.worker("other")) as foreign:
            await client.join(make_card("w", agent=foreign.address))
            foreign.publish(make_card("w", agent=foreign.address))
            joined = await client.join(make_card("w", epoch=9, process=2, agent="127.0.0.1:2"))
            assert joined.epoch == 9, "another tenant's agent cannot keep a name"
    await coordinator.close()


async def started_store(card: WorkerCard | None = None) -> MemoryStore:
    store = MemoryStore()
    await store.start()
    await store.join(card or make_card(), rejoin=False)
    return store


@pytest.mark.verify
async def test_a_host_that_is_silent_holds_the_name_for_moments(client: CoordinatorClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await client.join(make_card(agent=f"127.0.0.1:{silent.getsockname()[1]}"))
        joined = await asyncio.wait_for(client.join(second()), 3.0)
    assert joined.epoch == 9
