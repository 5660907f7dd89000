# SPDX-License-Identifier: Apache-2.0
"""Older peers and ours in one fleet: what they said is played back to ours, and what ours say is read as they do."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from control.cards import make_card
from control.older import scenario
from control.older.peers import RECORDED, Older
from control.older.tape import TRAILER, Event, Tape, serving
from control.raw import raw_channel
from google.protobuf.message import Message

from kvlink.control import AgentClient, CoordinatorClient, WorkerAgent
from kvlink.control.codec._wire import check_version
from kvlink.coordinator import Coordinator
from kvlink.errors import ConfigError
from kvlink.ticket import LeaseSeat, Ticket
from kvlink.types import PROTOCOL_VERSION
from kvlink.v1 import agent_pb2, card_pb2, coordinator_pb2

OTHER = PROTOCOL_VERSION + 1
Play = Callable[[str], Awaitable[None]]


@pytest.fixture(params=RECORDED, ids=lambda path: path.stem)
def older(request: pytest.FixtureRequest) -> Older:
    return Older(request.param)


def played(tape: Tape, arrived: list[tuple[str, bytes]]) -> Callable[..., Awaitable[None]]:
    """The older server, as recorded. What it is sent goes to `arrived`."""
    calls = list(tape.calls().values())

    async def serve(method: str, blobs: AsyncIterator[bytes], context: Any) -> None:
        script = next((call for call in calls if call[0].method == method), None)
        if script is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
            raise AssertionError
        calls.remove(script)
        for event in script:
            await _act(event, blobs, context, arrived)

    return serve


async def _act(
    event: Event, blobs: AsyncIterator[bytes], context: Any, arrived: list[tuple[str, bytes]]
) -> None:
    if event.what == "sent":
        arrived.append((event.method, await anext(blobs)))
    elif event.what == "received":
        await context.write(bytes.fromhex(event.blob))
    elif event.what == "left":
        async for _ in blobs:
            pass
    elif event.what == "ended" and event.status != "OK":
        trailers = ((TRAILER, event.reason),)
        await context.abort(grpc.StatusCode[event.status], event.sentence, trailers)


async def against_older_server(tape: Tape, play: Play) -> list[tuple[str, bytes]]:
    arrived: list[tuple[str, bytes]] = []
    server, address = await serving(played(tape, arrived))
    try:
        await asyncio.wait_for(play(address), 30.0)
    finally:
        await server.stop(1.0)
    return arrived


@pytest.mark.parametrize(
    ("name", "play"), [("coordinator", scenario.with_coordinator), ("agent", scenario.with_agent)]
)
async def test_our_client_gets_on_with_an_older_server(older: Older, name: str, play: Play) -> None:
    arrived = await against_older_server(older.tapes[name], play)
    recorded = [(event.method, event.blob) for event in older.tapes[name].events if event.what == "sent"]
    assert [method for method, _ in arrived] == [method for method, _ in recorded]
    for (method, ours), (_, theirs) in zip(arrived, recorded, strict=True):
        assert older.sees(method, "sent", ours) == older.sees(method, "sent", bytes.fromhex(theirs)), method


async def against_older_client(older: Older, name: str, address: str) -> int:
    """Says what the older client said and compares what it receives. Returns the number of messages compared."""
    num_compared = 0
    async with raw_channel(address) as channel:
        calls: dict[int, Any] = {}
        for event in older.tapes[name].events:
            if event.call not in calls:
                calls[event.call] = channel.stream_stream(event.method)()
            call = calls[event.call]
            if event.what == "sent":
                await call.write(bytes.fromhex(event.blob))
            elif event.what == "closed":
                await call.done_writing()
            elif event.what == "received":
                heard = older.sees(event.method, "received", await call.read())
                assert heard == older.sees(event.method, "received", bytes.fromhex(event.blob)), event.method
                num_compared += 1
            elif event.what == "left":
                call.cancel()
            else:
                with suppress(grpc.aio.AioRpcError):
                    await call.read()  # an empty message before a refusal, which gRPC's unary clients ignore
                assert (await call.code()).name == event.status
                trailers = dict(await call.trailing_metadata() or ())
                assert trailers.get(TRAILER, "") == event.reason
    return num_compared


async def test_our_coordinator_gets_on_with_an_older_worker_and_reader(
    older: Older, coordinator: Coordinator
) -> None:
    assert await against_older_client(older, "coordinator", coordinator.address) == 14


@pytest.fixture
async def agent() -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent(scenario.accept, scenario.settle, lambda slot, nonce: False)
    await agent.start()
    agent.publish(make_card())
    yield agent
    await agent.close()


async def test_our_agent_gets_on_with_an_older_reader(older: Older, agent: WorkerAgent) -> None:
    assert await against_older_client(older, "agent", agent.address) == 4


def test_a_ticket_reads_alike_in_both(older: Older) -> None:
    ticket = Ticket.from_bytes(older.ticket)
    assert (ticket.request_id, ticket.worker_id, ticket.epoch) == ("r", "prefill", 2)
    assert ticket.seats == (LeaseSeat(3, 1005, 1007), LeaseSeat(4, 1006, 2**64 - 1))
    assert list(ticket.block_ids) == [5, 1, 2**31]
    assert ticket.to_bytes() == older.ticket


# Another protocol version: refused, in words that name both.

_BOTH = rf"speaks protocol version {OTHER} and this process speaks {PROTOCOL_VERSION}"


def _in_other_version(sealed: card_pb2.SealedCard) -> None:
    card = card_pb2.WorkerCard.FromString(sealed.card)
    card.protocol_version = OTHER
    sealed.card = card.SerializeToString()
    sealed.crc32 = zlib.crc32(sealed.card)


async def _refusal(address: str, method: str, blob: bytes) -> str:
    async with raw_channel(address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(method)(blob)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return refused.value.details() or ""


def test_the_page_on_upgrades_quotes_the_refusal() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "operate" / "upgrade.md").read_text().split())
    with pytest.raises(ConfigError) as refused:
        check_version("worker 'prefill-0'", OTHER)
    assert f"`{str(refused.value).partition(';')[0]}; …`" in page


async def test_a_worker_of_another_version_cannot_join(
    older: Older, coordinator: Coordinator, client: CoordinatorClient
) -> None:
    request = coordinator_pb2.JoinRequest.FromString(older.first("coordinator", "Join", "sent"))
    _in_other_version(request.card)
    output = await _refusal(coordinator.address, "/kvlink.v1.Coordinator/Join", request.SerializeToString())
    assert f"worker 'prefill' {_BOTH}" in output
    assert await client.workers() == []


async def test_a_reader_of_another_version_cannot_connect(older: Older, agent: WorkerAgent) -> None:
    request = agent_pb2.ConnectRequest.FromString(older.first("agent", "Connect", "sent"))
    request.protocol_version = OTHER
    output = await _refusal(agent.address, "/kvlink.v1.WorkerAgent/Connect", request.SerializeToString())
    assert f"the reader {_BOTH}" in output


async def test_a_coordinator_of_another_version_is_not_joined(older: Older) -> None:
    reply = coordinator_pb2.JoinReply.FromString(older.first("coordinator", "Join", "received"))
    reply.protocol_version = OTHER
    with pytest.raises(ConfigError, match=f"the coordinator {_BOTH}"):
        await _asked(reply, lambda address: CoordinatorClient(address).join(make_card()))


async def test_an_owner_of_another_version_is_not_read(older: Older) -> None:
    sealed = card_pb2.SealedCard.FromString(older.first("agent", "GetCard", "received"))
    _in_other_version(sealed)
    with pytest.raises(ConfigError, match=f"worker 'prefill' {_BOTH}"):
        await _asked(sealed, lambda address: AgentClient(address).card())


async def _asked(reply: Message, ask: Callable[[str], Awaitable[object]]) -> None:
    async def serve(method: str, blobs: AsyncIterator[bytes], context: Any) -> None:
        await anext(blobs)
        await context.write(reply.SerializeToString())

    server, address = await serving(serve)
    try:
        await ask(address)
    finally:
        await server.stop(0.1)


def test_a_ticket_of_another_version_is_refused(older: Older) -> None:
    blob = bytearray(older.ticket)
    struct.pack_into("<H", blob, 6, OTHER)
    with pytest.raises(
        ConfigError, match=f"protocol version {OTHER}, this process speaks {PROTOCOL_VERSION}"
    ):
        Ticket.from_bytes(bytes(blob))
