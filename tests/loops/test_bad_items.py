# SPDX-License-Identifier: Apache-2.0
"""One bad item of a loop does not stop the others, and nobody waits for ever for what failed."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest
from control.cards import make_card, make_offer
from control.replicas import LEASE_S, Replica, joined
from coordinator.chains import prefix
from loops.loops_of_coordinator import etcd_store, hands_off, memory_store
from loops.rows import FailingOnce, Unexpected, failing, passes
from virtual_time import virtual

from kvlink.control import Claim, SessionState
from kvlink.control.denials import LogQuota
from kvlink.control.overview import LinkReport, WorkerReport
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.control.refusal import Reason, RefusedError
from kvlink.control.values import HandoffBatch, HandoffResults, Offer, PrefixChanges, WorkerEpoch
from kvlink.coordinator.handoff_service import HandoffServer
from kvlink.coordinator.store.alarm import Alarm
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError
from kvlink.monitoring.metrics.serving import MAX_CONNECTIONS, _Server
from kvlink.types import Joined


def raises() -> WorkerReport:
    raise Unexpected


def too_large() -> WorkerReport:
    return WorkerReport(active_leases=1 << 80)


def odd_text() -> WorkerReport:
    return WorkerReport(links=(LinkReport("\ud800", "tcp"),))


@pytest.mark.parametrize("report", [raises, too_large, odd_text])
@virtual
async def test_a_report_that_cannot_be_sent_costs_no_membership(report: Callable[[], WorkerReport]) -> None:
    replica = Replica()
    session = await joined(replica, report=report)
    await passes(3 * LEASE_S)
    assert (len(replica.joined), session.state) == (1, SessionState.JOINED)
    assert len(replica.beaten) > 10
    await session.close()


@virtual
async def test_an_offer_that_cannot_be_sent_does_not_stop_the_others_after_a_rejoin() -> None:
    class Stream:
        async def __aenter__(self) -> Stream:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        def offer(self, offer: Offer) -> asyncio.Future[None]:
            if offer.request_id == "bad":
                raise ConfigError("it cannot be sent")
            sent.append(offer.request_id)
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done

    sent: list[str] = []
    replica = Replica()
    session = await joined(replica)
    session._client.handoffs = Stream  # type: ignore[method-assign, assignment]
    for name in ("a", "bad", "b"):
        session._offers[name] = (make_offer(name), 1e9)
    session._rejoin_soon()
    await passes(LEASE_S)
    assert sent == ["a", "b"]
    assert (session.num_rejoins, len(replica.joined)) == (1, 2)
    await session.close()


@pytest.mark.parametrize("error", [Unexpected(), ConfigError("bad")])
@virtual
async def test_a_prefix_that_cannot_be_sent_does_not_stop_the_others(error: Exception) -> None:
    held: set[str] = set()

    class Directory:
        async def publish_prefixes(self, changes: PrefixChanges) -> int:
            if any(each.request_id == "bad" for each in changes.prefixes):
                raise error
            held.update(each.request_id for each in changes.prefixes)
            held.difference_update(changes.withdrawn)
            return 7

    publisher = PrefixPublisher(cast(Any, Directory()), lambda: WorkerEpoch("prefill", 1))
    for name in ("a", "bad", "b", "c"):
        publisher.publish(prefix(name, ttl_s=600.0), lambda: True)
    running = asyncio.ensure_future(publisher.run())
    await passes(1.0)
    assert held == {"a", "b", "c"}
    publisher.withdraw("a")
    publisher.publish(prefix("d", ttl_s=600.0), lambda: True)
    await passes(4.0)
    assert held == {"b", "c", "d"}
    running.cancel()


@virtual
async def test_a_prefix_whose_lease_cannot_be_asked_for_is_withdrawn() -> None:
    class Directory:
        async def publish_prefixes(self, changes: PrefixChanges) -> int:
            sent.extend(each.request_id for each in changes.prefixes)
            return 7

    sent: list[str] = []
    publisher = PrefixPublisher(cast(Any, Directory()), lambda: WorkerEpoch("prefill", 1))
    publisher.publish(prefix("bad"), cast(Any, raises))
    publisher.publish(prefix("a"), lambda: True)
    assert not await publisher.step()
    assert (sent, len(publisher)) == (["a"], 1)


@virtual
async def test_a_lost_worker_that_cannot_be_forgotten_does_not_hide_the_others() -> None:
    async with memory_store() as store:
        await store.join(make_card("another"), rejoin=False)
        feed = await store.watch()
        assert len(await anext(feed)) == 2
        with failing(MemoryStore, "_forget"):
            gone = await anext(feed)
        assert [(change.what, change.card.worker_id) for change in gone] == [
            (Joined.DOWN, "prefill"),
            (Joined.DOWN, "another"),
        ]


@virtual
async def test_a_claim_whose_answer_fails_does_not_keep_others_waiting() -> None:
    async with memory_store() as store:
        claims = [store.claim(Claim("r", 5.0, reader, 2)) for reader in range(2)]
        claims[1].on_answer = FailingOnce()
        await store.offer(make_offer("r", seats=2))
        assert [await claim for claim in claims] == [[make_offer("r").ticket]] * 2


@virtual
async def test_an_alarm_rings_at_the_earliest_time_that_was_set() -> None:
    times: list[tuple[float, float]] = []

    def ring(late_s: float) -> float:
        times.append((clock(), late_s))
        return math.inf if len(times) > 1 else 8.0

    clock = asyncio.get_running_loop().time
    alarm = Alarm(ring, clock)
    for due in (9.0, 5.0, 7.0):
        alarm.set(due)
    await passes(20.0)
    assert times == [(5.0, 0.0), (8.0, 0.0)]
    alarm.set(1.0)  # is over
    await passes(1.0)
    assert times[2:] == [(20.0, 0.0)]
    alarm.close()


@virtual
async def test_an_alarm_that_fails_rings_again_with_a_back_off() -> None:
    times: list[float] = []

    def ring(late_s: float) -> float:
        times.append(clock())
        raise Unexpected

    clock = asyncio.get_running_loop().time
    alarm = Alarm(ring, clock)
    alarm.set(1.0)
    await passes(20.0)
    alarm.close()
    before = len(times)
    await passes(20.0)
    assert len(times) == before
    assert times[0] == 1.0
    assert 10 < len(times) < 40, "it does not spin"


@virtual
async def test_a_stream_whose_late_answer_cannot_be_sent_ends() -> None:
    async def batches() -> AsyncIterator[HandoffBatch]:
        yield HandoffBatch([], [], [Claim("r", 60.0)], [])
        await passes(3600.0)

    async def send(results: HandoffResults) -> None:
        if results.claimed:
            raise Unexpected

    async with memory_store() as store:
        serving = asyncio.ensure_future(HandoffServer(store, send, LogQuota()).serve(batches()))
        await passes(1.0)
        await store.offer(make_offer("r"))
        await passes(1.0)
        assert serving.done(), "its peer would wait for the ticket"
        with pytest.raises(Unexpected):
            await serving
        assert (await store.status()).waiting_claims == 0


@virtual
async def test_a_reply_of_etcd_with_too_few_results_fails_its_batch() -> None:
    async with etcd_store() as (store, etcd):
        answer = etcd._answer
        etcd._answer = lambda chosen: type(answer(chosen))(header=etcd._header(), succeeded=True)  # type: ignore[method-assign]
        done = await asyncio.gather(
            *(store.offer(make_offer(name)) for name in ("a", "b")), return_exceptions=True
        )
        assert [isinstance(each, RefusedError) and each.reason for each in done] == [Reason.FAILED] * 2
        etcd._answer = answer  # type: ignore[method-assign]
        await hands_off(store)


def test_a_connection_for_which_no_thread_is_left_gives_its_room_back() -> None:
    class Request:
        def shutdown(self, how: int) -> None:
            pass

        def close(self) -> None:
            pass

    server = _Server("127.0.0.1", 0)
    server.server_close()
    with failing(threading.Thread, "start", times=2 * MAX_CONNECTIONS):
        for _ in range(2 * MAX_CONNECTIONS):
            with pytest.raises(Unexpected):
                server.process_request(Request(), ("127.0.0.1", 1))
    assert server._room.acquire(blocking=False)
