# SPDX-License-Identifier: Apache-2.0
"""Ranks that share heads, layers and tokens: every row comes from one rank, and every seat is used once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from math import lcm

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
