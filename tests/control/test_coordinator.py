# SPDX-License-Identifier: Apache-2.0
"""A real coordinator over loopback: calls, refusals, health, reflection, limits, its end."""

from __future__ import annotations

import asyncio
import signal
from contextlib import aclosing

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

from kvlink.control import CoordinatorClient, SettleOrder
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.limits import MAX_REQUEST_BYTES
from kvlink.control.rpc.feed import Feed, merged
from kvlink.control.rpc.server import Send
from kvlink.control.values import Nothing, Watch, WorkerChanges
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable, LeaseExpired, UnknownRequest
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
