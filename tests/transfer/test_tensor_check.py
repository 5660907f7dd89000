# SPDX-License-Identifier: Apache-2.0
"""Tensors given for a layout: only those pass whose every element lies where the layout has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvlink.errors import ConfigError
from kvlink.layout import Axis, Geometry, KVLayout, Order, Plane, Regions, dense, from_strides
from kvlink.transfer.pool import BlockPool, Region

N, B, H, D = 8, 16, 2, 64
GEOMETRY = Geometry(
    num_layers=2, total_heads=H, row_bytes=2 * D, num_blocks=N, block_tokens=B, dtype="float16"
)
LAYOUT = dense(GEOMETRY, Order.NHD, Regions.PER_LAYER)
Array = npt.NDArray[Any]


def half(*shape: int) -> Array:
    return np.zeros(shape, np.float16)


def of_both_layers(make: Callable[[], Array]) -> list[Array]:
    return [make(), make()]


def refused(tensors: Sequence[Any], layout: KVLayout = LAYOUT) -> str:
    with pytest.raises(ConfigError) as error:
        BlockPool.from_tensors(tensors, layout)
    return str(error.value)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: half(2, N, B, H, D), id="as the layout"),
        pytest.param(
            lambda: half(2, N, B, H, D).transpose(0, 1, 3, 2, 4), id="heads before tokens in the shape"
        ),
        pytest.param(lambda: half(2, N, B, H, D).view(np.uint16), id="bfloat16 as numpy has it"),
        pytest.param(lambda: half(2, N, B, H, D).view(np.uint8), id="rows of bytes"),
        pytest.param(lambda: half(2, N * B, H, D), id="slots"),
        pytest.param(lambda: half(2, N, B, H * D), id="heads and row in one dimension"),
        pytest.param(lambda: half(2, N, 1, B, H, D), id="a dimension of one element"),
        pytest.param(lambda: half(2 * N * B * H * D), id="flat"),
        pytest.param(lambda: np.zeros(2 * N * B * H * D * 2, np.uint8), id="bytes"),
    ],
)
def test_memory_that_the_layout_describes_is_taken(make: Callable[[], Array]) -> None:
    tensors = of_both_layers(make)
    pool = BlockPool.from_tensors(tensors, LAYOUT)
    assert [region.address for region in pool.regions] == [tensor.ctypes.data for tensor in tensors]
    assert [region.num_bytes for region in pool.regions] == list(LAYOUT.region_bytes)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: half(N, 2, B, H, D), ["dimension 1 has 2 elements", "axis blocks has 8"]),
        (lambda: half(2, N, H, B, D), ["axis tokens has 16 with a stride of 256"]),
        (lambda: half(2, N + 1, B, H, D), ["dimension 1 has 9 elements", "axis blocks has 8"]),
        (lambda: half(2, N, B // 2, H, D), ["dimension 2 has 8 elements", "axis tokens has 16"]),
        (lambda: half(2, N, B, H, D // 2), ["dimension 4 ends a row of 64 bytes", "axis row has 128 bytes"]),
        (
            lambda: half(2, N, B, H, 2 * D)[..., :D],
            ["dimension 3", "a stride of 256 bytes", "axis heads has 2 with a stride of 128"],
        ),
        (
            lambda: half(2, N, B + 1, H, D)[:, :, :B],
            ["dimension 1", "a stride of 4352 bytes", "axis blocks has 8 with a stride of 4096"],
        ),
        (lambda: half(2, N, B, H, 2 * D)[..., ::2], ["dimension 4, the innermost, has a stride of 4 bytes"]),
        (lambda: half(2, N, B, D, H).swapaxes(3, 4), ["dimension 4, the innermost, has a stride of 4 bytes"]),
        (lambda: half(2, N, B, H, D).swapaxes(3, 4), ["dimension 4, the innermost, has a stride of 128 bytes"]),
        (lambda: np.zeros((2, N, B, H, D), np.float32), ["items of 4 bytes", "dtype float16 has 2"]),
        (lambda: np.zeros((2, N, B, H, D), np.uint8), ["ends a row of 64 bytes", "axis row has 128 bytes"]),
        (lambda: half(N, B, H, D), ["no dimension for the axis K/V"]),
        (lambda: half(3, 2, N, B, H, D), ["no axis for the 3 elements of dimension 0"]),
        (lambda: half(2 * N, B, H, D), ["dimension 0 joins K/V and blocks"]),
        (lambda: np.zeros(2 * N * B * H * D * 2 - 1, np.uint8), ["65535 bytes", "65536 bytes in region 0"]),
        (lambda: np.zeros(2 * N * B * H * D * 4, np.uint8), ["131072 bytes", "65536 bytes in region 0"]),
        (
            lambda: np.broadcast_to(half(1, N, B, H, D), (2, N, B, H, D)),
            ["read-only"],
        ),
        (
            lambda: np.lib.stride_tricks.as_strided(half(N, B, H, D), (2, N, B, H, D), (0, 4096, 256, 128, 2)),
            ["the elements of dimension 0 overlap"],
        ),
        (lambda: np.zeros((2, N, B, H, D), object), ["Python objects"]),
    ],
)  # fmt: skip
def test_memory_that_the_layout_does_not_describe_is_refused(
    make: Callable[[], Array], named: list[str]
) -> None:
    sentence = refused([half(2, N, B, H, D), make()])
    for words in ["tensors[1]", *named]:
        assert words.replace("region 0", "region 1") in sentence


def test_a_layout_of_another_float_type_is_refused() -> None:
    layout = replace(LAYOUT, dtype="bfloat16")
    assert "dtype float16, the layout says bfloat16" in refused(
        of_both_layers(lambda: half(2, N, B, H, D)), layout
    )


def test_as_many_tensors_as_regions() -> None:
    tensors = [half(2, N, B, H, D) for _ in range(3)]
    assert "tensors[2] is in no region" in refused(tensors)
    assert "region 1 has no tensor" in refused(tensors[:1])
    assert "takes a list" in refused(half(2, 2, N, B, H, D))  # type: ignore[arg-type]
    assert "at least one" in refused([])
    assert "tensors[1] is a list" in refused([tensors[0], [1.0]])


def test_a_pool_has_as_many_regions_as_its_layout() -> None:
    regions = [Region(1 << 47, size, None, None) for size in LAYOUT.region_bytes]
    with pytest.raises(ConfigError, match="3 regions were given and the layout has 2"):
        BlockPool([*regions, regions[0]], LAYOUT)


@pytest.mark.parametrize("order", Order)
def test_every_order_takes_its_own_shape_and_no_other(order: Order) -> None:
    geometry = replace(GEOMETRY, num_layers=3, total_heads=4)
    sizes = {Axis.LAYER: 3, Axis.KV: 2, Axis.BLOCK: N, Axis.TOKEN: B, Axis.HEAD: 4}
    for other in Order:
        tensor = half(*(sizes[axis] for axis in other.axes), D)
        layout = dense(geometry, order, Regions.ONE)
        if other is order:
            BlockPool.from_tensors([tensor], layout)
        else:
            assert "tensors[0]" in refused([tensor], layout)


def test_key_and_value_may_share_every_row() -> None:
    layout = dense(GEOMETRY, Order.BESIDE_HND, Regions.PER_LAYER)
    BlockPool.from_tensors(of_both_layers(lambda: half(N, H, B, 2 * D)), layout)
    assert "the rest of dimension 3" in refused(of_both_layers(lambda: half(N, H, B, 4 * D)), layout)


def test_a_row_may_be_a_whole_block() -> None:
    whole = Geometry(
        num_layers=1,
        total_heads=1,
        row_bytes=B * H * D * 2,
        num_blocks=N,
        block_tokens=1,
        planes_per_layer=1,
    )
    BlockPool.from_tensors([np.zeros((N, B, H, D), np.uint16)], dense(whole))


def test_padding_counts_as_the_layout_has_it() -> None:
    strides = {Axis.KV: N * 4352, Axis.BLOCK: 4352, Axis.TOKEN: 256, Axis.HEAD: 128}
    padded = from_strides(GEOMETRY, strides, Regions.PER_LAYER)
    BlockPool.from_tensors(of_both_layers(lambda: half(2, N, B + 1, H, D)[:, :, :B]), padded)
    BlockPool.from_tensors(of_both_layers(lambda: np.zeros(2 * N * 4352, np.uint8)), padded)
    assert "axis blocks" in refused(of_both_layers(lambda: half(2, N, B, H, D)), padded)


def test_planes_at_irregular_offsets_take_bytes_only() -> None:
    one = LAYOUT.planes[1].offset
    layout = replace(LAYOUT, planes=(Plane(0, 0, 0), Plane(0, 1, 3 * one), Plane(0, 2, one)))
    BlockPool.from_tensors([np.zeros(4 * one, np.uint8)], layout)
    assert "irregular offsets" in refused([half(4, N, B, H, D)], layout)


def test_tensors_that_share_memory_are_refused() -> None:
    tensor = half(2, N, B, H, D)
    assert "tensors[0] and tensors[1] overlap" in refused([tensor, tensor])
    flat = np.zeros(4 * N * B * H * D, np.float16)
    size = tensor.size
    assert "overlap" in refused([flat[:size], flat[size - 1 : 2 * size - 1]])
    BlockPool.from_tensors([flat[:size], flat[size:]], LAYOUT)


def test_views_that_interleave_do_not_overlap() -> None:
    """K and V as two tensors, views of one in which every block holds both."""
    pairs = half(2, N, 2, B, H, D)
    strides = {Axis.BLOCK: 2 * 4096, Axis.TOKEN: 256, Axis.HEAD: 128}
    layout = from_strides(GEOMETRY, strides, Regions.PER_PLANE)
    keys_and_values = [pairs[layer, :, kv] for layer in range(2) for kv in range(2)]
    BlockPool.from_tensors(keys_and_values, layout)
    keys_and_values[3] = pairs[1, :, 0]
    assert "tensors[2] and tensors[3] overlap" in refused(keys_and_values, layout)
