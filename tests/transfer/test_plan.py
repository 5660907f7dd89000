# SPDX-License-Identifier: Apache-2.0
"""Plans of pulls: blocks and axes of both layouts, block ids of any kind, and what a pull costs."""

from __future__ import annotations

import base64
import struct
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transfer.reference_plan import Pool, apply, copy_rows
from waiting import eventually

from kvlink import BlockPool, Ticket, Worker, _core
from kvlink.errors import ConfigError, LayoutMismatch
from kvlink.layout import (
    Axis,
    Context,
    Geometry,
    KVLayout,
    Order,
    Pipeline,
    Regions,
    assign,
    dense,
    from_strides,
)
from kvlink.layout.kv_layout import common_layers
from kvlink.runtime.names import check_name
from kvlink.ticket import LeaseSeat
from kvlink.transfer.axes import AXES
from kvlink.transfer.block_ids import BlockIds, as_array, as_buffer, check_distinct
from kvlink.transfer.cost_model import PRIORS, Cost
from kvlink.transfer.engine import available_transports

MAX_OP_BYTES = 1 << 20
MAX_OP_SEGMENTS = 256


def planner_of(reader: Pool, owner: Pool, heads: tuple[int, int] = (0, 2**32 - 1)) -> _core.Planner:
    layers = range(*common_layers(reader.layout, owner.layout))
    return _core.Planner(
        reader.core_layout(layers),
        owner.core_layout(layers),
        reader.ranges(),
        [region.nbytes for region in owner.regions],
        list(range(len(owner.regions))),
        heads,
    )


def ids(blocks: list[int]) -> array[int]:
    return array("I", blocks)


class Case(NamedTuple):
    """One pull between two random ranks of one random model."""

    reader: KVLayout
    owner: KVLayout
    reader_blocks: list[int]
    owner_blocks: list[int]
    tokens: range
    layers: range


def axes_and_regions() -> st.SearchStrategy[tuple[list[Axis], Regions]]:
    return st.tuples(st.permutations(list(Axis)), st.sampled_from(Regions))


@st.composite
def layouts(draw: st.DrawFn, geometry: Geometry) -> KVLayout:
    """Any nesting of the axes with any gaps, not only those that engines use."""
    if draw(st.booleans()):
        order, regions = draw(st.sampled_from(Order)), draw(st.sampled_from(Regions))
        assume({*order.axes[: len(regions.axes)]} == {*regions.axes})
        return dense(geometry, order, regions)
    axes, regions = draw(axes_and_regions())
    strides = {}
    step = geometry.row_bytes
    for axis in axes:
        if axis not in regions.axes:
            strides[axis] = step + draw(st.integers(0, 9))
            step = strides[axis] * geometry.count(axis)
    return from_strides(geometry, strides, regions)


@st.composite
def pipelines(draw: st.DrawFn, num_layers: int) -> Pipeline:
    cuts = draw(st.sets(st.integers(1, max(1, num_layers - 1)), max_size=2)) if num_layers > 1 else set()
    bounds = (0, *sorted(cuts), num_layers) if cuts else ()
    return Pipeline(draw(st.integers(0, len(cuts))), bounds)


@st.composite
def contexts(draw: st.DrawFn, tp_rank: int, num_replicas: int) -> Context:
    """All tokens more often than not, because engines have that."""
    if draw(st.booleans()):
        return Context()
    tp_ranks = draw(st.sampled_from([n for n in (1, 2, 4) if num_replicas % n == 0]))
    parts = draw(st.integers(1, 3))
    return Context(0, parts * tp_ranks, draw(st.integers(1, 5)), tp_ranks).at(
        draw(st.integers(0, parts - 1)), tp_rank
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    few = st.integers(1, 4)
    heads = draw(st.sampled_from((1, 2, 4, 6)))
    degrees = st.sampled_from([size for size in (1, 2, 3, 4, 8) if not heads % size or not size % heads])
    model = {
        "num_layers": draw(few),
        "total_heads": heads,
        "row_bytes": draw(st.integers(1, 20)),
        "planes_per_layer": draw(st.integers(1, 2)),
    }
    ends, blocks = [], []
    for _ in range(2):
        tp_size = draw(degrees)
        tp_rank = draw(st.integers(0, tp_size - 1))
        geometry = Geometry(
            **model,
            num_blocks=draw(st.integers(1, 9)),
            block_tokens=draw(few),
            tp_rank=tp_rank,
            tp_size=tp_size,
            pipeline=draw(pipelines(model["num_layers"])),
            context=draw(contexts(tp_rank, max(1, tp_size // heads))),
        )
        ends.append(draw(layouts(geometry)))
        every = range(geometry.num_blocks)
        blocks.append(draw(st.permutations(every)) if draw(st.booleans()) else list(every))
    capacity = min(end.context.num_fitting(end.num_blocks * end.block_tokens) for end in ends)
    last = draw(st.integers(1, capacity))
    first = draw(st.integers(0, last - 1))
    end_layer = draw(st.integers(1, model["num_layers"]))
    used = [blocks[: end.num_blocks_for(last)] for end, blocks in zip(ends, blocks, strict=True)]
    return Case(*ends, *used, range(first, last), range(draw(st.integers(0, end_layer - 1)), end_layer))


@settings(max_examples=600)
@given(cases())
def test_a_plan_does_what_the_slow_reference_does(case: Case) -> None:
    assignment = assign(case.reader, case.owner)
    assume(assignment is not None)
    assert assignment is not None
    reader, owner, expected = Pool(case.reader, 1), Pool(case.owner, 2), Pool(case.reader, 1)
    planner = planner_of(reader, owner, assignment.heads)
    first, end = common_layers(case.reader, case.owner)
    layers = range(min(case.layers.start, end), min(case.layers.stop, end))
    layers = range(max(layers.start, first), max(layers.stop, first))
    plan = planner.plan(
        ids(case.owner_blocks),
        ids(case.reader_blocks),
        (case.tokens.start, case.tokens.stop),
        (layers.start, layers.stop),
    )
    heads = range(*assignment.heads)
    copy_rows(owner, expected, case.owner_blocks, case.reader_blocks, case.tokens, layers, heads)
    apply(plan, owner, reader)
    assert all(map(np.array_equal, reader.regions, expected.regions))
    tokens = [at for at in case.tokens if None not in (owner.index_of(at), reader.index_of(at))]
    num_planes = len(owner.planes(layers))
    assert plan.bytes == len(tokens) * len(heads) * case.owner.row_bytes * num_planes


DEGREES = (1, 2, 4, 8)


@pytest.mark.parametrize(("reader_tp", "owner_tp", "heads"), list(product(DEGREES, DEGREES, (1, 4, 8))))
def test_a_whole_reader_group_gets_the_whole_cache(reader_tp: int, owner_tp: int, heads: int) -> None:
    """NHD owners with blocks of 3 tokens, HND readers with blocks of 5; readers plan over all owners."""
    owners = [
        Pool(
            dense(Geometry(2, heads, 4, 7, 3, tp_rank=rank, tp_size=owner_tp)), seed=rank * heads // owner_tp
        )
        for rank in range(owner_tp)
    ]  # ranks with equal heads hold equal bytes
    owner_blocks, reader_blocks, num_tokens = [6, 1, 3, 2, 5], [2, 0, 4], 13
    for rank in range(reader_tp):
        layout = dense(
            Geometry(2, heads, 4, 6, 5, tp_rank=rank, tp_size=reader_tp), Order.HND, Regions.PER_LAYER
        )
        reader, expected = Pool(layout, seed=99), Pool(layout, seed=99)
        taken = 0
        for owner in owners:
            assignment = assign(layout, owner.layout)
            if assignment is None:
                continue
            planner = planner_of(reader, owner, assignment.heads)
            apply(planner.plan(ids(owner_blocks), ids(reader_blocks), (0, num_tokens)), owner, reader)
            span = range(*assignment.heads)
            copy_rows(owner, expected, owner_blocks, reader_blocks, range(num_tokens), range(2), span)
            taken += len(span)
        assert taken == layout.num_heads
        assert all(map(np.array_equal, reader.regions, expected.regions))


def test_ops_stay_within_their_bounds() -> None:
    geometry = Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=4096, block_tokens=16)
    pool = Pool(dense(geometry), seed=0)
    planner = planner_of(pool, pool)
    upwards, downwards = ids(list(range(4096))), ids(list(range(4095, -1, -1)))
    whole = planner.plan(upwards, upwards, (0, 4096 * 16))
    assert (whole.num_ops, whole.num_segments) == (8, 8)
    scattered = planner.plan(upwards, downwards, (0, 4096 * 16))
    assert (scattered.num_ops, scattered.num_segments) == (32, 8192)
    for plan in (whole, scattered):
        assert plan.ops()["bytes"].max() <= MAX_OP_BYTES
        assert plan.ops()["num_segments"].max() <= MAX_OP_SEGMENTS


def test_a_plan_is_refilled_in_place() -> None:
    pool = Pool(dense(Geometry(2, 2, 8, 9, 4)), seed=0)
    planner = planner_of(pool, pool)
    large = planner.plan(ids([0, 2, 4, 6]), ids([1, 3, 5, 7]), (0, 16))
    small = planner.plan(ids([0]), ids([1]), (0, 4), into=large)
    assert small is large
    assert (large.num_ops, large.num_segments, large.bytes) == (4, 4, 4 * 4 * 2 * 8)


POOL = dense(Geometry(num_layers=3, total_heads=2, row_bytes=8, num_blocks=8, block_tokens=4))


@pytest.mark.parametrize(
    ("owner_blocks", "reader_blocks", "tokens", "layers", "message"),
    [
        ([8], [0], (0, 4), (0, 3), "owner_blocks names block 8 but there are 8: see index 0"),
        ([0], [2**32 - 1], (0, 4), (0, 3), "into names block 4294967295"),
        ([0], [0, 1], (0, 5), (0, 3), "owner_blocks has 1 blocks of 4 tokens: 5 tokens do not fit"),
        ([0, 1], [], (0, 5), (0, 3), "into has 0 blocks"),
        ([0, 1], [5, 5], (0, 8), (0, 3), "into names a block twice: 5, again at index 1"),
        ([0], [0], (3, 2), (0, 3), "tokens: the range begins after its end"),
        ([0], [0], (0, 4), (2, 1), "layers: the range begins after its end"),
        ([0], [0], (0, 4), (0, 4), "layers: the range ends at 4 but there are 3"),
    ],
)
def test_lists_that_do_not_fit_are_refused(
    owner_blocks: list[int],
    reader_blocks: list[int],
    tokens: tuple[int, int],
    layers: tuple[int, int],
    message: str,
) -> None:
    pool = Pool(POOL, seed=0)
    with pytest.raises(ConfigError, match=message):
        planner_of(pool, pool).plan(ids(owner_blocks), ids(reader_blocks), tokens, layers)


def test_caches_that_differ_are_refused() -> None:
    reader, owner = Pool(POOL, seed=0), Pool(dense(Geometry(3, 2, 16, 8, 4)), seed=0)
    with pytest.raises(LayoutMismatch, match="row_bytes differs: reader has 8, owner has 16"):
        planner_of(reader, owner)
    with pytest.raises(LayoutMismatch, match=r"asked for \[2, 9\): nothing in common"):
        planner_of(reader, reader, (2, 9))


def test_a_region_too_small_is_refused() -> None:
    pool = Pool(POOL, seed=0)
    pool.regions[0] = pool.regions[0][:-1]
    with pytest.raises(
        ConfigError, match=r"reader layout: planes\[5\] at offset 2560 needs 512 bytes, region 0 has 3071"
    ):
        planner_of(pool, Pool(POOL, seed=0))


L, N, B, H, D = 2, 8, 16, 4, 64
GEOMETRY = Geometry(
    num_layers=L, total_heads=H, row_bytes=2 * D, num_blocks=N, block_tokens=B, dtype="float16"
)
MLA = Geometry(L, 1, 2 * D, N, B, planes_per_layer=1, dtype="float16")


def derived(axes: str | None, shape: tuple[int, ...], tensors: int = L, **options: Any) -> KVLayout:
    pool = BlockPool.from_tensors([np.zeros(shape, np.float16) for _ in range(tensors)], axes=axes, **options)
    return pool.layout


@pytest.mark.parametrize(
    ("axes", "shape", "tensors", "order", "regions"),
    [
        ("flash-attention", (2, N, B, H, D), L, Order.NHD, Regions.PER_LAYER),
        ("flashinfer-nhd", (N, 2, B, H, D), L, Order.PAIRED_NHD, Regions.PER_LAYER),
        ("flashinfer-hnd", (N, 2, H, B, D), L, Order.PAIRED_HND, Regions.PER_LAYER),
        ("separate-nhd", (N, B, H, D), 2 * L, Order.NHD, Regions.PER_PLANE),
        ("separate-hnd", (N, H, B, D), 2 * L, Order.HND, Regions.PER_PLANE),
        ("packed-nhd", (N, B, H, 2 * D), L, Order.BESIDE_NHD, Regions.PER_LAYER),
        ("packed-hnd", (N, H, B, 2 * D), L, Order.BESIDE_HND, Regions.PER_LAYER),
        ("K/V blocks heads tokens row", (2, N, H, B, D), L, Order.HND, Regions.PER_LAYER),
        ("| layers K/V blocks tokens heads row", (L, 2, N, B, H, D), 1, Order.NHD, Regions.ONE),
        (
            "blocks layers K/V tokens heads row",
            (N, L, 2, B, H, D),
            1,
            Order.CROSS_LAYER_NHD,
            Regions.ONE,
        ),
    ],
)
def test_usual_shapes_are_the_orders_of_the_same_name(
    axes: str, shape: tuple[int, ...], tensors: int, order: Order, regions: Regions
) -> None:
    assert derived(axes, shape, tensors) == dense(GEOMETRY, order, regions)


def test_mla_has_one_plane_a_layer() -> None:
    assert derived("mla", (N, B, D)) == dense(MLA, Order.NHD, Regions.PER_LAYER)
    assert derived("layers | blocks tokens row", (N, B, D)) == derived("mla", (N, B, D))


def test_all_keys_may_come_before_all_values() -> None:
    layout = derived("K/V layers | blocks tokens heads row", (N, B, H, D), 2 * L)
    assert [(plane.layer, plane.region) for plane in layout.planes] == [(0, 0), (0, 2), (1, 1), (1, 3)]


def test_joined_axes_take_the_size_that_the_shape_does_not_say() -> None:
    slots = derived("K/V blocks*tokens heads row", (2, N * B, H, D), block_tokens=B)
    assert slots == dense(GEOMETRY, Order.NHD, Regions.PER_LAYER)
    with pytest.raises(
        ConfigError, match=r"sizes of blocks\*tokens in dimension 1 are not known; pass block_tok"
    ):
        derived("K/V blocks*tokens heads row", (2, N * B, H, D))
    with pytest.raises(ConfigError, match=r"dimension 1 \(blocks\*tokens\) has 128 elements, not 24 tokens"):
        derived("K/V blocks*tokens heads row", (2, N * B, H, D), block_tokens=24)
    with pytest.raises(ConfigError, match=r"sizes of heads\*row in dimension 3 are not known"):
        derived("K/V blocks tokens heads*row", (2, N, B, H * D))


def test_strides_and_dtype_come_from_the_tensor() -> None:
    base = np.zeros((2, N, B + 2, H, D), np.uint8)
    pool = BlockPool.from_tensors(
        [base[:, :, :B].swapaxes(2, 3)], axes="K/V blocks heads tokens row", dtype="float8_e4m3fn", model="m"
    )
    layout = pool.layout
    assert (layout.block_stride, layout.token_stride, layout.head_stride) == ((B + 2) * H * D, H * D, D)
    assert (layout.row_bytes, layout.dtype, layout.model) == (D, "float8_e4m3fn", "m")


def test_ranks_share_the_heads_unless_it_is_said() -> None:
    shape = (2, N, B, H, D)
    layout = derived("flash-attention", shape, tp_rank=1, tp_size=2)
    assert (layout.total_heads, layout.first_head, layout.num_heads) == (2 * H, H, H)
    layout = derived("flash-attention", (2, N, B, 1, D), tp_rank=3, tp_size=4, total_heads=2)
    assert (layout.total_heads, layout.first_head) == (2, 1)  # two ranks hold each head
    assert derived("mla", (N, B, D), tp_rank=1, tp_size=2).total_heads == 1
    with pytest.raises(ConfigError, match="has 4 heads, rank 0 of 2 holds 2 of total_heads=4"):
        derived("flash-attention", shape, tp_size=2, total_heads=H)


@pytest.mark.parametrize(
    ("axes", "shape", "tensors", "sentence"),
    [
        ("flash-attention", (N, 2, B, H, D), L, r"dimension 0 \(K/V\) has 8 elements, not 2 K/V"),
        ("flash-attention", (N, B, H, D), L, "has 4 dimensions, axes name 5: K/V blocks tokens heads row"),
        ("blocks tokens heads row", (N, B, H, D), 2 * L, r"names no K/V: write 'layers K/V \| blocks"),
        ("separate-nhd", (N, B, H, D), 3, "3 tensors were given, axes lists layers and K/V: it takes a mult"),
        ("| layers K/V blocks tokens heads row", (L, 2, N, B, H, D), 2, "means a single tensor: it takes 1"),
        ("K/V | blocks tokens heads row", (N, B, H, D), 4, "lists K/V: it takes 2"),
        ("K/V block tokens heads row", (2, N, B, H, D), L, "'block' is no axis, did you mean 'blocks'"),
        ("flash_attention", (2, N, B, H, D), L, "did you mean 'flash-attention'"),
        ("K/V blocks tokens heads head", (2, N, B, H, D), L, "'head' is no axis, did you mean 'heads'"),
        ("K/V blocks tokens heads", (2, N, B, H), L, "does not name row"),
        ("K/V blocks blocks tokens row", (2, N, B, H, D), L, "names blocks twice"),
        ("layers | layers blocks tokens row", (L, N, B, D), L, "names layers twice"),
        ("blocks | K/V tokens heads row", (2, B, H, D), N, "step over layers and K/V, not over blocks"),
        ("", (2, N, B, H, D), L, "does not name blocks and tokens and row"),
        (None, (2, N, B, H, D), L, 'one of "flash-attention"'),
    ],
)
def test_names_that_do_not_fit_are_refused(
    axes: str | None, shape: tuple[int, ...], tensors: int, sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        derived(axes, shape, tensors)


def test_tensors_of_several_shapes_are_refused() -> None:
    tensors = [np.zeros((2, N + i, B, H, D), np.float16) for i in range(2)]
    with pytest.raises(ConfigError, match=r"tensors\[1\] .*differs from tensors\[0\]"):
        BlockPool.from_tensors(tensors, axes="flash-attention")


def test_a_row_must_be_contiguous() -> None:
    tensor = np.zeros((2, N, B, H, 2 * D), np.float16)[..., ::2]
    with pytest.raises(ConfigError, match="the row has a stride of 4 bytes for items of 2"):
        BlockPool.from_tensors([tensor], axes="flash-attention")


def test_a_layout_says_all_of_it() -> None:
    layout = dense(GEOMETRY, Order.NHD, Regions.PER_LAYER)
    tensors = [np.zeros((2, N, B, H, D), np.float16) for _ in range(L)]
    with pytest.raises(ConfigError, match="takes a layout or axes, model, not both"):
        BlockPool.from_tensors(tensors, layout, axes=AXES["flash-attention"], model="m")


def test_torch_tensors_are_described_alike() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    tensors = [torch.zeros(2, N, B, H, D, dtype=torch.bfloat16) for _ in range(L)]
    layout = BlockPool.from_tensors(tensors, axes="flash-attention").layout
    assert (layout.dtype, layout.block_stride) == ("bfloat16", B * H * D * 2)
    BlockPool.from_tensors(tensors, layout)
    with pytest.raises(ConfigError, match=r"tensors\[1\] .*items of 4 bytes"):
        BlockPool.from_tensors([tensors[0], tensors[1].float()], layout)
    with pytest.raises(ConfigError, match="innermost, has a stride of 4 bytes"):
        BlockPool.from_tensors([torch.zeros(2, N, B, H, 2 * D, dtype=torch.bfloat16)[..., ::2]] * 2, layout)


def test_prediction_adds_start_operations_and_bytes() -> None:
    assert Cost(start_us=2, op_ns=100, gib_per_s=1).predict_us(10, 2**30) == pytest.approx(2 + 1 + 1e6)


def test_every_transport_has_a_prior() -> None:
    assert set(PRIORS) == set(available_transports())
    assert PRIORS["tcp"].start_us > PRIORS["shm"].start_us


NUM_BLOCKS = 512
GOOD: list[BlockIds] = [
    [3, 1],
    (3, 1),
    [np.int64(3), np.uint8(1)],
    range(3, 0, -2),
    array("I", [3, 1]),
    array("q", [3, 1]),
    array("B", [3, 1]),
    np.array([3, 1]),
    np.array([3, 9, 1, 9], np.uint32)[::2],
    np.array([1, 3], np.uint32)[::-1],
    np.array([3, 1], ">i4"),
    *(np.array([3, 1], kind) for kind in ("i1", "u1", "i2", "u2", "i4", "u4", "u8")),
]
BAD: list[tuple[Any, str]] = [
    ([1, -1], "block id -1 at index 1 is negative"),
    (range(1, -1, -1), ""),
    (range(0, -2, -1), "block id -1 at index 1 is negative"),
    (np.array([1, 2, -1]), "block id -1 at index 2 is negative"),
    (array("i", [-7]), "block id -7 at index 0 is negative"),
    ([1, 2**32], "block id 4294967296 at index 1 does not fit"),
    (np.array([1, 2**32]), "block id 4294967296 at index 1 does not fit"),
    ([1, 512], "block id 512 at index 1 is not in 0 to 511"),
    ([1.0, 2], "block id 1.0 at index 0 is no integer"),
    ([1, "2"], "block id '2' at index 1 is no integer"),
    ([[1, 2]], r"block id \[1, 2\] at index 0 is no integer"),
    (np.array([1.5]), "block id 1.5 at index 0 is no integer"),
    (np.array([True]), "block id True at index 0 is no integer"),
    ([1, True], "block id True at index 1 is no integer"),
    (np.array([[1, 2]]), r"one dimension, not shape \[1, 2\]"),
    (np.array(1), r"one dimension, not shape \[\]"),
    ([4, 2, 4], "block id 4 at index 2 is also at index 0"),
    ([*range(300), 7], "block id 7 at index 300 is also at index 7"),
    ([*range(300), 512], "block id 512 at index 300 is not in 0 to 511"),
    ([], "at least one block id"),
    (b"\1\0\0\0", "integers in order, not bytes"),
    ("12", "integers in order, not str"),
    ({1, 2}, "integers in order, not set"),
    ({1: 2}.keys(), "integers in order, not dict_keys"),
    ({1: 2}, "integers in order, not dict"),
    (7, "integers in order, not int"),
    (None, "integers in order, not NoneType"),
]


@pytest.fixture
def worker() -> Iterator[Worker]:
    pool = BlockPool.allocate(dense(Geometry(1, 1, 64, NUM_BLOCKS)), huge_pages=False)
    with Worker(pool, "one", transports="loopback") as made:
        yield made


@pytest.mark.parametrize("ids", GOOD, ids=repr)
def test_integers_of_any_container_are_ids(ids: BlockIds) -> None:
    assert as_array(ids, "r") == array("I", [3, 1])
    assert np.asarray(as_buffer(ids, "r")).dtype == np.uint32


@pytest.mark.parametrize("ids", [array("I", [3, 1]), np.array([3, 1], np.uint32)], ids=["array", "numpy"])
def test_what_needs_no_conversion_is_handed_on_and_kept_by_copy(ids: Any) -> None:
    assert as_buffer(ids, "r") is ids
    kept = as_array(ids, "r")
    ids[0] = 9
    assert kept == array("I", [3, 1])


def test_torch_tensors_are_ids() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'kvlink[torch]'")
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert as_array(torch.tensor([3, 1], dtype=dtype), "r") == array("I", [3, 1])
    assert as_array(torch.tensor([3, 9, 1, 9])[::2], "r") == array("I", [3, 1])
    for ids, sentence in (
        (torch.tensor([1, -1]), "block id -1 at index 1 is negative"),
        (torch.tensor([1.5]), "block id 1.5 at index 0 is no integer"),
        (torch.tensor([1.5], dtype=torch.bfloat16), "cannot be read from Tensor"),
        (torch.tensor([1], device="meta"), "cannot be read from Tensor"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            as_array(ids, "r")


@pytest.mark.parametrize(("ids", "sentence"), [row for row in BAD if row[1]], ids=repr)
def test_what_is_no_id_is_refused_by_index_and_value(ids: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_distinct(as_array(ids, "r"), NUM_BLOCKS, "r")


READERS: dict[str, Callable[[Worker, Any], object]] = {
    "offer": lambda worker, ids: worker.offer("g", ids),
    "offer_soft": lambda worker, ids: worker.offer_soft("g", ids),
    "pull": lambda worker, ids: worker.pull(worker.offer("t", [40, 41, 42]), ids).wait(),
    "prepare": lambda worker, ids: (
        worker.prepare(worker.offer("t", [40, 41, 42]), ids).pull(worker.offer("u", [40, 41, 42])).wait()
    ),
    "relay": lambda worker, ids: worker.relay(worker.offer("t", [40, 41, 42]), ids, readers=0).wait(),
    "revoke": lambda worker, ids: worker.revoke(ids),
}


def _release_sources(worker: Worker) -> None:
    """Ends the offers that `READERS` read from."""

    def left() -> list[Ticket]:
        worker.events()
        return [ticket for ticket in worker.offers.tickets() if ticket.request_id in ("t", "u")]

    for ticket in left():
        worker.release(ticket)
    eventually(lambda: not left())


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_an_iterator_is_read_once_and_whole(worker: Worker, reader: Callable[[Worker, Any], object]) -> None:
    """A second pass over an iterator with a bad element would see only what follows it."""
    blocks = worker.pool.numpy().reshape(2, NUM_BLOCKS, -1)
    blocks[:] = np.arange(NUM_BLOCKS)[None, :, None] % 251
    soft = worker.offer_soft("soft", [30, 31, 32])
    reader(worker, iter([1, 2, 3]))
    _release_sources(worker)
    before = blocks.copy()
    for bad in (None, True, 2.0, -1, 2**32, "3"):
        with pytest.raises(ConfigError, match="at index 2"):
            reader(worker, iter([30, 31, bad, 32]))
        _release_sources(worker)

    def broken() -> Iterator[int]:
        yield 30
        raise RuntimeError("the engine's own")

    with pytest.raises(RuntimeError, match="the engine's own"):
        reader(worker, broken())
    assert np.array_equal(blocks, before)
    assert worker.pull(soft, [50, 51, 52]).wait(), "nothing was revoked"


def test_offer_and_pull_take_the_same_ids(worker: Worker) -> None:
    ticket = worker.offer("owner", [5, 6])
    for number, ids in enumerate(GOOD):
        worker.offer(f"r{number}", ids)
        worker.pull(ticket, ids, settle=False).wait()


def test_offer_and_pull_refuse_the_same_ids(worker: Worker) -> None:
    """A list is empty for a pull that wants nothing, and an offer is never empty."""
    ticket = worker.offer("owner", list(range(301)))
    for ids, sentence in BAD:
        if not sentence or np.size(ids) == 0:
            continue
        with pytest.raises(ConfigError, match=sentence):
            worker.offer("refused", ids)
        with pytest.raises(ConfigError):
            worker.pull(ticket, ids, tokens=(0, 16 * np.size(ids)), settle=False).wait()
    assert worker.lease_counts().active == 1


def test_a_pull_keeps_the_ids_that_it_was_given(worker: Worker) -> None:
    """The first pull connects before it starts."""
    blocks = worker.pool.numpy().reshape(2, NUM_BLOCKS, -1)  # K, then V
    blocks[:] = np.arange(NUM_BLOCKS)[None, :, None] % 251
    into = array("I", [9])
    pull = worker.pull(worker.offer("r", [5]), into)
    into[0] = 7
    pull.wait()
    assert blocks[:, [7, 9], 0].tolist() == [[7, 5], [7, 5]]


NOT_A_NAME: list[tuple[Any, str]] = [
    ("", "has 0 bytes.*; it must have 1 to 512 bytes"),
    ("x" * 513, "has 513 bytes.*; it must have 1 to 512 bytes"),
    ("\u00e9" * 257, "has 514 bytes.*; it must have 1 to 512 bytes"),
    ("ab\ud800", "lone surrogate at index 2"),
    (b"bytes", "must be text, not bytes"),
    (7, "must be text, not int"),
    (None, "must be text, not NoneType"),
    (["r"], "must be text, not list"),
]


@pytest.mark.parametrize(("name", "sentence"), NOT_A_NAME, ids=lambda value: ascii(value)[:20])
def test_every_door_refuses_what_is_no_name(worker: Worker, name: Any, sentence: str) -> None:
    doors: list[Callable[[], Any]] = [
        lambda: check_name(name, "name"),
        lambda: worker.offer(name, [1]),
        lambda: worker.offers.grant_at(name, [], 1.0),
        lambda: worker.set_ready(name, 1),
        lambda: worker.extend(name, 1.0),
        lambda: worker.abort(name),
        lambda: Worker(worker.pool, name, transports="loopback"),
    ]
    if isinstance(name, str):
        doors += [lambda: worker.pull(name, [1]), lambda: worker.release(name)]
    for door in doors:
        with pytest.raises(ConfigError, match=sentence):
            door()
    assert worker.lease_counts().active == 0


def test_names_of_512_bytes_are_taken(worker: Worker) -> None:
    for name in ("x" * 512, "\u00e9" * 256, "\0 \n"):
        assert Ticket.from_text(worker.offer(name, [1]).to_text()).request_id == name


def test_a_made_up_ticket_is_refused_wherever_a_ticket_is_taken(worker: Worker) -> None:
    forged = replace(worker.offer("r", [5]))
    blob = bytearray(forged.to_bytes())
    seat = 12 + int.from_bytes(blob[4:6], "little")
    blob[seat : seat + 20] = struct.pack("<IQQ", 1234, 0, 0)
    blob[8:12] = zlib.crc32(blob[12:]).to_bytes(4, "little")
    text = base64.urlsafe_b64encode(blob).decode()
    object.__setattr__(forged, "seats", (LeaseSeat(1234, 0, 0),))
    doors: list[Callable[[], Any]] = [
        lambda: Ticket.from_text(text),
        lambda: Ticket.from_bytes(bytes(blob)),
        forged.to_bytes,
        lambda: worker.pull(text, [9]),
        lambda: worker.pull([text], [9]),
        lambda: worker.pull(text, []),
        lambda: worker.release(text),
        lambda: worker.release([text]),
        lambda: worker.pull(replace(forged), [9]),
    ]
    for door in doors:
        with pytest.raises(ConfigError, match="the ticket is forged"):
            door()
    assert worker.lease_counts().active == 1


@pytest.mark.parametrize("around", ["{}", " {}\n", '"{}"', "Bearer {}", "id-{}-7", '{{"ticket": "{}"}}'])
def test_no_ticket_goes_for_a_request_id_or_into_an_error(
    worker: Worker, around: str, caplog: pytest.LogCaptureFixture
) -> None:
    text = worker.offer("r", [5]).to_text()
    written = around.format(text)
    assert len(written) < 512
    doors: list[Callable[[], Any]] = [
        lambda: worker.offer(written, [1]),
        lambda: worker.set_ready(written, 1),
        lambda: worker.abort(written),
        lambda: worker.pull(request_id=written, into=[9]),
        lambda: worker.release(request_id=written),
    ]
    alone = written.strip(' \n"') == text
    if not alone:
        doors += [lambda: worker.pull(written, [9]), lambda: worker.release(written)]
    for door in doors:
        with pytest.raises(ConfigError, match="the text is a ticket or contains one") as refused:
            door()
        assert text[10:] not in str(refused.value)
    assert text[10:] not in caplog.text
    if alone:
        assert worker.pull(written, [9]).wait()


def test_a_request_id_can_be_said_outright(worker: Worker) -> None:
    for door in (lambda: worker.pull(request_id="r", into=[9]), lambda: worker.release(request_id="r")):
        with pytest.raises(ConfigError, match="claiming by id needs a coordinator"):
            door()
    ticket = worker.offer("r", [5])
    calls: list[Callable[[], Any]] = [
        lambda: worker.pull(ticket, [9], request_id="r"),
        lambda: worker.release(ticket, request_id="r"),
    ]
    for both in calls:
        with pytest.raises(ConfigError, match="pass either a ticket or request_id=, not both"):
            both()
    with pytest.raises(ConfigError, match="pass either a ticket or request_id="):
        worker.pull(into=[9])
    with pytest.raises(ConfigError, match="into: block ids must be integers in order, not NoneType"):
        worker.pull(ticket)


def test_the_text_of_a_ticket_is_the_ticket(worker: Worker) -> None:
    text = worker.offer("r", [5]).to_text()
    assert worker.pull(text, [9], settle=False).wait()
    assert worker.pull([text], [9], settle=False).wait()
    worker.release(text)
    for cut in (text[:-8], text[:40]):
        with pytest.raises(ConfigError, match="not a ticket of kvlink") as error:
            worker.pull(cut, [9])
        assert cut[5:] not in str(error.value)
    for wrong in (b"", 7, [7], [b"x"]):
        with pytest.raises(ConfigError, match=r"not (bytes|int)"):
            worker.pull(wrong, [9])  # type: ignore[arg-type]
