# SPDX-License-Identifier: Apache-2.0
"""Tickets: their text, the split of their blocks, and digests of prefixes."""

from __future__ import annotations

import dataclasses
import random
import zlib
from array import array
from collections import Counter
from dataclasses import replace
from itertools import product
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.example_tickets import SOFT, TICKET, TRACE, tickets

from kvlink.errors import ConfigError
from kvlink.layout import (
    Context,
    Geometry,
    Pipeline,
    Share,
    assign,
    dense,
    heads_of,
    num_seats,
    owner_ranks,
    rank_of,
)
from kvlink.layout.split import ALL_TOKENS
from kvlink.ticket import (
    MAX_BLOCKS,
    MAX_SLOTS,
    SHARED_SEAT,
    SIGNATURE_BYTES,
    SMALLEST_NONCE,
    LeaseSeat,
    Ticket,
    trace_in,
)
from kvlink.ticket.prefix_digests import MAX_DIGEST_BYTES, PrefixDigests, digest_prefixes
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
    with pytest.raises(ConfigError, match="do not add up to the blocks"):
        dataclasses.replace(TICKET, group_sizes=sizes, group_tokens=(1,) * len(sizes)).to_bytes()


@pytest.mark.parametrize("kept", [(), (640,), (640, 641), (640, 640, 1)])
def test_groups_keep_at_most_the_tokens_of_the_request(kept: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"keep more tokens than there are|lists of groups differ"):
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


NUM_LAYERS = 7


@st.composite
def servers(draw: st.DrawFn, total_heads: int) -> list[Share]:
    """The shares of all ranks of a server, in order."""
    tp_size = draw(
        st.sampled_from([n for n in (1, 2, 3, 4, 8) if not total_heads % n or not n % total_heads])
    )
    replicas = max(1, tp_size // total_heads)
    tp_ranks = draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0]))
    parts = draw(st.integers(1, 2))
    interleave = draw(st.sampled_from((1, 2, 3, 16)))
    stages = draw(st.sets(st.integers(1, NUM_LAYERS - 1), max_size=3))
    bounds = (0, *sorted(stages), NUM_LAYERS) if stages else ()
    whole = Context(0, parts * tp_ranks, interleave, tp_ranks)
    return [
        Share(total_heads, tp, tp_size, Pipeline(stage, bounds), whole.at(part, tp))
        for stage in range(max(1, len(bounds) - 1))
        for part in range(parts)
        for tp in range(tp_size)
    ]


def rows_of(share: Share, num_tokens: int) -> Counter[tuple[int, int, int]]:
    """Every (layer, token, head) that a rank holds."""
    layers = range(*share.pipeline.layers(NUM_LAYERS))
    heads = range(*heads_of(share.total_heads, share.tp_rank, share.tp_size))
    return Counter(product(layers, tokens_of(share.context, num_tokens), heads))


def tokens_of(context: Context, num_tokens: int) -> list[int]:
    return [at for at in range(num_tokens) if at // context.interleave % context.size == context.rank]


@settings(max_examples=300)
@given(st.sampled_from((1, 2, 4, 6)).flatmap(lambda heads: st.tuples(servers(heads), servers(heads))))
def test_every_row_comes_once_and_every_seat_is_used_once(both: tuple[list[Share], list[Share]]) -> None:
    readers, owners = both
    num_tokens = min(
        64, lcm(*(each[0].context.size * each[0].context.interleave for each in (readers, owners)))
    )
    seats: dict[int, list[int]] = {rank: [] for rank in range(len(owners))}
    for reader in readers:
        taken: Counter[tuple[int, int, int]] = Counter()
        sources = set()
        for owner in owners:
            if (assignment := assign(reader, owner)) is None:
                continue
            rank, num_ranks = rank_of(owner)
            sources.add(rank)
            seats[rank].append(assignment.seat)
            assert num_ranks == len(owners)
            assert assignment.num_seats == num_seats(owner, reader)
            held = rows_of(reader, num_tokens) & rows_of(owner, num_tokens)
            taken += Counter(row for row in held if row[2] in range(*assignment.heads))
        assert taken == rows_of(reader, num_tokens)
        assert owner_ranks([reader], [owners[0]]) == sources
    for rank, used in seats.items():
        assert sorted(used) == list(range(num_seats(owners[rank], readers[0])))


def test_ranks_are_counted_by_stage_then_by_part_then_by_tensor_parallel_rank() -> None:
    context = Context(0, 4, 1, 2)
    ranks = [
        rank_of(Share(1, tp, 2, Pipeline(stage, (0, 3, 7)), context.at(part, tp)))
        for stage, part, tp in product(range(2), repeat=3)
    ]
    assert ranks == [(rank, 8) for rank in range(8)]


@given(st.integers(1, 5), st.integers(1, 6), st.integers(0, 200))
def test_tokens_before_a_position_are_counted(size: int, interleave: int, position: int) -> None:
    shares = [Context(rank, size, interleave) for rank in range(size)]
    counts = [context.num_before(position) for context in shares]
    assert counts == [len(tokens_of(context, position)) for context in shares]
    fitting = shares[0].num_fitting(position)
    assert max(context.num_before(fitting) for context in shares) <= position
    assert max(context.num_before(fitting + 1) for context in shares) > position


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.data())
def test_ranks_meet_if_both_hold_a_token(
    size: int, interleave: int, other_size: int, other: int, data: st.DataObject
) -> None:
    ours = Context(data.draw(st.integers(0, size - 1)), size, interleave)
    theirs = Context(data.draw(st.integers(0, other_size - 1)), other_size, other)
    period = lcm(size * interleave, other_size * other)
    common = set(tokens_of(ours, period)) & set(tokens_of(theirs, period))
    assert ours.meets(theirs) == bool(common)


@pytest.mark.parametrize(
    ("size", "num_layers", "bounds"),
    [(2, 28, (0, 14, 28)), (3, 28, (0, 9, 19, 28)), (4, 30, (0, 7, 15, 23, 30)), (1, 5, ())],
)
def test_layers_are_split_as_vllm_does(size: int, num_layers: int, bounds: tuple[int, ...]) -> None:
    assert Pipeline.even(0, size, num_layers).bounds == bounds


def test_a_stage_has_its_layers_of_the_model() -> None:
    layout = dense(Geometry(7, 2, 8, 4, pipeline=Pipeline(1, (0, 3, 7))))
    assert [plane.layer for plane in layout.planes] == [3, 3, 4, 4, 5, 5, 6, 6]
    assert (layout.layers, layout.num_layers, layout.total_layers) == ((3, 7), 7, 7)
    first = dense(Geometry(7, 2, 8, 4, pipeline=Pipeline(0, (0, 3, 7))))
    assert (first.num_layers, first.total_layers) == (3, 7)
    assert first.difference(layout) is None
    assert layout.difference(dense(Geometry(7, 2, 8, 4))) is None
    assert layout.difference(dense(Geometry(8, 2, 8, 4))) == "total_layers differs: 7 here, 8 there"
    assert (
        layout.difference(dense(Geometry(7, 2, 8, 4, planes_per_layer=1)))
        == "the number of planes differs: 8 here, 4 there"
    )


def test_blocks_hold_the_tokens_of_one_rank() -> None:
    layouts = [dense(Geometry(1, 1, 8, 4, 4, context=Context(rank, 2, 1))) for rank in range(2)]
    assert [layout.num_blocks_for(9) for layout in layouts] == [2, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Pipeline(0, (0, 3, 3)), "bounds must rise"),
        (lambda: Pipeline(0, (1, 3)), "bounds must rise"),
        (lambda: Pipeline(0, (0,)), "bounds must have"),
        (lambda: Pipeline(2, (0, 3, 5)), "no stage 2"),
        (lambda: Pipeline(-1, ()), "no stage -1"),
        (lambda: Pipeline.even(0, 5, 4), "4 layers"),
        (lambda: Context(2, 2), "rank 2 of size 2"),
        (lambda: Context(0, 0), "size 0"),
        (lambda: Context(0, 2, 0), "interleave"),
        (lambda: Context(0, 3, 1, 2), "tp_ranks=2"),
        (lambda: dense(Geometry(4, 2, 8, 4, pipeline=Pipeline(0, (0, 3, 5)))), "num_layers is 4"),
        (lambda: dense(Geometry(1, 2, 8, 4, tp_size=2, context=Context(0, 2, 1, 2))), "hold the same heads"),
        (lambda: dense(Geometry(1, 1, 8, 4, tp_size=2, context=Context(1, 2, 1, 2))), "hold the same heads"),
    ],
)
def test_shares_that_no_rank_has_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_states_are_not_split_by_tokens() -> None:
    state = replace(dense(Geometry(1, 1, 8, 4, 1)), is_state=True)
    assert state.context is ALL_TOKENS
    with pytest.raises(ConfigError, match="a state is not one of tokens"):
        replace(state, context=Context(0, 2))


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
