# SPDX-License-Identifier: Apache-2.0
"""Tickets: round trips, and what happens to foreign or damaged bytes."""

from __future__ import annotations

import dataclasses
import random
import zlib
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.example_tickets import SOFT, TICKET, TRACE, tickets

from kvlink.errors import ConfigError
from kvlink.ticket import (
    MAX_BLOCKS,
    MAX_SLOTS,
    SIGNATURE_BYTES,
    SMALLEST_NONCE,
    LeaseSeat,
    Ticket,
    trace_in,
)
from kvlink.tracing import TraceParent
from kvlink.tracing.traceparent import NUM_BYTES


def grouped(ticket: Ticket, cuts: tuple[int, ...]) -> Ticket:
    """The ticket with its blocks in several cache groups, cut anywhere."""
    ends = sorted(min(cut, len(ticket.block_ids)) for cut in cuts)
    sizes = [end - begin for begin, end in zip([0, *ends], [*ends, len(ticket.block_ids)], strict=True)]
    kept = tuple(min(ticket.num_tokens, cut) for cut in (*cuts, ticket.num_tokens))
    return dataclasses.replace(ticket, group_sizes=tuple(sizes), group_tokens=kept)


@given(tickets, st.lists(st.integers(0, 64), min_size=1, max_size=5).map(tuple))
def test_the_lists_of_cache_groups_come_back(ticket: Ticket, cuts: tuple[int, ...]) -> None:
    made = grouped(ticket, cuts)
    back = Ticket.from_text(made.to_text())
    assert back == made
    assert [list(ids) for ids in back.groups()] == [list(ids) for ids in made.groups()]
    assert sum(back.groups(), array("I")) == ticket.block_ids


@pytest.mark.parametrize("sizes", [(40,), (20, 19), (39, 2), (0,) * 257])
def test_sizes_of_groups_that_do_not_add_up_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="whose sizes add up"):
        dataclasses.replace(TICKET, group_sizes=sizes, group_tokens=(1,) * len(sizes)).to_bytes()


@pytest.mark.parametrize("kept", [(), (640,), (640, 641), (640, 640, 1)])
def test_groups_keep_at_most_the_tokens_of_the_request(kept: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="keep at most its tokens"):
        dataclasses.replace(TICKET, group_sizes=(30, 10), group_tokens=kept).to_bytes()


def test_forged_sizes_of_groups_are_refused() -> None:
    honest = dataclasses.replace(TICKET, group_sizes=(30, 10), group_tokens=(640, 160)).to_bytes()
    for at, forged in ((-8, 11), (-4, 641)):  # the last group's blocks, and its tokens
        blob = bytearray(honest)
        blob[at : at + 4 or None] = forged.to_bytes(4, "little")
        blob[8:12] = zlib.crc32(blob[12:]).to_bytes(4, "little")
        with pytest.raises(ConfigError, match="do not add up to the blocks, or keep more tokens"):
            Ticket.from_bytes(bytes(blob))


@given(tickets)
def test_bytes_and_text_give_the_same_ticket_back(ticket: Ticket) -> None:
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket
    text = ticket.to_text()
    assert Ticket.from_text(text) == ticket
    assert trace_in(ticket.to_bytes()) == ticket.trace
    assert text.isascii()
    assert not set(text) & set('"\\/+ \n')


@settings(max_examples=400)
@given(st.binary(max_size=400))
def test_foreign_bytes_are_refused(blob: bytes) -> None:
    assert trace_in(blob) is None
    with pytest.raises(ConfigError, match="not a ticket"):
        Ticket.from_bytes(blob)
    with pytest.raises(ConfigError, match="not a ticket"):
        Ticket.from_text(blob.decode("latin-1"))


@pytest.mark.parametrize("ticket", [TICKET, dataclasses.replace(TICKET, trace=TRACE), SOFT])
def test_every_flipped_bit_is_noticed(ticket: Ticket) -> None:
    blob = ticket.to_bytes()
    for bit in range(8 * len(blob)):
        damaged = bytearray(blob)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ConfigError):
            Ticket.from_bytes(bytes(damaged))


@pytest.mark.parametrize("ticket", [TICKET, dataclasses.replace(TICKET, trace=TRACE), SOFT])
def test_every_truncation_and_any_extension_is_noticed(ticket: Ticket) -> None:
    blob = ticket.to_bytes()
    for size in range(len(blob)):
        with pytest.raises(ConfigError):
            Ticket.from_bytes(blob[:size])
        assert trace_in(blob[:size]) in (None, ticket.trace)
    with pytest.raises(ConfigError):
        Ticket.from_bytes(blob + b"\0")


@pytest.mark.parametrize("given", [TICKET, SOFT])
def test_garbage_behind_a_right_checksum_is_refused_or_is_a_ticket(given: Ticket) -> None:
    """An attacker can compute a CRC: the parser itself must hold."""
    rng = random.Random(1)
    body_at = 12
    blob = dataclasses.replace(given, trace=TRACE).to_bytes()
    accepted = 0
    for _ in range(5000):
        body = bytearray(blob[body_at:])
        for _ in range(rng.randint(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        forged = blob[:8] + zlib.crc32(body).to_bytes(4, "little") + bytes(body)
        try:
            ticket = Ticket.from_bytes(forged)
        except ConfigError:
            continue
        accepted += 1
        assert ticket.seats
        assert ticket.trace is None or Ticket.from_bytes(ticket.to_bytes()) == ticket
        assert len(ticket.block_ids) == len(TICKET.block_ids)
    assert 0 < accepted < 5000


def test_who_does_not_know_of_traces_reads_the_same_ticket() -> None:
    """They skip what their header does not have, and believe no signature over it."""
    signed = dataclasses.replace(TICKET, signature=b"s" * SIGNATURE_BYTES)
    for ticket, added in (signed, NUM_BYTES), (TICKET, SIGNATURE_BYTES + NUM_BYTES):
        traced = dataclasses.replace(ticket, trace=TRACE)
        plain_blob, traced_blob = ticket.to_bytes(), traced.to_bytes()
        header_bytes = int.from_bytes(plain_blob[4:6], "little")
        assert int.from_bytes(traced_blob[4:6], "little") == header_bytes + added
        at = 12 + header_bytes
        assert traced_blob[:4] + traced_blob[6:8] == plain_blob[:4] + plain_blob[6:8]
        assert traced_blob[12:at] + traced_blob[at + added :] == plain_blob[12:]
        assert traced.signed_bytes() == ticket.signed_bytes()


def test_a_trace_of_zeros_is_none() -> None:
    blob = dataclasses.replace(TICKET, trace=TraceParent(0, 0, 1)).to_bytes()
    assert Ticket.from_bytes(blob) == TICKET
    assert trace_in(blob) is None


def test_a_longer_header_of_a_newer_minor_version_is_skipped() -> None:
    blob = TICKET.to_bytes()
    header_bytes = int.from_bytes(blob[4:6], "little")
    body = blob[12:]
    longer = body[:header_bytes] + b"newer" + body[header_bytes:]
    header = blob[:4] + (header_bytes + 5).to_bytes(2, "little") + blob[6:8]
    assert Ticket.from_bytes(header + zlib.crc32(longer).to_bytes(4, "little") + longer) == TICKET


def test_another_protocol_version_says_both_numbers() -> None:
    blob = bytearray(TICKET.to_bytes())
    blob[6] = 9
    with pytest.raises(ConfigError, match="version 9, this process speaks 5"):
        Ticket.from_bytes(bytes(blob))


@pytest.mark.parametrize(
    "made_up",
    [
        LeaseSeat(0, int.from_bytes(b"KVLease2", "little"), 2**63),  # the lease table's header
        LeaseSeat(1234, 0, 0),
        LeaseSeat(1234, 3, 2**63),  # the tombstone of an aborted lease
        LeaseSeat(1234, SMALLEST_NONCE - 1, 2**63),
        LeaseSeat(1234, 2**63, SMALLEST_NONCE - 1),
        LeaseSeat(MAX_SLOTS + 1, 2**63, 2**63),
        LeaseSeat(2**32 - 1, 2**63, 2**63),
    ],
)
def test_a_seat_that_no_lease_can_have_is_refused(made_up: LeaseSeat) -> None:
    for seats in (made_up,), (*TICKET.seats, made_up):
        with pytest.raises(ConfigError, match="request 'request-1': the ticket is forged"):
            dataclasses.replace(TICKET, seats=seats)
        forged = dataclasses.replace(TICKET)
        object.__setattr__(forged, "seats", seats)
        with pytest.raises(ConfigError, match="the ticket is forged"):
            Ticket.from_text(forged.to_text())
        with pytest.raises(ConfigError, match="the ticket is forged"):
            Ticket.from_bytes(forged.to_bytes())


@pytest.mark.parametrize(
    "wrong",
    [
        {"request_id": ""},
        {"worker_id": "w" * 513},
        {"seats": ()},
        {"seats": TICKET.seats * 256},
        {"block_ids": array("I", bytes(4 * (MAX_BLOCKS + 1)))},
    ],
)
def test_a_ticket_out_of_bounds_cannot_be_written(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(TICKET, **wrong).to_bytes()


def test_repr_has_no_secret() -> None:
    seats = (LeaseSeat(3, 123456, 123456),)
    assert "123456" not in repr(dataclasses.replace(TICKET, seats=seats, num_tokens=5, epoch=7))
