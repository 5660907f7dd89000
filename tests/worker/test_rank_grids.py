# SPDX-License-Identifier: Apache-2.0
"""Hands requests from servers to servers whose ranks share heads, layers and tokens in other ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from worker.rank_grid import NUM_LAYERS, Grid, blocks_of, write

from kvlink import LeaseEnd, ReadyUnit, Ticket, Worker
from kvlink.errors import ConfigError
from kvlink.layout import Order, num_seats

ALL_LAYERS = range(NUM_LAYERS)
TOKENS = 21


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def offered(owners: list[Worker], readers: list[Worker], num_tokens: int, **how: object) -> list[Ticket]:
    """Offers one request at every owner, with everything written unless `how` says otherwise."""
    tickets = []
    for rank, owner in enumerate(owners):
        layout = owner.pool.layout
        blocks = blocks_of(layout, num_tokens, rank)
        if "ready" not in how:
            write(owner.pool.numpy(), layout, blocks, range(num_tokens), ALL_LAYERS)
        if seats := num_seats(layout, readers[0].pool.layout):
            ticket = owner.offer("r", blocks, num_tokens=num_tokens, readers=seats, **how)  # type: ignore[arg-type]
            tickets.append(Ticket.from_text(ticket.to_text()))
    return tickets


def check_pulls(readers: list[Worker], tickets: list[Ticket], num_tokens: int, **how: object) -> None:
    """Pulls at every reader, and compares its whole pool."""
    tokens, layers = (
        how.get(name, (0, limit)) for name, limit in (("tokens", num_tokens), ("layers", NUM_LAYERS))
    )
    for rank, reader in enumerate(readers):
        layout = reader.pool.layout
        into = blocks_of(layout, num_tokens, 100 + rank)
        wanted = reader.pool.numpy().copy()
        assert reader.pull(tickets, into, **how).wait(30)  # type: ignore[arg-type]
        write(wanted, layout, into, range(*tokens), range(*layers))  # type: ignore[misc]
        assert (reader.pool.numpy() == wanted).all(), f"rank {rank}"


def check_handoff(
    stack: ExitStack, prefill: Grid, decode: Grid, num_tokens: int = TOKENS, **how: object
) -> None:
    owners, readers = prefill.start(stack, "p"), decode.start(stack, "d")
    tickets = offered(owners, readers, num_tokens)
    check_pulls(readers, tickets, num_tokens, **how)
    for owner in owners:
        if num_seats(owner.pool.layout, readers[0].pool.layout):
            assert next(owner.watch_events_blocking(30)).how is LeaseEnd.SETTLED


WHOLE = Grid()
TWO_STAGES = Grid(stages=(0, 1, 4))
THREE_STAGES = Grid(stages=(0, 2, 3, 4), block_tokens=3, order=Order.HND)
TP = Grid(tp_size=2, block_tokens=8)
DCP = Grid(total_heads=2, tp_size=4, tp_ranks=2)
PCP = Grid(parts=2, interleave=4)
ALL_AT_ONCE = Grid(tp_size=4, stages=(0, 3, 4), parts=2, tp_ranks=2, interleave=2, block_tokens=2)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (TWO_STAGES, WHOLE),
        (WHOLE, TWO_STAGES),
        (TWO_STAGES, THREE_STAGES),
        (replace(TWO_STAGES, tp_size=2), replace(THREE_STAGES, tp_size=1)),
        (TP, replace(TWO_STAGES, tp_size=4)),
        (DCP, WHOLE),
        (WHOLE, DCP),
        (PCP, DCP),
        (DCP, replace(DCP, interleave=2, block_tokens=6)),
        (ALL_AT_ONCE, TP),
        (TP, ALL_AT_ONCE),
    ],
    ids=lambda grid: f"tp{grid.tp_size}-pp{max(1, len(grid.stages) - 1)}-pcp{grid.parts}-dcp{grid.tp_ranks}",
)
def test_every_rank_gets_its_part(stack: ExitStack, prefill: Grid, decode: Grid) -> None:
    check_handoff(stack, prefill, decode)


@st.composite
def grids(draw: st.DrawFn, total_heads: int) -> Grid:
    tp_size = draw(st.sampled_from((1, 2, 4)))
    replicas = max(1, tp_size // total_heads)
    cuts = draw(st.sets(st.integers(1, NUM_LAYERS - 1), max_size=1))
    return Grid(
        total_heads,
        tp_size,
        (0, *sorted(cuts), NUM_LAYERS) if cuts else (),
        draw(st.integers(1, 2)),
        draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0])),
        draw(st.sampled_from((1, 2, 3, 4))),
        draw(st.sampled_from((1, 3, 4, 8))),
        draw(st.sampled_from(Order)),
    )


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from((1, 2, 4)).flatmap(lambda heads: st.tuples(grids(heads), grids(heads))),
    st.integers(1, 24),
    st.data(),
)
def test_any_two_servers(both: tuple[Grid, Grid], num_tokens: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, num_tokens - 1))
    how = (
        {"tokens": (first, data.draw(st.integers(first + 1, num_tokens)))} if data.draw(st.booleans()) else {}
    )
    with ExitStack() as stack:
        check_handoff(stack, *both, num_tokens, **how)


def test_layers_are_counted_over_the_model(stack: ExitStack) -> None:
    check_handoff(stack, TWO_STAGES, THREE_STAGES, layers=(1, 3))


def following(readers: list[Worker], tickets: list[Ticket]) -> Callable[[], None]:
    """Starts a pull at every reader. Returns a function that waits for them and compares the pools."""
    pulls = []
    for rank, reader in enumerate(readers):
        into = blocks_of(reader.pool.layout, TOKENS, 100 + rank)
        wanted = reader.pool.numpy().copy()
        write(wanted, reader.pool.layout, into, range(TOKENS), ALL_LAYERS)
        pulls.append((reader, wanted, reader.pull(tickets, into, timeout_s=30)))

    def landed() -> None:
        for reader, wanted, pull in pulls:
            assert pull.wait(30)
            assert (reader.pool.numpy() == wanted).all()

    return landed


@pytest.mark.parametrize(
    ("prefill", "decode"), [(TWO_STAGES, THREE_STAGES), (WHOLE, TWO_STAGES), (TWO_STAGES, WHOLE)]
)
def test_readers_follow_the_layers_of_every_stage(stack: ExitStack, prefill: Grid, decode: Grid) -> None:
    owners, readers = prefill.start(stack, "p"), decode.start(stack, "d")
    tickets = offered(owners, readers, TOKENS, ready=0, ready_unit=ReadyUnit.LAYERS)
    landed = following(readers, tickets)
    for layer in ALL_LAYERS:
        for rank, owner in enumerate(owners):
            layout = owner.pool.layout
            if layer in range(*layout.layers):
                blocks = blocks_of(layout, TOKENS, rank)
                write(owner.pool.numpy(), layout, blocks, range(TOKENS), range(layer, layer + 1))
                owner.set_ready("r", layer + 1)
    landed()


@pytest.mark.parametrize(("prefill", "decode"), [(DCP, WHOLE), (DCP, PCP), (PCP, WHOLE), (WHOLE, DCP)])
def test_readers_follow_the_blocks_of_every_part(stack: ExitStack, prefill: Grid, decode: Grid) -> None:
    owners, readers = prefill.start(stack, "p"), decode.start(stack, "d")
    tickets = offered(owners, readers, TOKENS, ready=0)
    landed = following(readers, tickets)
    for rank, owner in enumerate(owners):
        layout = owner.pool.layout
        blocks = blocks_of(layout, TOKENS, rank)
        for index in range(len(blocks)):
            filled = range(layout.context.num_fitting((index + 1) * layout.block_tokens))
            write(owner.pool.numpy(), layout, blocks, range(min(len(filled), TOKENS)), ALL_LAYERS)
            owner.set_ready("r", index + 1)
    landed()


class TestTicketsOfAPull:
    """A pull without the tickets of all ranks that it reads from would leave old bytes in some of its rows."""

    @pytest.mark.parametrize(
        ("prefill", "message"),
        [
            (TWO_STAGES, r"from ranks 0, 1 of the server of p0, and the tickets are of ranks 0;"),
            (TP, r"from ranks 0, 1 of the server of p0, and the tickets are of ranks 0;"),
            (DCP, r"and the tickets are of ranks 0;"),
        ],
    )
    def test_a_missing_rank_is_named(self, stack: ExitStack, prefill: Grid, message: str) -> None:
        owners, readers = prefill.start(stack, "p"), WHOLE.start(stack, "d")
        tickets = offered(owners, readers, TOKENS)
        into = blocks_of(WHOLE.layouts()[0], TOKENS, 1)
        before = readers[0].pool.numpy().copy()
        for ticket in ([tickets[0]], tickets[0], tickets[0]):  # the last one while it is connected
            with pytest.raises(ConfigError, match=message):
                readers[0].pull(ticket, into).wait(30)
        assert (readers[0].pool.numpy() == before).all()
        check_pulls(readers, tickets, TOKENS)

    def test_one_rank_twice(self, stack: ExitStack) -> None:
        owners, readers = TP.start(stack, "p"), WHOLE.start(stack, "d")
        tickets = offered(owners, readers, TOKENS)
        with pytest.raises(ConfigError, match="the tickets are of ranks 0, 0, 1"):
            readers[0].pull([tickets[0], *tickets], blocks_of(WHOLE.layouts()[0], TOKENS, 1)).wait(30)

    def test_tickets_of_two_requests(self, stack: ExitStack) -> None:
        owners, readers = TP.start(stack, "p"), WHOLE.start(stack, "d")
        tickets = offered(owners, readers, TOKENS)
        other = owners[1].offer("s", [20, 21, 22], num_tokens=TOKENS, readers=1)
        with pytest.raises(
            ConfigError, match="must be of one request, and not of r of 21 tokens, s of 21 tokens"
        ):
            readers[0].pull([tickets[0], other], blocks_of(WHOLE.layouts()[0], TOKENS, 1)).wait(30)
