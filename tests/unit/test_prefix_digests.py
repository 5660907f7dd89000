# SPDX-License-Identifier: Apache-2.0
"""Digests in tickets: round trips, forged lengths, and how much of a prompt two requests have in common."""

from __future__ import annotations

import dataclasses
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.example_tickets import SOFT, TICKET, tickets

from kvlink.errors import ConfigError
from kvlink.ticket import SHARED_SEAT, SIGNATURE_BYTES, LeaseSeat, Ticket, trace_in
from kvlink.ticket.prefix_digests import MAX_DIGEST_BYTES, PrefixDigests, digest_prefixes
from kvlink.tracing.traceparent import NUM_BYTES


@given(tickets, st.integers(1, 30), st.integers(8, 64), st.binary(min_size=64, max_size=64), st.booleans())
def test_digests_come_back(ticket: Ticket, number: int, size: int, seed: bytes, shared: bool) -> None:
    digests = [(number.to_bytes(2, "big") + seed)[:size] for number in range(number)]
    seats = (LeaseSeat(3, 1011, SHARED_SEAT),) if shared else ticket.seats
    tokens = number * (ticket.num_tokens % 100)
    made = dataclasses.replace(
        ticket, seats=seats, num_tokens=tokens, digests=PrefixDigests.of(digests), group_sizes=()
    )
    back = Ticket.from_text(made.to_text())
    assert back == made
    assert back.soft is shared
    assert back.trace == ticket.trace
    assert back.signature == ticket.signature
    assert back.digests is not None
    assert [back.digests[index] for index in range(number)] == digests
    assert trace_in(made.to_bytes()) == ticket.trace
    for common in (0, number // 2, number):
        prompt = [*digests[:common], *(bytes(size - 1) + b"!" for _ in range(3))]
        assert back.common_tokens(prompt) == common * (tokens // number)


def test_digests_do_not_change_the_other_bytes() -> None:
    """The bytes of a ticket that pins blocks are those of older versions, and a signature covers digests."""
    plain, soft = TICKET.to_bytes(), dataclasses.replace(TICKET, digests=SOFT.digests).to_bytes()
    header_bytes = int.from_bytes(plain[4:6], "little")
    added = int.from_bytes(soft[4:6], "little") - header_bytes
    assert added == SIGNATURE_BYTES + NUM_BYTES + 5
    at = 12 + header_bytes
    assert soft[12:at] + soft[at + added : -640] == plain[12:]
    assert SOFT.signed_bytes() != dataclasses.replace(SOFT, digests=None).signed_bytes()
    assert TICKET.signed_bytes() == plain[:4] + plain[12:]


@pytest.mark.parametrize(
    ("digests", "num_tokens"),
    [
        (PrefixDigests(16, bytes(16 * 3)), 640),
        (PrefixDigests(16, b""), 640),
        (PrefixDigests(16, bytes(MAX_DIGEST_BYTES + 16)), MAX_DIGEST_BYTES // 16 + 1),
    ],
)
def test_digests_that_do_not_fit_are_refused(digests: PrefixDigests, num_tokens: int) -> None:
    with pytest.raises(ConfigError, match="cannot have"):
        dataclasses.replace(SOFT, digests=digests, num_tokens=num_tokens).to_bytes()


@pytest.mark.parametrize("wrong", [[], [b"1234567"], [bytes(65)], [bytes(8), bytes(9)]])
def test_digests_have_one_length(wrong: list[bytes]) -> None:
    with pytest.raises(ConfigError, match="same length, 8 to 64 bytes"):
        PrefixDigests.of(wrong)


@pytest.mark.parametrize("header", [(2**31, 16), (40, 7), (40, 65), (39, 16), (41, 16), (3, 16)])
def test_forged_lengths_of_digests_are_refused(header: tuple[int, int]) -> None:
    blob = bytearray(SOFT.to_bytes())
    at = 12 + int.from_bytes(blob[4:6], "little") - 5
    blob[at : at + 5] = header[0].to_bytes(4, "little") + bytes([header[1]])
    blob[8:12] = zlib.crc32(blob[12:]).to_bytes(4, "little")
    with pytest.raises(ConfigError, match=r"the digests exceed a bound|the length differs"):
        Ticket.from_bytes(bytes(blob))


def test_only_the_one_seat_of_a_lease_is_shared() -> None:
    assert SOFT.soft
    assert not TICKET.soft
    with pytest.raises(ConfigError, match="forged"):
        dataclasses.replace(SOFT, seats=SOFT.seats * 2)
    with pytest.raises(ConfigError, match="forged"):
        dataclasses.replace(SOFT, seats=(LeaseSeat(3, 1011, 2),))


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 5))
def test_prompts_have_the_digests_of_their_common_blocks_in_common(
    a: list[int], b: list[int], size: int
) -> None:
    common = next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    ours, theirs = digest_prefixes(a, size), digest_prefixes(b, size)
    assert [x == y for x, y in zip(ours, theirs, strict=False)] == [
        (at + 1) * size <= common for at in range(min(len(a), len(b)) // size)
    ]


def test_all_that_the_kv_depends_on_changes_every_digest() -> None:
    ids = list(range(64))
    plain = digest_prefixes(ids, 16)
    assert len(plain) == 4
    assert plain == digest_prefixes(tuple(ids), 16)
    others = [
        digest_prefixes(ids, 8),
        digest_prefixes(ids, 16, salt="tenant"),
        digest_prefixes(ids, 16, adapter="tenant"),
        digest_prefixes(ids, 16, salt="ten", adapter="ant"),
        digest_prefixes([0x100, *ids[1:]], 16),
    ]
    every = [digest for digests in (plain, *others) for digest in digests]
    assert len(set(every)) == len(every)


@pytest.mark.parametrize("wrong", [[-1], [2**64], ["a"], [1.5]])
def test_what_is_no_token_id_has_no_digest(wrong: list[int]) -> None:
    with pytest.raises(ConfigError, match="token ids must be integers"):
        digest_prefixes(wrong, 1)
    with pytest.raises(ConfigError, match="block_tokens must be 1 or more"):
        digest_prefixes([1], 0)
