# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from kvlink.errors import ConfigError
from kvlink.layout import (
    Axis,
    Geometry,
    KVLayout,
    Order,
    Plane,
    Regions,
    assign,
    dense,
    from_strides,
    heads_of,
    num_seats,
)
from kvlink.layout.sharding import num_replicas

GEOMETRY = Geometry(num_layers=3, total_heads=4, row_bytes=8, num_blocks=5, block_tokens=6, model="m")
INDEX_ORDER = "LKBTH"


def sizes(geometry: Geometry, axes: str) -> list[int]:
    return [geometry.count(Axis(axis)) for axis in axes]


def rows(layout: KVLayout) -> np.ndarray:
    """Region and offset of every row, indexed [plane, block, token, head]."""
    planes = np.array([(plane.region, plane.offset) for plane in layout.planes])
    blocks, tokens, heads = np.ogrid[: layout.num_blocks, : layout.block_tokens, : layout.num_heads]
    within = blocks * layout.block_stride + tokens * layout.token_stride + heads * layout.head_stride
    offsets = planes[:, 1].reshape(-1, 1, 1, 1) + within
    return np.stack([np.broadcast_to(planes[:, 0].reshape(-1, 1, 1, 1), offsets.shape), offsets])


def rows_of_tensors(geometry: Geometry, order: Order, regions: Regions) -> np.ndarray:
    """The same from numpy's own address arithmetic over one tensor a region."""
    apart = [axis.value for axis in regions.axes]
    shape = sizes(geometry, order.value[len(apart) :])
    counted = np.arange(np.prod(shape)).reshape(shape) * geometry.row_bytes
    tensors = np.broadcast_to(counted, [*sizes(geometry, "".join(apart)), *shape])
    axes = [*apart, *order.value[len(apart) :]]
    offsets = tensors.transpose([axes.index(axis) for axis in INDEX_ORDER])
    planes = geometry.num_layers * geometry.planes_per_layer
    layer = np.arange(planes) // geometry.planes_per_layer
    region = {Regions.ONE: layer * 0, Regions.PER_LAYER: layer, Regions.PER_PLANE: np.arange(planes)}[regions]
    offsets = offsets.reshape(planes, *offsets.shape[2:])
    return np.stack([np.broadcast_to(region.reshape(-1, 1, 1, 1), offsets.shape), offsets])


def works(order: Order, regions: Regions) -> bool:
    return {*order.axes[: len(regions.axes)]} == {*regions.axes}


COMBINATIONS = [(order, regions) for order, regions in product(Order, Regions) if works(order, regions)]


@pytest.mark.parametrize(("order", "regions"), COMBINATIONS)
def test_rows_lie_where_a_tensor_of_that_shape_has_them(order: Order, regions: Regions) -> None:
    layout = dense(GEOMETRY, order, regions)
    expected = rows_of_tensors(GEOMETRY, order, regions)
    assert (rows(layout) == expected).all()
    assert layout.region_bytes == tuple(
        int(expected[1][expected[0] == region].max()) + 8 for region in range(expected[0].max() + 1)
    )
    assert sum(layout.region_bytes) == layout.num_blocks * layout.block_bytes


@pytest.mark.parametrize(("order", "regions"), COMBINATIONS)
def test_a_tensors_own_strides_say_the_same(order: Order, regions: Regions) -> None:
    axes = order.value[len(regions.axes) :]
    tensor = np.empty([*sizes(GEOMETRY, axes), GEOMETRY.row_bytes // 2], np.float16)
    strides = dict(zip(map(Axis, axes), tensor.strides, strict=False))
    assert from_strides(GEOMETRY, strides, regions) == dense(GEOMETRY, order, regions)


def test_there_is_an_order_for_every_combination() -> None:
    assert Counter(regions for _, regions in COMBINATIONS) == {
        Regions.ONE: 8,
        Regions.PER_LAYER: 6,
        Regions.PER_PLANE: 2,
    }


def test_mla_has_one_plane_a_layer_and_one_head() -> None:
    layout = dense(replace(GEOMETRY, total_heads=1, planes_per_layer=1, row_bytes=576 * 2))
    assert layout.token_stride == 1152
    assert layout.block_stride == 6 * 1152
    assert layout.planes == (Plane(0, 0, 0), Plane(0, 1, 5 * 6 * 1152), Plane(0, 2, 2 * 5 * 6 * 1152))
    assert num_replicas(layout) == 1
    assert num_replicas(dense(replace(GEOMETRY, total_heads=1, planes_per_layer=1, tp_size=8))) == 8


def test_payload_counts_what_this_rank_holds() -> None:
    layout = dense(replace(GEOMETRY, tp_rank=1, tp_size=2))
    assert (layout.first_head, layout.num_heads, layout.num_layers) == (2, 2, 3)
    assert layout.token_bytes == 2 * 8 * 6
    assert layout.block_bytes == 6 * layout.token_bytes
    assert [layout.num_blocks_for(tokens) for tokens in (0, 1, 6, 7)] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("order", "regions"), [pair for pair in product(Order, Regions) if pair not in COMBINATIONS]
)
def test_interleaved_planes_cannot_be_put_apart(order: Order, regions: Regions) -> None:
    with pytest.raises(ConfigError, match=rf"{order} interleaves axes that {regions}"):
        dense(GEOMETRY, order, regions)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_tokens": 0}, "block_tokens must be in 1 to"),
        ({"row_bytes": -1}, "row_bytes must be"),
        ({"num_blocks": 2**32}, "num_blocks must be"),
        ({"total_heads": 0}, "total_heads must be"),
        ({"num_heads": 3}, "first_head 0 and num_heads 3 must mean heads 0 to 4"),
        ({"first_head": 1}, "first_head 1 and num_heads 4"),
        ({"tp_rank": 1}, "tp_rank 1 of tp_size 1"),
        ({"tp_size": 3}, "tp_size 3 and 4 total_heads"),
        ({"planes": ()}, "planes must not be empty"),
        ({"planes": (Plane(0, 0, 0), Plane(0, -1, 0))}, r"planes\[1\] is out of range"),
        ({"planes": (Plane(2**16, 0, 0),)}, r"planes\[0\] is out of range"),
        ({"head_stride": 7}, "head_stride is 7 but what it steps over has 8 bytes"),
        ({"token_stride": 31}, "token_stride is 31 but"),
        ({"block_stride": 6 * 32 - 1}, "block_stride is 191 but"),
        ({"block_stride": 2**62}, "extent_bytes must be"),
        ({"num_blocks": 1, "block_stride": 2**63}, "block_stride must be"),
    ],
)
def test_impossible_layouts_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(dense(GEOMETRY), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("changes", [{"num_layers": 0}, {"planes_per_layer": 3}])
def test_impossible_geometries_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="num_layers must be positive and planes_per_layer 1 or 2"):
        replace(GEOMETRY, **changes)


def test_a_missing_stride_is_named() -> None:
    with pytest.raises(ConfigError, match="TOKEN, HEAD is missing"):
        from_strides(GEOMETRY, {Axis.BLOCK: 512, Axis.KV: 256, Axis.LAYER: 9999}, Regions.ONE)
    alone = replace(GEOMETRY, num_layers=1, total_heads=1, planes_per_layer=1)
    assert from_strides(alone, {Axis.BLOCK: 48, Axis.TOKEN: 8}, Regions.ONE).head_stride == 0


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (replace(GEOMETRY, model="n"), "model differs: 'm' here, 'n' there"),
        (replace(GEOMETRY, dtype="float16"), "dtype differs: 'bfloat16' here, 'float16' there"),
        (replace(GEOMETRY, row_bytes=16), "row_bytes differs: 8 here, 16 there"),
        (replace(GEOMETRY, total_heads=8), "total_heads differs: 4 here, 8 there"),
        (replace(GEOMETRY, num_layers=4), "total_layers differs: 3 here, 4 there"),
        (replace(GEOMETRY, planes_per_layer=1), "the number of planes differs: 6 here, 3 there"),
        (replace(GEOMETRY, model=""), None),
        (replace(GEOMETRY, num_blocks=9, block_tokens=32, tp_rank=1, tp_size=2), None),
    ],
)
def test_the_first_difference_is_named(other: Geometry, message: str | None) -> None:
    assert dense(GEOMETRY).difference(dense(other, Order.HND)) == message


def test_layers_out_of_order_are_a_difference() -> None:
    layout = dense(GEOMETRY)
    shuffled = replace(layout, planes=(layout.planes[2], *layout.planes[1:]))
    assert layout.difference(shuffled) == "the layer of plane 0 differs: 0 here, 1 there"


DEGREES = (1, 2, 4, 8)
MODELS = (1, 2, 4, 8, 16, 64)


@pytest.mark.parametrize(("reader_tp", "owner_tp", "heads"), list(product(DEGREES, DEGREES, MODELS)))
def test_every_head_comes_once_and_every_seat_is_used_once(reader_tp: int, owner_tp: int, heads: int) -> None:
    check_assignments(reader_tp, owner_tp, heads)


@pytest.mark.parametrize(("reader_tp", "owner_tp", "heads"), [(2, 3, 6), (3, 2, 6), (6, 4, 12), (12, 6, 3)])
def test_degrees_that_do_not_divide_each_other_share_too(reader_tp: int, owner_tp: int, heads: int) -> None:
    check_assignments(reader_tp, owner_tp, heads)


def check_assignments(reader_tp: int, owner_tp: int, heads: int) -> None:
    share = replace(GEOMETRY, total_heads=heads)
    readers = [replace(share, tp_rank=rank, tp_size=reader_tp) for rank in range(reader_tp)]
    owners = [replace(share, tp_rank=rank, tp_size=owner_tp) for rank in range(owner_tp)]
    seats: dict[int, list[int]] = {rank: [] for rank in range(owner_tp)}
    for reader in readers:
        taken = Counter[int]()
        for owner in owners:
            if (assignment := assign(reader, owner)) is not None:
                taken.update(range(*assignment.heads))
                seats[owner.tp_rank].append(assignment.seat)
                assert set(range(*assignment.heads)) <= set(range(*owner.heads))
                assert assignment.num_seats == num_seats(owner, reader_tp)
        assert taken == Counter(range(*reader.heads))
    for owner in owners:
        assert sorted(seats[owner.tp_rank]) == list(range(num_seats(owner, reader_tp)))
    for same in {owner.heads: [o for o in owners if o.heads == owner.heads] for owner in owners}.values():
        loads = [num_seats(owner, reader_tp) for owner in same]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(("total_heads", "tp_size"), [(8, 8), (8, 2), (8, 16), (1, 8), (6, 3)])
def test_ranks_hold_equal_shares(total_heads: int, tp_size: int) -> None:
    held = Counter(head for rank in range(tp_size) for head in range(*heads_of(total_heads, rank, tp_size)))
    assert held == dict.fromkeys(range(total_heads), max(1, tp_size // total_heads))


@pytest.mark.parametrize("share", [(8, 3, 3), (8, 0, 3), (8, -1, 2), (0, 0, 1), (4, 0, 6)])
def test_shares_that_do_not_work_out_are_refused(share: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError, match="tp_size"):
        heads_of(*share)
