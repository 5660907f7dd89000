# SPDX-License-Identifier: Apache-2.0
"""Layouts that are derived from tensors whose dimensions are named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvlink.errors import ConfigError
from kvlink.layout import Geometry, KVLayout, Order, Regions, dense
from kvlink.transfer.axes import AXES
from kvlink.transfer.pool import BlockPool

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
