# SPDX-License-Identifier: Apache-2.0
"""Tickets and claims, and that each ticket is given once."""

from __future__ import annotations

import asyncio

import pytest
from control.cards import make_card, make_offer
from control.store.stages import LEASE_S, Stage, gone, refused, started

from kvlink.control.refusal import Reason
from kvlink.control.values import Claim


async def test_a_published_ticket_is_claimed_once(joined: Stage) -> None:
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r")) == [make_offer("r").ticket]
    second = await started(joined.store.claim(Claim("r", 1.0)))
    await joined.pass_time(1.0)
    assert (await refused(second)).reason is Reason.UNKNOWN


async def test_a_claim_waits_for_its_offer(joined: Stage) -> None:
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    await joined.store.offer(make_offer("other"))
    await started(claim)
    await joined.store.offer(make_offer("r"))
    assert await claim == [make_offer("r").ticket]
    await asyncio.sleep(0)  # a claim may leave the queue a turn of the loop after its answer
    assert (await joined.store.status()).waiting_claims == 0


async def test_the_hook_of_a_claim_hears_of_tickets_and_of_refusals(joined: Stage) -> None:
    claims = [joined.store.claim(Claim(name, 2.0)) for name in ("r", "none")]
    heard: list[object] = []
    for claim in claims:
        claim.on_answer = heard.append
    await joined.store.offer(make_offer("r"))
    assert await claims[0] == [make_offer("r").ticket]
    assert heard == claims[:1]
    await joined.pass_time(2.0)
    await refused(claims[1])
    assert heard == claims


async def test_a_claim_waits_for_every_rank_and_gets_them_in_order(joined: Stage) -> None:
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    for rank in (2, 0):
        await joined.store.offer(make_offer("r", rank=rank, of=3))
    assert await gone(joined.store, Claim("r"))
    await started(claim)
    await joined.store.offer(make_offer("r", rank=1, of=3))
    assert await claim == [make_offer("r", rank=rank, of=3).ticket for rank in range(3)]


async def test_a_claim_in_vain_says_how_far_it_got(joined: Stage) -> None:
    none = await started(joined.store.claim(Claim("none", 2.0)))
    some = await started(joined.store.claim(Claim("some", 2.0)))
    await joined.store.offer(make_offer("some", rank=0, of=2))
    await joined.pass_time(2.0)
    assert "'none': no worker offered it" in (await refused(none)).sentence
    assert "'some': only 1 of 2 ranks offered it within 2 s" in (await refused(some)).sentence


async def test_every_reader_may_claim_until_all_have(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", seats=2))
    for reader in (0, 0, 1):  # reader 0 asks again, as after a lost reply
        assert await joined.store.claim(Claim("r", 0.0, reader, 2))
    assert await gone(joined.store, Claim("r", 0.0, 0, 2))


async def test_a_claim_asked_again_under_its_id_gets_the_same_tickets(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", seats=2))
    claims = [Claim("r", 0.0, reader, 2, bytes([reader])) for reader in range(2)]
    for claim in (claims[0], claims[0], claims[1], claims[1], claims[0]):
        assert await joined.store.claim(claim) == [make_offer("r").ticket]
    assert await gone(joined.store, claims[0]._replace(claim_id=b"another"))
    assert await gone(joined.store, claims[0]._replace(claim_id=b""))


async def test_a_ticket_that_was_claimed_is_not_published_again(joined: Stage) -> None:
    await joined.store.offer(make_offer("r"))
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r"))
    await joined.store.offer(make_offer("r"))  # as a worker does that joined again
    assert await gone(joined.store, Claim("r"))
    assert (await joined.store.status()).tickets == 0
    other = make_offer("r")._replace(ticket=b"of another prefill")
    await joined.store.offer(other)
    assert await joined.store.claim(Claim("r")) == [other.ticket]


async def test_tickets_of_two_prefills_are_not_mixed(joined: Stage) -> None:
    first = [make_offer("r", rank=rank, of=2) for rank in range(2)]
    second = [offer._replace(ticket=b"second " + offer.ticket) for offer in first]
    for offer in first:
        await joined.store.offer(offer)
    assert await joined.store.claim(Claim("r"))
    await joined.store.offer(second[0])
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    await joined.store.offer(second[1])
    assert await claim == [offer.ticket for offer in second]


@pytest.mark.parametrize(("seats", "readers"), [(1, 3), (3, 1)])
async def test_neither_seats_nor_readers_alone_end_a_request(joined: Stage, seats: int, readers: int) -> None:
    await joined.store.offer(make_offer("r", seats=seats))
    num_readers = max(seats, readers)
    for reader in range(num_readers):
        assert await joined.store.claim(Claim("r", 0.0, reader, num_readers))
    assert (await joined.store.status()).tickets == 0


async def test_waiting_readers_are_all_answered(joined: Stage) -> None:
    claims = [await started(joined.store.claim(Claim("r", 5.0, reader, 2))) for reader in range(2)]
    await joined.store.offer(make_offer("r", seats=2))
    assert await asyncio.gather(*claims) == [[make_offer("r").ticket]] * 2


async def test_a_cancelled_claim_takes_no_ticket(joined: Stage) -> None:
    claim = await started(joined.store.claim(Claim("r", 5.0)))
    claim.cancel()
    await asyncio.sleep(0)
    assert (await joined.store.status()).waiting_claims == 0
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r"))


async def test_an_offer_runs_out_and_later_claims_hear_it_at_once(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", ttl_s=3.0))
    await joined.pass_time(2.9)
    assert (await joined.store.status()).tickets == 1
    await joined.pass_time(0.1)
    expired = await refused(joined.store.claim(Claim("r", 60.0)))
    assert expired.reason is Reason.EXPIRED
    assert "not claimed within 3 s" in expired.sentence
    assert (await joined.store.status()).tickets == 0
    await joined.store.offer(make_offer("r"))
    assert await joined.store.claim(Claim("r")), "offering again counts"


async def test_offering_again_replaces_the_ticket_and_its_time_to_live(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", ttl_s=1.0))
    await joined.store.offer(make_offer("r", ttl_s=3.0)._replace(ticket=b"newer"))
    await joined.pass_time(2.0)
    assert await joined.store.claim(Claim("r")) == [b"newer"]


async def test_ranks_that_disagree_are_refused(joined: Stage) -> None:
    await joined.store.offer(make_offer("r", rank=0, of=2))
    disagrees = await refused(joined.store.offer(make_offer("r", rank=1, of=4)))
    assert disagrees.reason is Reason.MALFORMED
    assert "rank 1 offered with 4 ranks, and other ranks with 2" in disagrees.sentence


async def test_only_the_running_life_of_a_worker_offers(joined: Stage) -> None:
    unknown = await refused(joined.store.offer(make_offer("r", worker_id="nobody")))
    assert unknown.reason is Reason.NOT_JOINED
    await joined.store.join(make_card("prefill", epoch=9, process=2), rejoin=False)
    assert (await refused(joined.store.offer(make_offer("r", epoch=1)))).reason is Reason.RESTARTED


@pytest.mark.parametrize("how", ["restarts", "leaves", "dies"])
async def test_what_a_worker_offered_goes_with_it(joined: Stage, how: str) -> None:
    await joined.store.offer(make_offer("r", ttl_s=600.0))
    if how == "restarts":
        await joined.store.join(make_card("prefill", process=2), rejoin=False)
    elif how == "leaves":
        await joined.store.leave("prefill", 1)
    else:
        await joined.pass_time(2 * LEASE_S)
    gone = await refused(joined.store.claim(Claim("r", 60.0)))
    assert gone.reason is Reason.UNKNOWN
    assert "recompute" in gone.sentence
    assert (await joined.store.status()).tickets == 0


async def test_too_many_tickets_and_claims_are_refused_and_room_is_regained(joined: Stage) -> None:
    for number in range(4):
        await joined.store.offer(make_offer(f"r{number}"))
    assert (await refused(joined.store.offer(make_offer("r4")))).reason is Reason.TOO_MANY
    await joined.store.offer(make_offer("r3"))  # replaces its own
    assert await joined.store.claim(Claim("r0"))
    await joined.store.offer(make_offer("r4"))

    claims = [await started(joined.store.claim(Claim(name, 5.0))) for name in "ab"]
    assert (await refused(joined.store.claim(Claim("c", 5.0)))).reason is Reason.TOO_MANY
    claims[0].cancel()
    await asyncio.sleep(0)
    await started(joined.store.claim(Claim("c", 5.0)))


async def test_tickets_of_all_workers_are_bounded_together(joined: Stage) -> None:
    await joined.store.join(make_card("another"), rejoin=False)
    for number in range(6):
        await joined.store.offer(make_offer(f"r{number}", "prefill" if number < 3 else "another"))
    late = make_offer("late")
    assert "6 unclaimed tickets" in (await refused(joined.store.offer(late))).sentence
    await joined.store.claim(Claim("r0", 5.0))
    await joined.store.offer(late)
