# SPDX-License-Identifier: Apache-2.0
"""Calls of a coordinator: tickets from client to client, handoff streams, and its status."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import grpc
import grpc.aio
import pytest
from control.cards import make_card, make_offer
from control.processes import CoordinatorProcess
from control.raw import raw_channel
from control.watching import holds
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from waiting import closed_port, until

from kvlink.cli.status import Row, _ask, _sentence, show
from kvlink.control import Claim, CoordinatorClient, Security, SettleOrder
from kvlink.control.client import _difference
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.denials import LogQuota
from kvlink.control.limits import MAX_BATCH_OPS, MAX_REQUEST_BYTES
from kvlink.control.overview import Beat, WorkerReport
from kvlink.control.refusal import RefusedError
from kvlink.control.rpc.channel import Channel
from kvlink.control.rpc.feed import Feed, merged
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.control.rpc.server import Send
from kvlink.control.values import (
    CoordinatorStatus,
    HandoffBatch,
    HandoffResults,
    Nothing,
    Push,
    PushKind,
    Watch,
    WorkerChanges,
)
from kvlink.coordinator import Coordinator
from kvlink.coordinator.coordinator import _prepared
from kvlink.coordinator.handoff_service import HandoffServer
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable, LeaseExpired, UnknownRequest
from kvlink.layout.model_identity import identity_text
from kvlink.types import Joined, WorkerChange


async def test_a_ticket_goes_from_one_client_to_another(
    coordinator: Coordinator, client: CoordinatorClient
) -> None:
    await client.join(make_card())
    async with CoordinatorClient(coordinator.address) as decode:
        claim = asyncio.create_task(decode.claim("r", timeout_s=20.0))
        await until(lambda: client_sees_waiting(coordinator))
        await client.offer(make_offer("r"))
        assert await claim == [make_offer("r").ticket]


def client_sees_waiting(coordinator: Coordinator) -> bool:
    return coordinator._store._offers.waiting  # type: ignore[attr-defined]


async def test_a_claim_is_answered_when_the_last_rank_has_offered(client: CoordinatorClient) -> None:
    await client.join(make_card("p0"))
    await client.join(make_card("p1"))
    claims = [asyncio.create_task(client.claim("r", 20.0, reader, 2)) for reader in range(2)]
    tickets = [make_offer("r", f"p{rank}", rank=rank, of=2) for rank in range(2)]
    for ticket in reversed(tickets):
        await client.offer(ticket)
    assert await asyncio.gather(*claims) == [[offer.ticket for offer in tickets]] * 2


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda c: c.claim("r", timeout_s=0.05), UnknownRequest, "'r': no worker offered it"),
        (lambda c: c.worker("w"), UnknownRequest, "'w' is not joined"),
        (
            lambda c: c.worker("prefill", 7),
            UnknownRequest,
            "restarted: the call is for epoch 7, and epoch 1 is running",
        ),
        (lambda c: c.offer(make_offer("r", "w")), CoordinatorError, "'w' is not joined"),
        (lambda c: c.offer(make_offer("r", epoch=2)), UnknownRequest, "for epoch 2, and epoch 1 is running"),
        (lambda c: c.settle(SettleOrder("w", 1, 0, 0)), UnknownRequest, "'w' is not joined"),
        (lambda c: c.offer(make_offer("r" * 513)), ConfigError, "request_id has 513 bytes"),
        (lambda c: c.claim("r", timeout_s=9e9), ConfigError, "timeout_s"),
    ],
)
async def test_refusals_are_exceptions_with_a_sentence(
    client: CoordinatorClient, call, error, says: str
) -> None:
    await client.join(make_card())
    with pytest.raises(error, match=says):
        await call(client)


async def test_an_offer_that_ran_out_is_said_to_have() -> None:
    now = 0.0
    store = MemoryStore(clock=lambda: now)
    coordinator = Coordinator(store)
    async with CoordinatorClient(await coordinator.start()) as client:
        await client.join(make_card())
        await client.offer(make_offer("r", ttl_s=2.0))
        now = 2.1
        store.tick()
        with pytest.raises(LeaseExpired, match=r"'r' was offered by 'prefill' and not claimed within 2 s"):
            await client.claim("r", timeout_s=20.0)
    await coordinator.close()


@pytest.mark.parametrize(
    ("blob", "status", "says"),
    [
        (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT, "malformed OfferRequest"),
        (b"", grpc.StatusCode.INVALID_ARGUMENT, "request_id has 0 bytes"),
        (bytes(MAX_REQUEST_BYTES + 1), grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"),
    ],
)
async def test_what_no_client_of_ours_sends_gets_a_status_and_a_sentence(
    coordinator: Coordinator, blob: bytes, status: grpc.StatusCode, says: str
) -> None:
    async with raw_channel(coordinator.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/kvlink.v1.Coordinator/Offer")(blob)
    assert caught.value.code() is status
    assert says in (caught.value.details() or "")


async def test_a_stream_of_noise_is_refused_and_the_next_one_served(
    coordinator: Coordinator, client: CoordinatorClient
) -> None:
    async with raw_channel(coordinator.address) as channel:
        for method in ("KeepAlive", "Handoffs"):
            call = channel.stream_stream(f"/kvlink.v1.Coordinator/{method}")()
            await call.write(b"\xff\xff\xff")
            with pytest.raises(grpc.aio.AioRpcError, match="malformed"):
                await call.read()
    assert (await client.status()).workers == 0


async def test_a_draining_coordinator_keeps_no_claim(coordinator: Coordinator) -> None:
    assert coordinator.about().problem == ""
    await coordinator.drain()
    with pytest.raises(RefusedError, match="is shutting down; retry"):
        await coordinator._claim(Claim("r", 60.0))
    assert (await coordinator.status()).waiting_claims == 0


async def test_a_closed_coordinator_says_so(coordinator: Coordinator) -> None:
    await coordinator.close()
    assert coordinator.about().problem == "shutting down"


async def test_a_stream_of_beats_that_ends_leaves_nothing_although_an_order_is_being_sent(
    coordinator: Coordinator,
) -> None:
    store = coordinator._store
    assert isinstance(store, MemoryStore)
    await store.join(make_card(), rejoin=False)
    sending = asyncio.Event()

    async def beats() -> AsyncIterator[Beat]:
        yield Beat("prefill", 1, WorkerReport())
        assert [view.report for view in (await coordinator.overview()).workers] == [WorkerReport()]
        await store.settle(SettleOrder("prefill", 1, 7, 70))
        await sending.wait()

    async def send(push: Push) -> None:
        if push.kind is PushKind.SETTLE:
            sending.set()
            await asyncio.Event().wait()  # its peer does not read

    before = asyncio.all_tasks()
    await coordinator._keep_alive(beats(), send)
    assert asyncio.all_tasks() == before
    assert not store._orders
    assert [view.report for view in (await coordinator.overview()).workers] == [None]


async def test_a_large_batch_is_executed_in_parts() -> None:
    store, many = MemoryStore(), range(300)
    await store.start()
    await store.join(make_card(), rejoin=False)
    sent: list[HandoffResults] = []

    async def send(results: HandoffResults) -> None:
        sent.append(results)

    async def batches() -> AsyncIterator[HandoffBatch]:
        offers = [make_offer(f"r{number}") for number in many]
        orders = [SettleOrder("prefill", 1, number, 70) for number in many]
        claims = [Claim(f"r{number}", 60.0, claim_id=b"%d" % number) for number in many]
        yield HandoffBatch(offers, orders, claims, (0, 299))

    await HandoffServer(store, send, LogQuota()).serve(batches())
    assert (sent[-1].offers_done, sent[-1].settles_done) == (300, 300)
    answers = dict(claimed for results in sent for claimed in results.claimed)
    assert answers == {number: [make_offer(f"r{number}").ticket] for number in many[1:-1]}
    orders = await store.orders("prefill", 1)
    assert [order.slot for order in orders.drain()] == [*many]
    await store.close()


async def test_a_long_list_is_encoded_in_turns_with_others() -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    written: list[int] = []
    assert await _prepared(written.append, range(640)) == range(640)
    beside.cancel()
    assert written == [*range(640)]
    assert turns == 10


async def test_cards_are_asked_for_once(client: CoordinatorClient, coordinator: Coordinator) -> None:
    await client.join(make_card(epoch=3))
    card = await client.worker("prefill")
    assert card == make_card(epoch=3)
    await coordinator.close()
    assert await client.worker("prefill", 3) is card


async def test_a_watch_bridges_a_restart(client: CoordinatorClient, coordinator: Coordinator) -> None:
    await client.join(make_card("stays"))
    await client.join(make_card("goes"))
    async with aclosing(client.watch()) as changes:
        assert {(await anext(changes)).card.worker_id for _ in range(2)} == {"stays", "goes"}
        port = int(coordinator.address.rpartition(":")[2])
        await coordinator.close()
        second = Coordinator()
        await second.start(port=port)
        try:
            await client.join(make_card("stays"))
            gone = await anext(changes)
            while gone.card.worker_id != "goes":  # the watch may come back before `stays` does
                gone = await anext(changes)
            assert gone.what is Joined.DOWN
            await client.join(make_card("comes"))
            seen = await anext(changes)
            while seen.card.worker_id != "comes":
                seen = await anext(changes)
            assert seen.what is Joined.UP
        finally:
            await second.close()


async def test_a_watch_of_a_few_hears_of_no_others(
    coordinator: Coordinator, client: CoordinatorClient
) -> None:
    await client.join(make_card("mine"))
    await client.join(make_card("other"))
    method, watch = CoordinatorCalls.WATCH_WORKERS, Watch(frozenset({"mine", "later"}))
    async with raw_channel(coordinator.address) as channel:
        replies = channel.unary_stream(method.path)(method.request.encode(watch))
        assert [change.card.worker_id for change in method.reply.decode(await replies.read())] == ["mine"]
        for name in ("another", "later"):
            await client.join(make_card(name))
        assert [change.card.worker_id for change in method.reply.decode(await replies.read())] == ["later"]
        replies.cancel()
        nobody = channel.unary_stream(method.path)(method.request.encode(Watch(frozenset({"nobody"}))))
        assert method.reply.decode(await nobody.read()) == [], "at once, although nobody is there"
        nobody.cancel()


class SendsEveryone(Coordinator):
    """As coordinators did before watches could name workers."""

    async def _watch_workers(self, watch: Watch, send: Send[WorkerChanges]) -> None:
        await super()._watch_workers(Watch(), send)


@pytest.mark.parametrize("kind", [Coordinator, SendsEveryone])
async def test_a_client_that_asked_for_a_few_is_told_of_no_others(kind: type[Coordinator]) -> None:
    coordinator = kind()
    async with CoordinatorClient(await coordinator.start()) as client:
        for name in ("other", "mine"):
            await client.join(make_card(name))
        async with aclosing(client.watch(["mine"])) as changes:
            assert await anext(changes) == WorkerChange(Joined.UP, make_card("mine"))
            for name in ("other", "mine"):
                await client.leave(name, 1)
            assert await anext(changes) == WorkerChange(Joined.DOWN, make_card("mine"))
    await coordinator.close()


async def test_a_slow_watcher_gets_in_one_message_what_changed_meanwhile() -> None:
    first, *later = [[WorkerChange(Joined.UP, make_card(f"w{number}"))] for number in range(4)]
    feed: Feed[WorkerChanges] = Feed(8)
    assert all(feed.put(changes) for changes in (first, *later))
    feed.close()
    assert await anext(feed) == first
    assert [changes async for changes in merged(feed)] == [[change for each in later for change in each]]


async def test_health_follows_the_state(coordinator: Coordinator) -> None:
    async with raw_channel(coordinator.address) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", "kvlink.v1.Coordinator"):
            answer = await check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await coordinator._server.set_ready(False)
        answer = await check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize("reflect", [True, False])
async def test_reflection_only_if_asked_for(reflect: bool) -> None:
    coordinator = Coordinator(reflect=reflect)
    async with raw_channel(await coordinator.start()) as channel:
        ask = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        call = ask()
        if reflect:
            await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
            await call.done_writing()
            names = {service.name async for reply in call for service in reply.list_services_response.service}
            assert "kvlink.v1.Coordinator" in names
        else:
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
    await coordinator.close()


async def test_a_taken_port_is_said_to_be(coordinator: Coordinator) -> None:
    with pytest.raises(
        ConfigError, match=r"cannot listen on 127.0.0.1:\d+.*Check that no other server uses the port"
    ):
        await Coordinator().start(port=int(coordinator.address.rpartition(":")[2]))


async def test_nobody_there_is_said_with_the_address_and_what_to_check() -> None:
    with closed_port() as address:
        async with CoordinatorClient(address, timeout_s=3.0) as client:
            with pytest.raises(
                CoordinatorUnavailable, match=rf"{address} does not answer Status.*kvlink coordinator"
            ):
                await client.status()


async def test_an_address_must_be_one() -> None:
    with pytest.raises(ConfigError, match="host:port, not 'nowhere'"):
        CoordinatorClient("nowhere")


async def test_a_closed_client_says_so(client: CoordinatorClient) -> None:
    await client.close()
    await client.close()
    with pytest.raises(CoordinatorError, match="is closed"):
        await client.status()


async def test_sigterm_sends_waiting_claims_away_and_exits_0(coordinator_process) -> None:
    process: CoordinatorProcess = coordinator_process()
    async with CoordinatorClient(process.address) as client:
        await client.join(make_card())
        claim = asyncio.create_task(client.claim("r", timeout_s=60.0))
        await until(lambda: holds(client, "waiting_claims"))
        process.send(signal.SIGTERM)
        _, output = await asyncio.wait_for(asyncio.to_thread(process.process.communicate), 8.0)
        assert (process.process.returncode, output) == (0, "")
        await asyncio.to_thread(process.start)
        await client.join(make_card())
        await client.offer(make_offer("r"))
        assert await claim == [make_offer("r").ticket]


async def test_a_stopped_coordinator_costs_no_more_than_the_timeout(coordinator_process) -> None:
    process: CoordinatorProcess = coordinator_process()
    async with CoordinatorClient(process.address) as client:
        await client.status()
        process.send(signal.SIGSTOP)
        with pytest.raises(
            CoordinatorUnavailable, match=r"not answer Status within 0\.5 s: it is not running, stopped"
        ):
            await client._channel.call(CoordinatorCalls.STATUS, Nothing(), 0.5)
        process.send(signal.SIGCONT)
        assert (await client.status()).workers == 0


NAMES = [f"w{number:05}" for number in range(10_000)]


async def serving(num_workers: int) -> Coordinator:
    store = MemoryStore(lease_s=3600.0)
    coordinator = Coordinator(store)
    await coordinator.start()
    for number, name in enumerate(NAMES[:num_workers]):
        card = replace(make_card(name, process=number + 1), agent=f"127.0.0.1:{number + 1}")
        await store.join(card, rejoin=False)
    return coordinator


async def asked(coordinator: Coordinator, as_json: bool, limit: int) -> tuple[CoordinatorStatus, list[str]]:
    counts, rows = await _ask(coordinator.address, as_json, limit)
    return counts, [row["worker"] for row in rows]


async def test_a_table_is_limited_and_json_is_not() -> None:
    coordinator = await serving(7)
    assert (await asked(coordinator, False, 3))[1] == NAMES[:3]
    for as_json, limit in ((False, 7), (False, 0), (True, 3)):
        assert (await asked(coordinator, as_json, limit))[1] == NAMES[:7]
    await coordinator.close()


async def test_rows_of_a_large_fleet_look_as_those_of_a_small_one() -> None:
    coordinator = await serving(2)
    (_, whole), (_, first) = [await _ask(coordinator.address, False, limit) for limit in (0, 1)]
    await coordinator.close()
    assert {**first[0], "started": ""}.items() <= {**whole[0], "started": ""}.items()
    assert set(whole[0]) - set(first[0]) == {"model", "pid", "refused"}


@pytest.mark.parametrize("as_json", [False, True])
async def test_servers_of_a_model_stand_together(as_json: bool) -> None:
    coordinator = await serving(3)
    for number, digits in enumerate("bab"):
        card = make_card(NAMES[number], process=number + 1)
        text = identity_text(digits * 16, {"name": f"/models/{digits}"})
        layouts = tuple(replace(layout, model=text) for layout in card.layouts)
        await coordinator._store.join(
            replace(card, agent=f"127.0.0.1:{number + 1}", layouts=layouts), rejoin=True
        )
    _, rows = await _ask(coordinator.address, as_json, 0)
    await coordinator.close()
    assert [row["worker"] for row in rows] == [NAMES[1], NAMES[0], NAMES[2]]
    assert "a" * 16 in rows[0]["model"]
    assert "/models/a" in rows[0]["model"]


async def test_a_draining_worker_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    coordinator = await serving(2)
    await coordinator._store.join(replace(make_card(NAMES[1], process=2), draining=True), rejoin=True)
    for limit in (0, 1_000):
        _, rows = await _ask(coordinator.address, False, limit)
        assert [row["state"] for row in rows] == ["up", "draining"]
    _, rows = await _ask(coordinator.address, True, 0)
    assert [row["draining"] for row in rows] == [False, True]
    await asyncio.to_thread(show, coordinator.address, False, 1)
    await coordinator.close()
    assert "2 workers (1 draining), 0 offers" in capsys.readouterr().out


def test_it_says_how_many_are_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def answer(*_: object) -> tuple[CoordinatorStatus, list[Row]]:
        return CoordinatorStatus(workers=12), [{"worker": "w0"}]

    monkeypatch.setattr(sys.modules["kvlink.cli.status"], "_ask", answer)
    show("127.0.0.1:1", False, 1)
    assert "11 more workers are not shown; --limit 0 or --json shows all of them" in capsys.readouterr().out


@pytest.mark.verify
async def test_ten_thousand_workers_are_shown_within_three_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    coordinator = await serving(10_000)
    began = time.monotonic()
    await asyncio.to_thread(show, coordinator.address, False, 100)
    took_s = time.monotonic() - began
    await coordinator.close()
    shown = capsys.readouterr().out
    assert "10000 workers" in shown
    assert "\n9900 more workers are not shown" in shown
    assert took_s < 3.0
    print(f"{took_s:.2f} s", end=" ")


@pytest.mark.verify
async def test_ten_thousand_workers_are_listed_as_json_within_three_seconds_of_cpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts the CPU time of both ends, which share this process. On an idle core that is all the time it takes."""
    patient = partial(CoordinatorClient, timeout_s=60.0)
    monkeypatch.setattr(sys.modules["kvlink.cli.status"], "CoordinatorClient", patient)
    coordinator = await serving(10_000)
    began = time.process_time()
    await asyncio.to_thread(show, coordinator.address, True, 100)
    took_s = time.process_time() - began
    await coordinator.close()
    shown = capsys.readouterr().out
    assert shown.count('"worker"') == 10_000
    assert took_s < 3.0
    print(f"{took_s:.2f} s", end=" ")


def test_the_sentence_has_the_directorys_size_once_it_is_used() -> None:
    status = CoordinatorStatus(prefixes=2, prefix_bytes=3 << 20, published_prefixes=5)
    used = status._replace(prefix_lookups=9, prefix_hits=4)
    assert _sentence("here", used).endswith("; 2 prefixes in 3.00 MiB, found by 4 of 9 lookups")
    assert "prefix" not in _sentence("here", CoordinatorStatus(workers=3))


async def test_offers_before_and_after_their_claims(client: CoordinatorClient) -> None:
    await client.join(make_card())
    order = [(kind, number) for kind in ("offer", "claim") for number in range(3 * MAX_BATCH_OPS)]
    random.Random(1).shuffle(order)
    claims: dict[int, asyncio.Future[list[bytes]]] = {}
    offers: list[asyncio.Future[None]] = []
    async with client.handoffs() as stream:
        for count, (kind, number) in enumerate(order):
            if kind == "offer":
                offers.append(stream.offer(make_offer(f"r{number}")))
            else:
                claims[number] = stream.claim(Claim(f"r{number}", 30.0))
            if count % 700 == 0:
                await client.status()  # the stream sends meanwhile
        await asyncio.gather(*offers)
        for number, claim in claims.items():
            assert await claim == [make_offer(f"r{number}").ticket]
        assert repr(stream) == "HandoffStream(open, 0 operations pending)"
    assert (await client.status()).claimed == 3 * MAX_BATCH_OPS


async def test_two_streams_meet(client: CoordinatorClient, coordinator: Coordinator) -> None:
    await client.join(make_card())
    async with (
        CoordinatorClient(coordinator.address) as other,
        client.handoffs() as prefill,
        other.handoffs() as decode,
    ):
        claims = [decode.claim(Claim(f"r{number}", 30.0)) for number in range(2_000)]
        await until(lambda: holds(client, "waiting_claims", 2_000))
        offers = [prefill.offer(make_offer(f"r{number}")) for number in range(2_000)]
        assert await asyncio.gather(*claims) == [[make_offer(f"r{number}").ticket] for number in range(2_000)]
        await asyncio.gather(*offers)


async def test_each_refusal_goes_to_its_caller(client: CoordinatorClient) -> None:
    await client.join(make_card())
    async with client.handoffs() as stream:
        good, stranger = stream.offer(make_offer("good")), stream.offer(make_offer("r", "stranger"))
        settle, lost = (
            stream.settle(SettleOrder("prefill", 1, 1, 1)),
            stream.settle(SettleOrder("gone", 1, 1, 1)),
        )
        claim, vain = stream.claim(Claim("good", 5.0)), stream.claim(Claim("bad", 0.05))
        with pytest.raises(ConfigError, match="num_seats"):
            stream.offer(make_offer("r")._replace(num_seats=0))
        last = stream.offer(make_offer("last"))
        with pytest.raises(CoordinatorError, match="'stranger' is not joined"):
            await stranger
        with pytest.raises(UnknownRequest, match="'gone' is not joined"):
            await lost
        with pytest.raises(UnknownRequest, match="'bad': no worker offered it"):
            await vain
        assert [await good, await settle, await last] == [None] * 3
        assert await claim == [make_offer("good").ticket]


async def test_tickets_of_any_size_fit(client: CoordinatorClient) -> None:
    await client.join(make_card())
    ticket = bytes(MAX_REQUEST_BYTES // 2)
    async with client.handoffs() as stream:
        offers = [stream.offer(make_offer(f"r{number}")._replace(ticket=ticket)) for number in range(5)]
        await asyncio.gather(*offers)
        assert await stream.claim(Claim("r4")) == [ticket]


async def test_cancelled_operations_do_not_confuse_the_others(client: CoordinatorClient) -> None:
    await client.join(make_card())
    async with client.handoffs() as stream:
        given_up, wanted = stream.claim(Claim("r", 30.0)), stream.claim(Claim("s", 30.0))
        given_up.cancel()
        await asyncio.gather(stream.offer(make_offer("r")), stream.offer(make_offer("s")))
        assert await wanted == [make_offer("s").ticket]


async def test_cancelled_claims_leave_and_their_tickets_go_to_others(client: CoordinatorClient) -> None:
    await client.join(make_card())
    async with client.handoffs() as given_up, client.handoffs() as wanted:
        claims = [given_up.claim(Claim(f"r{number}", 30.0)) for number in range(10_000)]
        await until(lambda: holds(client, "waiting_claims", 10_000))
        for claim in claims[1:]:
            claim.cancel()
        await until(lambda: holds(client, "waiting_claims", 1))
        await asyncio.gather(*(wanted.offer(make_offer(f"r{number}")) for number in range(100)))
        for number in range(1, 100):
            assert await wanted.claim(Claim(f"r{number}", 5.0)) == [make_offer(f"r{number}").ticket]
        assert await claims[0] == [make_offer("r0").ticket]
        assert repr(given_up) == "HandoffStream(open, 0 operations pending)"


async def test_a_claim_that_is_cancelled_before_it_is_sent_takes_nothing(client: CoordinatorClient) -> None:
    await client.join(make_card())
    async with client.handoffs() as stream:
        stream.claim(Claim("r", 30.0)).cancel()
        claimed = stream.claim(Claim("r", 30.0))
        await stream.offer(make_offer("r"))
        assert await claimed == [make_offer("r").ticket]


class Broken(MemoryStore):
    """With a bug in its claims."""

    def claim(self, claim: Claim) -> asyncio.Future[list[bytes]]:
        answer: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        answer.set_exception(ZeroDivisionError("a bug"))
        return answer


async def test_a_bug_is_told_and_logged_with_its_request(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(Broken())
    async with CoordinatorClient(await coordinator.start()) as client, client.handoffs() as stream:
        with pytest.raises(CoordinatorError, match="ZeroDivisionError: a bug"):
            await stream.claim(Claim("r1"))
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "request=r1" in record.getMessage()
    assert record.exc_info is not None
    await coordinator.close()


@pytest.mark.parametrize("how", ["killed", "closed"])
async def test_a_broken_stream_fails_what_is_unanswered(
    coordinator_process: Callable[..., CoordinatorProcess], how: str
) -> None:
    process = coordinator_process()
    async with CoordinatorClient(process.address) as client, client.handoffs() as stream:
        claim = stream.claim(Claim("r", 30.0))
        await until(lambda: holds(client, "waiting_claims"))
        if how == "killed":
            process.kill()
        else:
            await stream.close()
        with pytest.raises(CoordinatorUnavailable):
            await claim
        with pytest.raises(CoordinatorUnavailable):
            stream.claim(Claim("r", 30.0))


async def test_who_was_sending_learns_why_the_stream_ended(
    coordinator_process: Callable[..., CoordinatorProcess],
) -> None:
    """gRPC by itself says INTERNAL of most of these."""
    trust = Security().coordinators()
    channel = Channel(coordinator_process().address, "coordinator", "", trust=trust)
    for _ in range(100):
        async with HandoffStream(channel.open(replace(CoordinatorCalls.HANDOFFS, name="Missing"))) as stream:
            with pytest.raises(CoordinatorError, match="has no method Missing"):  # noqa: PT012
                while True:
                    stream.claim(Claim("r", 30.0))
                    await asyncio.sleep(0)
    await channel.close()


async def test_a_client_that_vanishes_leaves_no_claim_behind(
    client: CoordinatorClient, coordinator: Coordinator
) -> None:
    async with CoordinatorClient(coordinator.address) as other:
        stream = other.handoffs()
        stream.claim(Claim("r", 30.0))
        unary = asyncio.create_task(other.claim("s", 30.0))
        await until(lambda: holds(client, "waiting_claims", 2))
        unary.cancel()
        await stream.close()
    await until(lambda: holds(client, "waiting_claims", 0))


def test_a_fresh_list_forgets_workers_that_it_does_not_have() -> None:
    gone, stays = make_card("gone"), make_card("stays")
    known = {"gone": gone, "stays": stays}
    assert _difference(known, [WorkerChange(Joined.UP, stays)]) == [WorkerChange(Joined.DOWN, gone)]
    assert known == {"stays": stays}
