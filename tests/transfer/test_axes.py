# SPDX-License-Identifier: Apache-2.0
"""A layout that is derived from named dimensions has each element where numpy has it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvlink.errors import ConfigError
from kvlink.layout import KVLayout
from kvlink.transfer.axes import AXES, layout_of
from kvlink.transfer.tensors import views_of

LAYERS, BLOCKS, TOKENS, HEADS, ROW = 3, 5, 4, 2, 8
Array = npt.NDArray[Any]
Index = Callable[[int, int, int, int, int], tuple[int, ...]]
"""Where the row of layer, K or V, block, token and head is in an array of the list."""


def half(*shape: int) -> Array:
    return np.zeros(shape, np.float16)


def per_layer(*shape: int) -> list[Array]:
    return [half(*shape) for _ in range(LAYERS)]


def derived(arrays: Sequence[Any], axes: str, **more: Any) -> KVLayout:
    return layout_of(views_of(arrays), axes, **more)


def offset_of(array: Array, index: tuple[int, ...]) -> int:
    return sum(at * stride for at, stride in zip(index, array.strides, strict=False))


@pytest.mark.parametrize(
    ("axes", "arrays", "index", "more"),
    [
        (AXES["flash-attention"], per_layer(2, BLOCKS, TOKENS, HEADS, ROW), lambda _, kv, b, t, h: (kv, b, t, h), {}),
        ("flashinfer-nhd", per_layer(BLOCKS, 2, TOKENS, HEADS, ROW), lambda _, kv, b, t, h: (b, kv, t, h), {}),
        ("flashinfer-hnd", per_layer(BLOCKS, 2, HEADS, TOKENS, ROW), lambda _, kv, b, t, h: (b, kv, h, t), {}),
        ("mla", per_layer(BLOCKS, TOKENS, ROW), lambda _, kv, b, t, h: (b, t), {}),
        (
            "separate-nhd", [half(BLOCKS, TOKENS, HEADS, ROW) for _ in range(2 * LAYERS)],
            lambda _, kv, b, t, h: (b, t, h), {},
        ),
        (
            "K/V layers | blocks tokens row", [half(BLOCKS, TOKENS, ROW) for _ in range(2 * LAYERS)],
            lambda _, kv, b, t, h: (b, t), {},
        ),
        ("packed-hnd", per_layer(BLOCKS, HEADS, TOKENS, 2 * ROW), lambda _, kv, b, t, h: (b, h, t, kv * ROW), {}),
        (
            "| blocks layers K/V tokens heads row", [half(BLOCKS, LAYERS, 2, TOKENS, HEADS, ROW)],
            lambda layer, kv, b, t, h: (b, layer, kv, t, h), {},
        ),
        (
            "K/V blocks*tokens heads row", per_layer(2, BLOCKS * TOKENS, HEADS, ROW),
            lambda _, kv, b, t, h: (kv, b * TOKENS + t, h), {"block_tokens": TOKENS},
        ),
    ],
)  # fmt: skip
def test_every_row_is_where_the_array_has_it(
    axes: str, arrays: list[Array], index: Index, more: dict[str, int]
) -> None:
    layout = derived(arrays, axes, **more)
    heads, kvs = layout.num_heads, len(layout.planes) // LAYERS
    assert (layout.num_blocks, layout.block_tokens, layout.row_bytes) == (BLOCKS, TOKENS, 2 * ROW)
    assert (heads, kvs) == (HEADS if "heads" in AXES.get(axes, axes) else 1, 1 if axes == "mla" else 2)
    regions: set[int] = set()
    for number, plane in enumerate(layout.planes):
        layer, kv = divmod(number, kvs)
        assert plane.layer == layer
        regions.add(plane.region)
        for b, t, h in itertools.product(range(BLOCKS), range(TOKENS), range(heads)):
            steps = b * layout.block_stride + t * layout.token_stride + h * layout.head_stride
            assert plane.offset + steps == offset_of(arrays[plane.region], index(layer, kv, b, t, h))
    assert regions == set(range(len(arrays)))


def test_lists_step_over_layers_and_over_keys_and_values_as_they_are_named() -> None:
    separate = [half(BLOCKS, TOKENS, ROW) for _ in range(2 * LAYERS)]
    inner = derived(separate, "layers K/V | blocks tokens row").planes
    outer = derived(separate, "K/V layers | blocks tokens row").planes
    assert [plane.region for plane in inner] == [0, 1, 2, 3, 4, 5]
    assert [plane.region for plane in outer] == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("axes", "arrays", "more", "says"),
    [
        ("blokcs tokens row", per_layer(BLOCKS, TOKENS, ROW), {}, "'blokcs' is no axis, did you mean 'blocks'"),
        ("mal", per_layer(BLOCKS, TOKENS, ROW), {}, "did you mean 'mla'"),
        ("blocks blocks tokens row", per_layer(1, BLOCKS, TOKENS, ROW), {}, "names blocks twice"),
        ("blocks | tokens row", per_layer(TOKENS, ROW), {}, "step over layers and K/V, not over blocks"),
        ("blocks tokens heads row", per_layer(BLOCKS, TOKENS, HEADS, ROW), {}, "names no K/V"),
        ("blocks row", per_layer(BLOCKS, ROW), {}, "does not name tokens"),
        ("mla", per_layer(BLOCKS, TOKENS, HEADS, ROW), {}, "has 4 dimensions, axes name 3"),
        ("separate-nhd", per_layer(BLOCKS, TOKENS, HEADS, ROW), {}, "it takes a multiple of 2"),
        ("| blocks tokens row", per_layer(BLOCKS, TOKENS, ROW), {}, "means a single tensor: it takes 1"),
        ("K/V | blocks tokens row", [half(BLOCKS, TOKENS, ROW)] * 4, {}, "lists K/V: it takes 2"),
        ("flash-attention", per_layer(3, BLOCKS, TOKENS, HEADS, ROW), {}, r"\(K/V\) has 3 elements, not 2 K/V"),
        ("flash-attention", per_layer(4, BLOCKS, TOKENS, HEADS, ROW), {}, r"\(K/V\) has 4 elements, not 2 K/V"),
        ("K/V blocks*tokens heads row", per_layer(2, 20, HEADS, ROW), {}, "not known; pass block_tokens="),
        ("blocks tokens K/V*row", per_layer(BLOCKS, TOKENS, 7), {}, "has 7 elements, not 2 K/V"),
        ("blocks tokens heads*row", per_layer(BLOCKS, TOKENS, 16), {}, "names no K/V"),
        ("| blocks tokens heads*row", [half(BLOCKS, TOKENS, 16)], {}, "not known; reshape them"),
        ("mla", per_layer(BLOCKS, TOKENS, ROW), {"block_tokens": 2}, r"\(tokens\) has 4 elements, not 2 tokens"),
        ("K/V blocks*tokens heads row", per_layer(2, 20, HEADS, ROW), {"block_tokens": 3}, "20 elements, not 3 tokens"),
        ("mla", [half(BLOCKS, TOKENS, ROW), half(BLOCKS, TOKENS, 9)], {}, "differs from"),
        ("flash-attention", per_layer(2, BLOCKS, TOKENS, HEADS, ROW), {"total_heads": 8, "tp_size": 2}, "holds 4 of"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(axes: str, arrays: list[Array], more: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        derived(arrays, axes, **more)


def test_tensors_are_on_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    here = views_of([half(1)])[0]
    monkeypatch.setattr(
        "kvlink.transfer.tensors._view_of", lambda name, gpu: replace(here, name=name, gpu=gpu)
    )
    assert [view.gpu for view in views_of([1, 1])] == [1, 1]
    with pytest.raises(ConfigError, match=r"tensors\[1\] is on cuda:1, tensors\[0\] on cpu; make one pool"):
        views_of([None, 1])
    with pytest.raises(ConfigError, match="cuda:0; make one pool"):
        views_of([0, 0, 1])
