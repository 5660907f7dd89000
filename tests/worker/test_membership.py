# SPDX-License-Identifier: Apache-2.0
"""A worker joins, renews, claims by id and leaves, at its coordinator and its agent."""

from __future__ import annotations

import asyncio
import select
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any, cast

import pytest
from control.cards import make_card
from transports.pools import PoolSpec

from kvlink import LeaseEnd, Termination, Worker, WorkerConfig
from kvlink.control import AgentClient, CoordinatorClient, Session
from kvlink.control.values import Renewal
from kvlink.coordinator import Coordinator
from kvlink.errors import ConfigError, KVLinkError
from kvlink.worker.port_events import PortLog

WAIT_S = 60.0
AHEAD = 1 << 62
"""An epoch that a host had whose clock was years ahead."""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    coordinator = Coordinator()
    yield await coordinator.start()
    await coordinator.close()


def made(opened: ExitStack, name: str, coordinator: str = "") -> Worker:
    config = WorkerConfig(transports="loopback", coordinator=coordinator)
    return opened.enter_context(Worker(PoolSpec().make(), name, config=config))


async def in_thread(run: Callable[[ExitStack], None]) -> None:
    """Workers block, and the coordinator needs this loop."""

    def runs() -> None:
        with ExitStack() as opened:
            run(opened)

    await asyncio.to_thread(runs)


async def test_a_reader_renews_a_seat_through_the_agent() -> None:
    with ExitStack() as opened:
        owner = await asyncio.to_thread(made, opened, "owner")
        ticket = owner.offer("r", [1])
        (seat,) = ticket.seats
        seats = [(seat.slot, seat.settle_nonce), (seat.slot, seat.settle_nonce ^ 1 << 40)]
        async with AgentClient(owner.card.agent) as agent:
            assert await agent.renew(Renewal("owner", owner.card.epoch, seats[:1])) == []
            assert await agent.renew(Renewal("owner", owner.card.epoch, seats)) == [seat.slot]
        await asyncio.to_thread(owner.close)


async def test_a_request_is_read_and_released_by_its_id(address: str) -> None:
    def run(opened: ExitStack) -> None:
        owner, reader = made(opened, "owner", address), made(opened, "reader", address)
        for request_id in ("pulled", "released", "empty"):
            owner.offer(request_id, [1], publish=True)
        ended = owner.watch_events_blocking(WAIT_S)
        assert reader.pull("pulled", [2]).wait(WAIT_S)
        assert (event := next(ended)).how is LeaseEnd.SETTLED
        assert event.request_id == "pulled"
        reader.release(request_id="released")
        assert next(ended).request_id == "released"
        assert reader.pull("empty", [2], layers=(1, 1)).done
        assert next(ended).request_id == "empty"
        for call in (
            lambda: reader.withdraw_prefix(""),
            lambda: reader.pull(owner.offer("r", [1]), [], tokens=(0, 0), layers=(0, 99)),
        ):
            with pytest.raises(ConfigError, match=r"request id|layers"):
                call()
        with pytest.raises(KVLinkError):
            reader.pull("nobody offers it", [2], timeout_s=0.0).wait(WAIT_S)
        assert reader.stats().claims.count == 3  # of those that came in time
        reader.close()
        with pytest.raises(ConfigError, match="closed"):
            reader.release(request_id="released")

    await in_thread(run)


async def test_a_host_whose_clock_went_back_gets_a_later_epoch(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: Counter[str] = Counter()

    def counted(kind: type, begin: str) -> None:
        start, close = getattr(kind, begin), kind.close  # type: ignore[attr-defined]

        def starts(*given: Any, **named: Any) -> Any:
            held[kind.__name__] += 1
            return start(*given, **named)

        def closes(self: Any) -> Any:
            held[kind.__name__] -= 1
            return close(self)

        monkeypatch.setattr(kind, begin, starts)
        monkeypatch.setattr(kind, "close", closes)

    counted(PortLog, "__init__")
    counted(Session, "join")
    async with CoordinatorClient(address) as before:
        before.act_as("the process before")
        card = make_card("owner", epoch=AHEAD)
        await before.leave("owner", (await before.join(card)).epoch)

    def run(opened: ExitStack) -> None:
        owner, reader = made(opened, "owner", address), made(opened, "reader", address)
        assert owner.card.epoch > AHEAD
        ticket = owner.offer("r", [1])
        assert ticket.epoch == owner.card.epoch
        assert reader.pull(ticket, [2]).wait(WAIT_S)
        assert held == {"PortLog": 2, "Session": 2}, "of the owner and the reader"

    await in_thread(run)


async def test_each_part_is_closed_although_another_one_fails(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await asyncio.to_thread(lambda: made(ExitStack(), "owner", address))
    membership, closed = worker._membership, []

    def fails(owner: Any, call: str, name: str) -> None:
        plain = getattr(owner, call)

        async def late() -> None:
            await plain()
            closed.append(name)
            raise ConfigError(name)

        def at_once() -> None:
            plain()
            closed.append(name)
            raise ConfigError(name)

        monkeypatch.setattr(owner, call, at_once if name == "ports" else late)

    for owner, call, name in (
        (membership._client, "close", "client"),
        (membership.directory, "close", "directory"),
        (membership._agent, "close", "agent"),
        (membership._session, "close", "session"),
        (membership._ports, "close", "ports"),
    ):
        fails(owner, call, name)
    await asyncio.to_thread(worker.close)
    assert closed == ["ports", "session", "agent", "directory", "client"]
    membership.publish_prefix(cast(Any, None), lambda: True)
    assert membership.num_prefixes == 0


@pytest.mark.parametrize(("timeout_s", "most_ms"), [(None, None), (2.5, 2500), (0.25, 250), (0.0, 0)])
def test_a_wait_for_sigterm_takes_as_long_as_it_is_told(
    timeout_s: float | None, most_ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Poll:
        def register(self, *_: object) -> None:
            pass

        def poll(self, ms: float | None) -> list[object]:
            asked.append(ms)
            return []

    asked: list[float | None] = []
    monkeypatch.setattr(select, "poll", Poll)
    with Termination() as ending:
        assert not ending.wait(timeout_s)
    assert asked == [most_ms]
