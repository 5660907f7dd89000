# SPDX-License-Identifier: Apache-2.0
"""Faults on the way to an owner end in the right exception, in time; the next pull works by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from transports.pairs import POISON, Pair
from transports.processes import PATIENCE

from kvlink.errors import (
    AccessDenied,
    Cancelled,
    PeerUnreachable,
    StaleBlocks,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
)

NewPair = Callable[..., Pair]

# With one lane, post 1 of all and of slots reads the lease table's header while connecting; then come data and slot. A
# pull whose connection is cut begins again: it fails when that happens twice.
FAULTS = {
    "drop-data@1": TransferTimeout,
    "drop-slot@2": TransferTimeout,
    "hang-data@1": TransferTimeout,
    "hang-slot@2": TransferTimeout,
    "fail-data@1..2": PeerUnreachable,
    "fail-slot@2..3": PeerUnreachable,
    "break-data@1..2": PeerUnreachable,
    "break-slot@2;break-slot@4": PeerUnreachable,
    "deny-data@1": AccessDenied,
    "deny-slot@2": AccessDenied,
    "corrupt-slot@2": StaleBlocks,
}


@pytest.mark.parametrize("num_blocks", [1, 40], ids=["inline", "queued"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_fails_one_pull(transport: str, fault: str, num_blocks: int, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault=fault)
    ticket = pair.offer(range(num_blocks))
    pair.reader.connect(ticket, timeout_s=20 * PATIENCE)
    timeout_s = 2 if FAULTS[fault] is TransferTimeout else 20 * PATIENCE
    pull = pair.start(ticket, range(num_blocks), timeout_s=timeout_s)
    with pytest.raises(FAULTS[fault]) as failed:
        pull.wait(20 * PATIENCE)
    assert failed.type is FAULTS[fault]
    assert ticket.request_id in str(failed.value)
    assert f"{transport}" in str(failed.value)
    assert 0 <= pull.stats.total_us < 20e6 * PATIENCE
    pair.pull(ticket, range(num_blocks), timeout_s=20)  # the very same lease is still good
    assert pair.owner.fate_of(ticket.request_id) == "settled"


def test_the_lane_of_a_small_pull_breaks_and_another_takes_over(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="break-slot@3", lanes=2)  # each lane has read one while connecting
    pull = pair.pull(pair.offer([3]), [4], timeout_s=20)
    assert pull.explain()[0].lanes == 2
    pair.works()


@pytest.mark.parametrize("fault", ["delay=5ms@every:1", "delay-data=20ms@1..3", "delay-slot=20ms@every:2"])
def test_delays_change_no_byte(transport: str, fault: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault=fault, num_blocks=300)
    for num_blocks in (1, 7, 290):
        pair.pull(pair.offer(range(num_blocks)), range(num_blocks - 1, -1, -1))


def test_a_corrupted_read_is_found_by_comparing(transport: str, new_pair: NewPair) -> None:
    """Leases vouch for the time of a read, not for the wire: this shows that the suite's comparison can fail."""
    pair = new_pair(transport, fault="corrupt-data@1")
    if transport == "cuda":
        with pytest.raises(TransportUnavailable, match="it would corrupt GPU memory, which no CPU reaches"):
            pair.works()
        return
    assert pair.start(pair.offer([4, 5]), [1, 2]).wait(20)
    there, here = pair.contents[[4, 5]], pair.blocks()[[1, 2]]
    assert (there != here).sum() == 1
    pair.works()


def test_a_connection_that_fails_while_being_made_is_tried_again(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="fail@1..2")
    pair.works()


def test_connecting_in_vain_says_why_and_heals(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="fail@1..3")
    ticket = pair.offer([3])
    with pytest.raises(PeerUnreachable, match="injected fault"):
        pair.start(ticket, [4]).wait(20)
    assert (pair.blocks()[4] == POISON).all()
    pair.pull(ticket, [4])


def test_many_pulls_through_a_bad_connection(transport: str, new_pair: NewPair) -> None:
    plan = "fail@every:11;delay=1ms@every:3;corrupt-slot@every:7;break@every:37;drop@every:41"
    pair = new_pair(transport, fault=plan)
    good = bad = 0
    for index in range(120):
        blocks = range(index % 5, index % 5 + 9)
        ticket = pair.offer(blocks)
        try:
            pair.pull(ticket, blocks, timeout_s=0.1)
            good += 1
        except TransferError as error:
            assert not isinstance(error, Cancelled)
            bad += 1
            pair.owner.do("abort", request_id=ticket.request_id)
    assert good > 30
    assert bad > 10


def test_a_short_deadline_spoils_no_other_pull(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="delay-data=60ms@2..9")
    pair.works()
    patient = pair.start(pair.offer(range(20)), range(20))
    hasty = pair.start(pair.offer(range(20, 40)), range(20, 40), timeout_s=0.02)
    with pytest.raises(TransferTimeout):
        hasty.wait(20)
    assert patient.wait(20)
    assert pair.holds(range(20), range(20))
