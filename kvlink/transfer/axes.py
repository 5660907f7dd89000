# SPDX-License-Identifier: Apache-2.0
"""Derives layouts from the shapes, strides and dtype of tensors, given a name for each dimension.

    axes = "K/V blocks tokens heads row"                  one tensor per layer, [2, N, block, H, D]
    axes = "layers K/V | blocks tokens heads row"         K of layer 0, V of layer 0, K of layer 1, …
    axes = "| blocks layers K/V tokens heads row"         one tensor for all layers

The words left of the bar name the axes that the list of tensors steps over, outermost first: `layers`, `K/V`, both, or
none for a single tensor. Without a bar the list steps over `layers`. Right of the bar there is one word for each
dimension, in the order of the shape:

    layers, blocks, tokens (of a block), heads, row (the elements of one head's K or V of one token)
    K/V: two elements, K first; a cache without it has one plane per layer, like the latent of MLA

`*` joins axes that share a dimension, outermost first: `K/V*row` is [..., 2 D], and `blocks*tokens` are slots (with
block_tokens=). `blocks`, `tokens` and `row` are required, and no word may be repeated. Without `heads` there is one
head. With `heads` and without `K/V` the bar is required, because it says whether the tensors are layers, or K and V of
layers.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from kvlink.errors import ConfigError
from kvlink.layout import ALL_LAYERS, ALL_TOKENS, Context, KVLayout, Pipeline, Plane, heads_of
from kvlink.transfer.tensor_check import BLOCKS, HEADS, KV, LAYERS, ROW, TOKENS
from kvlink.transfer.tensors import TensorView

AXES: Mapping[str, str] = MappingProxyType(
    {
        "flash-attention": "K/V blocks tokens heads row",
        "flashinfer-nhd": "blocks K/V tokens heads row",
        "flashinfer-hnd": "blocks K/V heads tokens row",
        "mla": "blocks tokens row",
        "separate-nhd": "layers K/V | blocks tokens heads row",
        "separate-hnd": "layers K/V | blocks heads tokens row",
        "packed-nhd": "blocks tokens heads K/V*row",
        "packed-hnd": "blocks heads tokens K/V*row",
    }
)
"""Names for common shapes: vLLM's FlashAttention and FlashInfer, MLA, separate tensors for K and V, and V behind K in
every row (vLLM 0.32 and later)."""

_WORDS = (LAYERS, KV, BLOCKS, TOKENS, HEADS, ROW)
_REQUIRED = (BLOCKS, TOKENS, ROW)


def layout_of(
    views: Sequence[TensorView],
    axes: str,
    *,
    model: str = "",
    dtype: str | None = None,
    block_tokens: int | None = None,
    total_heads: int | None = None,
    tp_rank: int = 0,
    tp_size: int = 1,
    pipeline: Pipeline = ALL_LAYERS,
    context: Context = ALL_TOKENS,
) -> KVLayout:
    """Returns the layout of `views`, which must have the same shape.

    Raises ConfigError, naming the dimension that does not fit.
    """
    listed, dims = _parse(axes)
    first = views[0]
    for view in views:
        if (view.shape, view.strides, view.dtype) != (first.shape, first.strides, first.dtype):
            raise ConfigError(f"{view} differs from {first}: one layout cannot describe both")
    sizes, strides = _measure(first, dims, _known_sizes(listed, dims, len(views), block_tokens))
    heads = sizes.setdefault(HEADS, 1)
    total = heads * (tp_size if HEADS in strides else 1) if total_heads is None else total_heads
    held = heads_of(total, tp_rank, tp_size)
    if held[1] - held[0] != heads:
        raise ConfigError(
            f"{first} has {heads} heads, rank {tp_rank} of {tp_size} holds {held[1] - held[0]} of total_heads={total}"
        )
    row_bytes = sizes[ROW] * first.item_bytes
    return KVLayout(
        model=model,
        dtype=first.dtype if dtype is None else dtype,
        block_tokens=sizes[TOKENS],
        total_heads=total,
        first_head=held[0],
        num_heads=heads,
        row_bytes=row_bytes,
        block_stride=strides[BLOCKS],
        token_stride=strides[TOKENS],
        head_stride=strides.get(HEADS, row_bytes),
        num_blocks=sizes[BLOCKS],
        planes=_planes(listed, sizes, strides, pipeline.layers(0)[0]),
        tp_rank=tp_rank,
        tp_size=tp_size,
        pipeline=pipeline,
        context=context,
    )


def named_shapes() -> str:
    """Lists the named shapes for an error text."""
    return ", ".join(f'"{name}" ({axes})' for name, axes in AXES.items())


def _parse(axes: str) -> tuple[list[str], list[list[str]]]:
    """Returns the axes of the list and those of every dimension. Raises ConfigError if `axes` is malformed."""
    text = AXES.get(axes.strip(), axes)
    before, bar, after = text.partition("|")
    dims = [dim.split("*") for dim in (after if bar else before).split()]
    named = [word for dim in dims for word in dim]
    listed = before.split() if bar else [LAYERS] if LAYERS not in named else []
    for word in listed + named:
        if word not in _WORDS:
            near = difflib.get_close_matches(axes if len(named) == 1 else word, [*_WORDS, *AXES], 1)
            raise ConfigError(
                f"axes={axes!r}: {word!r} is no axis{f', did you mean {near[0]!r}?' if near else ''}; write "
                f"{', '.join(_WORDS)} in the order of the shape, or one of {', '.join(AXES)}"
            )
        if (listed + named).count(word) > 1:
            raise ConfigError(f"axes={axes!r} names {word} twice")
    if wrong := [word for word in listed if word not in (LAYERS, KV)]:
        raise ConfigError(f"axes={axes!r}: tensors of a list step over layers and K/V, not over {wrong[0]}")
    if HEADS in named and KV not in listed + named and not bar:
        raise ConfigError(
            f"axes={axes!r} names no K/V: write 'layers K/V | {text.strip()}' where K and V are tensors of their own, "
            f"'layers | {text.strip()}' where a layer has one tensor and no V"
        )
    if missing := [word for word in _REQUIRED if word not in named]:
        raise ConfigError(f"axes={axes!r} does not name {' and '.join(missing)}")
    return listed, dims


def _known_sizes(
    listed: list[str], dims: list[list[str]], num_tensors: int, block_tokens: int | None
) -> dict[str, int]:
    """Returns the sizes that do not come from the shape. Raises ConfigError if the number of tensors is wrong."""
    known = {KV: 2} if KV in listed or any(KV in dim for dim in dims) else {}
    if block_tokens is not None:
        known[TOKENS] = block_tokens
    each = known[KV] if KV in listed else 1
    if num_tensors % each or (LAYERS not in listed and num_tensors != each):
        wanted = f"a multiple of {each}" if LAYERS in listed else each
        steps = f"lists {' and '.join(listed)}" if listed else "means a single tensor"
        raise ConfigError(
            f"{num_tensors} tensors were given, axes {steps}: it takes {wanted}; pass that many"
        )
    if LAYERS in listed:
        known[LAYERS] = num_tensors // each
    return known


def _measure(
    view: TensorView, dims: list[list[str]], known: dict[str, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the size, and the stride in bytes, of every axis within a tensor. The sizes in `known` stay."""
    if len(view.shape) != len(dims):
        words = " ".join("*".join(dim) for dim in dims)
        raise ConfigError(f"{view} has {len(view.shape)} dimensions, axes name {len(dims)}: {words}")
    sizes, strides = dict(known), {}
    for index, (dim, size, stride) in enumerate(zip(dims, view.shape, view.strides, strict=True)):
        unknown = [word for word in dim if word not in sizes]
        if len(unknown) > 1:
            advice = (
                "; pass block_tokens=" if TOKENS in unknown else "; reshape them into dimensions of their own"
            )
            raise ConfigError(
                f"{view}: the sizes of {'*'.join(dim)} in dimension {index} are not known{advice}"
            )
        rest, remainder = divmod(size, prod(sizes[word] for word in dim if word in sizes))
        if remainder or (not unknown and rest != 1):
            wanted = " x ".join(f"{sizes[word]} {word}" for word in dim if word in sizes)
            raise ConfigError(
                f"{view}: dimension {index} ({'*'.join(dim)}) has {size} elements, not {wanted}"
            )
        for word in reversed(dim):
            sizes.setdefault(word, rest)
            strides[word] = stride
            stride *= sizes[word]
    if sizes[ROW] > 1 and strides[ROW] != view.item_bytes:
        raise ConfigError(
            f"{view}: the row has a stride of {strides[ROW]} bytes for items of {view.item_bytes}; a row must be "
            "contiguous"
        )
    return sizes, strides


def _planes(
    listed: list[str], sizes: dict[str, int], strides: dict[str, int], first_layer: int
) -> tuple[Plane, ...]:
    steps, step = {}, 1
    for word in reversed(listed):
        steps[word] = step
        step *= sizes[word]
    return tuple(
        Plane(
            region=layer * steps.get(LAYERS, 0) + kv * steps.get(KV, 0),
            layer=first_layer + layer,
            offset=layer * strides.get(LAYERS, 0) + kv * strides.get(KV, 0),
        )
        for layer in range(sizes.get(LAYERS, 1))
        for kv in range(sizes.get(KV, 1))
    )
