# SPDX-License-Identifier: Apache-2.0
"""Compares tensors with the layout that should describe them, before a peer reads the first byte."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from kvlink.errors import ConfigError
from kvlink.layout import KVLayout
from kvlink.layout.groups import region_bytes
from kvlink.transfer.tensors import Dim, TensorView

LAYERS, KV, BLOCKS, TOKENS, HEADS, ROW = "layers", "K/V", "blocks", "tokens", "heads", "row"
"""The names of the axes of a cache in errors and in `kvlink.transfer.axes`."""

_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1}


class _Step(NamedTuple):
    axis: str
    num: int
    stride: int


def check_tensors(views: Sequence[TensorView], groups: Sequence[KVLayout]) -> None:
    """Raises ConfigError, naming the tensor and the axis, unless tensor i fits region i of the layouts.

    A dimension may join axes that are adjacent in memory, as [slots, heads × row] does. A one-dimensional buffer of
    bytes has no axes to compare. Its size must be that of the region, or larger by less than one block. Layouts of
    several cache groups take such buffers only.
    """
    layout, sizes = groups[0], region_bytes(groups)
    if len(views) != len(sizes):
        odd = len(sizes) if len(views) > len(sizes) else len(views)
        what = f"tensors[{odd}] is in no region" if len(views) > len(sizes) else f"region {odd} has no tensor"
        raise ConfigError(
            f"{len(views)} tensors were given and the layout has {len(sizes)} regions: {what}; pass one tensor per "
            "region, in order (Regions.ONE, PER_LAYER or PER_PLANE say which planes share one)"
        )
    for region, (view, num_bytes) in enumerate(zip(views, sizes, strict=True)):
        if len(groups) > 1 and not view.is_byte_buffer:
            raise ConfigError(
                f"{view}: with the layouts of {len(groups)} cache groups, pass each region as a one-dimensional uint8 "
                "tensor"
            )
        _check_item(view, layout)
        if view.is_byte_buffer:
            _check_size(view, region, num_bytes, max(group.block_stride for group in groups))
        else:
            _check_axes(view, layout, region)
    for group in groups:
        _check_apart(views, group)


def _check_item(view: TensorView, layout: KVLayout) -> None:
    """Compares item size and dtype. Items of one byte fit any dtype, and only their rows are compared."""
    wanted, given = _ALIASES.get(layout.dtype, layout.dtype), view.dtype
    item_bytes = 1 if wanted.startswith("float8") else _ITEM_BYTES.get(wanted)
    if view.has_byte_items or item_bytes is None:
        return
    if item_bytes != view.item_bytes:
        raise ConfigError(
            f"{view} has items of {view.item_bytes} bytes, the layout's dtype {layout.dtype} has {item_bytes}"
        )
    if given != wanted and "float" in given:
        raise ConfigError(f"{view} has dtype {given}, the layout says {layout.dtype}")


def _check_size(view: TensorView, region: int, num_bytes: int, block_stride: int) -> None:
    beyond = view.num_bytes - num_bytes
    if not 0 <= beyond < max(block_stride, 1):
        raise ConfigError(
            f"{view.name} is a buffer of {view.num_bytes} bytes, and the layout has {num_bytes} bytes in region "
            f"{region}; pass exactly that many, tensor[:{num_bytes}] of a larger buffer"
        )


def _steps(layout: KVLayout, region: int) -> list[_Step]:
    """Returns the axes of a region of the layout by ascending stride, without the row. Raises ConfigError."""
    offsets: dict[int, list[int]] = {}
    for plane in layout.planes:
        if plane.region == region:
            offsets.setdefault(plane.layer, []).append(plane.offset)
    by_layer = [tuple(of_layer) for of_layer in offsets.values()]
    if not by_layer:
        raise ConfigError(f"no plane of the layout is in region {region}, so tensors[{region}] is never read")
    first = by_layer[0]
    kv = first[-1] - first[0]
    layers = by_layer[1][0] - first[0] if len(by_layer) > 1 else 0
    regular = [tuple(layer * layers + k * kv for k in range(len(first))) for layer in range(len(by_layer))]
    if by_layer != regular or len(first) > 2 or min(kv, layers) < 0:
        raise ConfigError(
            f"the planes of the layout in region {region} have irregular offsets, which no shape can be compared with; "
            f"pass tensors[{region}] as one-dimensional bytes: tensor.view(torch.uint8).flatten()"
        )
    steps = [
        _Step(LAYERS, len(by_layer), layers),
        _Step(KV, len(first), kv),
        _Step(BLOCKS, layout.num_blocks, layout.block_stride),
        _Step(TOKENS, layout.block_tokens, layout.token_stride),
        _Step(HEADS, layout.num_heads, layout.head_stride),
    ]
    return sorted((step for step in steps if step.num > 1), key=lambda step: step.stride)


def _check_axes(view: TensorView, layout: KVLayout, region: int) -> None:
    steps = _steps(layout, region)
    dims = _beyond_row(view, layout)
    alone = sum(size > 1 for size in view.shape) == 1
    for dim, in_row in dims:
        size, stride = dim.size, dim.stride
        joined = {ROW} if in_row else set()
        while size > 1:
            if not steps:
                raise ConfigError(
                    f"{view}: the layout has no axis for the {size} elements of {_where(dim, size)}"
                )
            step = steps.pop(0)
            if step.stride != stride or size % step.num:
                raise _differs(view, dim, size, stride, step)
            joined.add(step.axis)
            size, stride = size // step.num, stride * step.num
        if BLOCKS in joined and joined & {LAYERS, KV} and not alone:
            axes = " and ".join(sorted(joined))
            raise ConfigError(
                f"{view}: dimension {dim.position} joins {axes}, whose order is ambiguous; split the dimension with "
                "tensor.unflatten(…)"
            )
    if steps:
        missing = steps[0]
        raise ConfigError(
            f"{view} has no dimension for the axis {missing.axis}: the layout has {missing.num} {missing.axis} with "
            f"a stride of {missing.stride} bytes"
        )


def _beyond_row(view: TensorView, layout: KVLayout) -> list[tuple[Dim, bool]]:
    """Returns the dimensions outside the row, and whether the row ends inside the first of them.

    Only a row that is a whole block may have several dimensions. Raises ConfigError if no dimension ends the row.
    """
    row_bytes = layout.row_bytes
    most = len(view.shape) if layout.num_heads == layout.block_tokens == 1 else 1
    inner = next((index for index in reversed(range(len(view.shape))) if view.shape[index] > 1), None)
    if inner is not None and view.strides[inner] != view.item_bytes < row_bytes:
        raise ConfigError(
            f"{view}: dimension {inner}, the innermost, has a stride of {view.strides[inner]} bytes for items of "
            f"{view.item_bytes}; a row must be contiguous"
        )
    dims = view.dims
    run, used = view.item_bytes, 0
    while run < row_bytes and used < min(most, len(dims)) and dims[used].stride == run:
        run *= dims[used].size
        used += 1
    if run == row_bytes:
        return [(dim, False) for dim in dims[used:]]
    within = run // dims[used - 1].size if used else run
    if run > row_bytes and used and run % row_bytes == 0 and row_bytes % within == 0:
        rest = Dim(dims[used - 1].position, run // row_bytes, row_bytes)
        return [(rest, True), *((dim, False) for dim in dims[used:])]
    at = f"dimension {dims[used - 1].position}" if used else "an item"
    raise ConfigError(
        f"{view}: {at} ends a row of {run} bytes, the layout's axis {ROW} has {row_bytes} bytes"
    )


def _differs(view: TensorView, dim: Dim, size: int, stride: int, step: _Step) -> ConfigError:
    return ConfigError(
        f"{view}: {_where(dim, size)} has {size} elements with a stride of {stride} bytes, the layout's axis "
        f"{step.axis} has {step.num} with a stride of {step.stride} bytes"
    )


def _where(dim: Dim, left: int) -> str:
    return f"dimension {dim.position}" if left == dim.size else f"the rest of dimension {dim.position}"


def _check_apart(views: Sequence[TensorView], layout: KVLayout) -> None:
    """Raises ConfigError if planes of different tensors share a byte. Planes of one region are not compared."""
    steps = [
        (layout.block_stride, layout.num_blocks),
        (layout.token_stride, layout.block_tokens),
        (layout.head_stride, layout.num_heads),
    ]
    strides = sorted((step for step in steps if step[1] > 1), reverse=True)
    planes = sorted((views[plane.region].address + plane.offset, plane.region) for plane in layout.planes)
    extent = layout.extent_bytes
    for index, (address, region) in enumerate(planes):
        for other, other_region in itertools.islice(planes, index + 1, None):
            if other - address >= extent:
                break
            if region != other_region and _meet(other - address, strides, layout.row_bytes):
                one, two = sorted((region, other_region))
                raise ConfigError(
                    f"tensors[{one}] and tensors[{two}] overlap: pass separate memory for each region"
                )


def _meet(distance: int, strides: Sequence[tuple[int, int]], row_bytes: int) -> bool:
    """Returns whether two planes whose first bytes are `distance` apart share a byte. `strides` are descending."""
    if not strides:
        return -row_bytes < distance < row_bytes
    (stride, count), *inner = strides
    below = distance // stride
    return any(abs(k) < count and _meet(distance - k * stride, inner, row_bytes) for k in (below, below + 1))
