# SPDX-License-Identifier: Apache-2.0
"""Batched handoffs: answers find their callers, refusals theirs, and a broken stream leaves nobody waiting."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from control.cards import make_card, make_offer
from control.processes import CoordinatorProcess
from control.watching import holds
from waiting import until

from kvlink.control import Claim, CoordinatorClient, Security, SettleOrder
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.limits import MAX_BATCH_OPS, MAX_REQUEST_BYTES
from kvlink.control.rpc.channel import Channel
from kvlink.control.rpc.handoff_stream import HandoffStream
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import ConfigError, CoordinatorError, CoordinatorUnavailable, UnknownRequest


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
