# SPDX-License-Identifier: Apache-2.0
"""vLLM's API server with the kernels of DeepSeek-V4 in torch: `torch_kernels.py FLAGS…`, in vLLM's environment.

vLLM 0.32 has a model of DeepSeek-V4 for CPUs. Its operators are for CPUs with AVX-512 and BF16, what prepares a step is
in Triton, which its package does not have for CPUs, and one method fails on every CPU. Here all of these are functions
of torch, which write their bytes where vLLM's write them. The model, the caches, their groups and their memory are
vLLM's. Every process of a server runs this file before it makes the model.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from typing import Any

import torch
import vllm._custom_ops  # noqa: F401  loads vLLM's own
from torch import Tensor
from torch.nn.functional import pad, softplus
from vllm.models.deepseek_v4.cpu.cpu_mla import DeepseekV4CPUSparseSWAMetadataBuilder
from vllm.platforms import current_platform
from vllm.triton_utils.dispatcher import register_kernels

HEAD, ROPE, INDEXER = 512, 64, 128
"""Values of a row of attention, those of them that are rotated, and values of a row of an indexer."""
FLAT = HEAD - ROPE
ROW, SCALES = FLAT + 2 * ROPE, 8
"""Bytes of a row of attention, and of its scales, which are behind all rows of a block."""
FP8_MAX, SMALLEST = 448.0, 1e-4
TOP_ROWS = 512
AT_ONCE = 64
"""Tokens whose attention is computed at once."""

Pair = tuple[Tensor, Tensor]
_LIBRARY = torch.library.Library("_C", "FRAGMENT")


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function one of vLLM's operators, in place of its own where it has one."""
    if not hasattr(torch.ops._C, function.__name__):
        _LIBRARY.define(function.__name__ + torch.library.infer_schema(function, mutates_args="unknown"))
    _LIBRARY.impl(function.__name__, function, "CPU", allow_override=True)
    return function


def rotated(x: Tensor, positions: Tensor, cos_sin: Tensor, backwards: bool = False) -> Tensor:
    """Rotates the last values, in pairs of neighbours."""
    angles = cos_sin[positions[: len(x)]].float().reshape(len(x), *[1] * (x.dim() - 2), ROPE)
    cos, sin = angles.chunk(2, -1)
    sin = -sin if backwards else sin
    even, odd = x[..., -ROPE::2], x[..., 1 - ROPE :: 2]
    pairs = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1)
    return torch.cat([x[..., :-ROPE], pairs.flatten(-2)], -1)


def normed(x: Tensor, eps: float) -> Tensor:
    """Divides by the root of the mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def quantized(x: Tensor) -> Pair:
    """Returns the bytes of FP8 values, and the exponents of their scales, one for each last dimension."""
    exponents = (x.abs().amax(-1).clamp(min=SMALLEST) / FP8_MAX).log2().ceil()
    values = (x * torch.exp2(-exponents)[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return values.to(torch.float8_e4m3fn).view(torch.uint8), exponents


def places(slots: Tensor, rows: int, first: int, width: int) -> Pair:
    """Returns the blocks of these slots, and the bytes in each. Rows of `width` bytes begin at the byte `first`."""
    return (slots // rows)[..., None], first + (slots % rows)[..., None] * width + torch.arange(width)


def store(cache: Tensor, rows: int, slots: Tensor, x: Tensor) -> None:
    """Writes rows of attention: FP8 values with a scale for every 64, and those that are rotated in BF16."""
    values, exponents = quantized(x[:, :FLAT].bfloat16().float().unflatten(-1, (-1, ROPE)))
    rest = x[:, FLAT:].bfloat16().contiguous().view(torch.uint8)
    cache[places(slots, rows, 0, ROW)] = torch.cat([values.flatten(1), rest], 1)
    cache[places(slots, rows, rows * ROW, SCALES)] = pad(
        (exponents + 127).clamp(0, 255).to(torch.uint8), (0, 1)
    )


def stored(cache: Tensor, rows: int, slots: Tensor) -> Tensor:
    """Returns rows of attention."""
    row = cache[places(slots, rows, 0, ROW)]
    scales = torch.exp2(cache[places(slots, rows, rows * ROW, SCALES)][:, :-1].float() - 127)
    values = row[:, :FLAT].contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, ROPE))
    rest = row[:, FLAT:].contiguous().view(torch.bfloat16).float()
    return torch.cat([(values * scales[..., None]).flatten(1), rest], 1)


@kernel
def convert_weight_packed(weight: Tensor) -> Tensor:
    return weight.clone()


@kernel
def bmm_cpu(out: Tensor, mat1: Tensor, mat2: Tensor, is_vnni: bool, scale: Tensor | None) -> None:
    out.copy_(mat1.float() @ mat2.float().transpose(1, 2))


@kernel
def hc_pre_fused_cpu(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_mult: int, iterations: int, rms_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = [hc_mult, hc_mult, hc_mult * hc_mult]
    mixes = (normed(x.flatten(1).float(), rms_eps) @ hc_fn.t()).split(sizes, 1)
    pre, post, comb = (
        mix * scale + base for mix, scale, base in zip(mixes, hc_scale, hc_base.split(sizes), strict=True)
    )
    comb = comb.unflatten(1, (hc_mult, hc_mult)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return _weighted(x, pre.sigmoid() + hc_eps), 2 * post.sigmoid(), comb


@kernel
def hc_post_fused_cpu(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    carried = torch.einsum("tij,tih->tjh", comb, residual.float())
    return (carried + post[..., None] * x[:, None].float()).to(x.dtype)


@kernel
def hc_head_fused_cpu(
    x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, hc_eps: float, norm_eps: float
) -> Tensor:
    mixes = normed(x.flatten(1).float(), norm_eps) @ hc_fn.t()
    return _weighted(x, (mixes * hc_scale + hc_base).sigmoid() + hc_eps)


def _weighted(x: Tensor, weights: Tensor) -> Tensor:
    return (weights[..., None] * x.float()).sum(1).to(x.dtype)


@kernel
def fused_qnorm_rope_kv_insert_cpu(
    q: Tensor, kv: Tensor, positions: Tensor, cache: Tensor, slots: Tensor, cos_sin: Tensor, heads: int, eps: float,
    rows: int,
) -> Tensor:  # fmt: skip
    used = (slots >= 0).nonzero().flatten()
    store(cache, rows, slots[used], rotated(kv[used].float(), positions[used], cos_sin))
    query = rotated(normed(q.float(), eps), positions, cos_sin)
    return pad(query, (0, 0, 0, heads - q.shape[1])).to(q.dtype)


@kernel
def inverse_gptj_rope_o_proj_cpu(o: Tensor, positions: Tensor, cos_sin: Tensor, rope_dim: int) -> Tensor:
    return rotated(o.float(), positions, cos_sin, backwards=True)


@kernel
def flash_mla_with_kvcache_cpu(
    out: Tensor, q: Tensor, window: Tensor, window_slots: Tensor, window_rows: int, compressed: Tensor,
    compressed_slots: Tensor, compressed_rows: int, sink: Tensor, scale: float,
) -> None:  # fmt: skip
    near, near_rows = _read(window, window_rows, window_slots, 0)
    far, far_rows = _read(compressed, compressed_rows, compressed_slots, len(near_rows))
    chosen, table = torch.cat([near, far], 1), torch.cat([near_rows, far_rows])
    for first in range(0, len(q), AT_ONCE):
        some = slice(first, first + AT_ONCE)
        rows = table[chosen[some].clamp(min=0)]
        scores = torch.einsum("thd,tkd->thk", q[some].float(), rows) * scale
        scores = scores.masked_fill((chosen[some] < 0)[:, None], -torch.inf)
        sinks = sink.view(1, -1, 1).expand(len(scores), -1, 1)
        weights = torch.cat([scores, sinks], 2).softmax(-1)[..., :-1]
        out[some] = torch.einsum("thk,tkd->thd", weights, rows).to(out.dtype)


def _read(cache: Tensor, rows: int, slots: Tensor, first: int) -> Pair:
    """Returns the rows of these slots once each, and which of them, counted from `first`, each slot has (-1: none)."""
    read, which = slots.clamp(min=0).unique(return_inverse=True)
    return torch.where(slots < 0, -1, which + first), stored(cache, rows, read)


@kernel
def save_partial_states_cpu(
    kv: Tensor, score: Tensor, ape: Tensor, positions: Tensor, states: Tensor, slots: Tensor
) -> None:
    used = (slots >= 0).nonzero().flatten()
    biased = score[used] + ape[positions[used] % len(ape)]
    states[slots[used] // states.shape[1], slots[used] % states.shape[1]] = torch.cat([kv[used], biased], 1)


@kernel
def compress_norm_rope_store_cpu(
    states: Tensor, gathered: Tensor, positions: Tensor, slots: Tensor, weight: Tensor, eps: float, cos_sin: Tensor,
    cache: Tensor, rows: int, ratio: int,
) -> None:  # fmt: skip
    used = _completes(gathered, positions, slots, ratio)
    store(
        cache, rows, slots[used], _row(states, gathered[used], positions[used], weight, eps, cos_sin, ratio)
    )


@kernel
def compress_norm_rope_store_indexer_cpu(
    states: Tensor, gathered: Tensor, positions: Tensor, slots: Tensor, weight: Tensor, eps: float, cos_sin: Tensor,
    cache: Tensor, rows: int, ratio: int,
) -> None:  # fmt: skip
    used = _completes(gathered, positions, slots, ratio)
    row = _row(states, gathered[used], positions[used], weight, eps, cos_sin, ratio)
    values, exponents = quantized(row.bfloat16().float())
    cache[places(slots[used], rows, 0, INDEXER)] = values
    scales = torch.exp2(exponents)[:, None].contiguous().view(torch.uint8)
    cache[places(slots[used], rows, rows * INDEXER, 4)] = scales


def _completes(gathered: Tensor, positions: Tensor, slots: Tensor, ratio: int) -> Tensor:
    """Returns the tokens that are the last of a row."""
    positions, slots = positions[: len(gathered)], slots[: len(gathered)]
    return ((slots >= 0) & ((positions + 1) % ratio == 0)).nonzero().flatten()


def _row(
    states: Tensor,
    gathered: Tensor,
    positions: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    ratio: int,
) -> Tensor:
    """Returns rows. A token has two states if rows overlap: one for its own row, and one for the next."""
    slots, head = gathered.clamp(min=0), len(weight)
    kv, score = states[slots // states.shape[1], slots % states.shape[1]].float().chunk(2, -1)
    if gathered.shape[1] > ratio:
        kv, score = (torch.cat([x[:, :ratio, :head], x[:, ratio:, head:]], 1) for x in (kv, score))
    score = score.masked_fill((gathered < 0)[..., None], -torch.inf)
    row = normed((kv * score.softmax(1)).sum(1), eps) * weight
    return rotated(row, positions // ratio * ratio, cos_sin)


@kernel
def fused_indexer_q_rope_quant_cpu(
    positions: Tensor, q: Tensor, cos_sin: Tensor, out: Tensor, weights: Tensor, softmax_scale: float,
    head_scale: float, weights_out: Tensor,
) -> None:  # fmt: skip
    values, exponents = quantized(rotated(q, positions, cos_sin))
    out.view(torch.uint8).copy_(values)
    weights_out.copy_(weights * torch.exp2(exponents) * softmax_scale * head_scale)


@kernel
def fp8_paged_mqa_logits_cpu(
    q: Tensor, cache: Tensor, weights: Tensor, lengths: Tensor, block_table: Tensor, rows: int, most: int
) -> Tensor:
    scores = torch.full((len(q), most), -torch.inf)
    for token, length in enumerate(lengths.tolist()):
        row = torch.arange(length)
        slots = block_table[token, row // rows].long() * rows + row % rows
        values = cache[places(slots, rows, 0, INDEXER)].view(torch.float8_e4m3fn).float()
        scales = cache[places(slots, rows, rows * INDEXER, 4)].view(torch.float32)[:, 0]
        heads = (q[token].float() @ values.t()).relu()
        scores[token, :length] = (weights[token][:, None] * heads).sum(0) * scales
    return scores


@kernel
def topk_transform_512_cpu(
    scores: Tensor, lengths: Tensor, block_table: Tensor, slots: Tensor, rows: int, chosen: Tensor | None
) -> None:  # fmt: skip
    assert chosen is not None
    chosen.fill_(-1)
    for token, length in enumerate(lengths.tolist()):
        some = min(length, TOP_ROWS)
        chosen[token, :some] = scores[token, :length].topk(some).indices.int()


@kernel
def biased_topk_cpu(
    hidden_states: Tensor, gating: Tensor, bias: Tensor, topk: int, renormalize: bool, scoring: str, shared: int,
    factor: float | None, is_applied: bool,
) -> Pair:  # fmt: skip
    scores = softplus(gating.float()).sqrt()
    return _routed(scores, (scores + bias).topk(topk).indices, factor or 1.0)


@kernel
def hash_topk_cpu(
    gating: Tensor, chosen: Tensor, topk: int, scoring: str, shared: int, experts: int, factor: float
) -> Pair:
    return _routed(softplus(gating.float()).sqrt(), chosen, factor)


def _routed(scores: Tensor, chosen: Tensor, factor: float) -> Pair:
    weights = scores.gather(1, chosen.long())
    return weights / weights.sum(1, keepdim=True) * factor, chosen.int()


def token_requests(starts: Tensor, out: Tensor, requests: int, mapped: int, tokens: int, **_: int) -> None:
    """Writes each token's request. `starts` has the first token of each, and the end of the last."""
    out[:tokens] = 0
    out[:mapped] = torch.repeat_interleave(starts.diff())[:mapped]


def _positions(starts: Tensor, lengths: Tensor) -> Pair:
    """Returns each token's request, and its place there."""
    of = torch.repeat_interleave(starts.diff())
    return of, torch.arange(len(of)) - starts[1:][of] + lengths[of]


def row_slots(
    out: Tensor, slots: Tensor, starts: Tensor, lengths: Tensor, block_table: Tensor, stride: int, rows: int,
    world: int, interleave: int, ratio: int, unused: int, block: int,
) -> None:  # fmt: skip
    """Writes where the rows go that tokens complete."""
    of, positions = _positions(starts, lengths)
    row = positions // ratio
    completes = ((positions + 1) % ratio == 0) & (slots[: len(of)] != unused)
    out[: len(of)] = torch.where(completes, block_table[of, row // rows].long() * rows + row % rows, unused)


def visible_rows(
    starts: Tensor, lengths: Tensor, row_starts: Tensor, local_row_starts: Tensor, row_requests: Tensor,
    first: Tensor, end: Tensor, begin: int, stop: int, rank: int, world: int, interleave: int, block: int, ratio: int,
) -> None:  # fmt: skip
    """Writes which rows of all prompts together each token of them sees."""
    of, positions = _positions(starts, lengths)
    begins = local_row_starts[of]
    first[: stop - begin] = begins[begin:stop]
    end[: stop - begin] = (begins + (positions + 1) // ratio)[begin:stop]
    row_requests[: int(row_starts[-1])] = torch.repeat_interleave(row_starts.diff())


def for_gpus(*_: object, **__: object) -> None:
    """Leaves out what no kernel for CPUs reads."""


TRITON: dict[str, Callable[..., None]] = {
    "ops.metadata._token_request_mapping_kernel": token_requests,
    "backends.mla.compressor_utils.CompressedSlotMappingKernel.kernel": row_slots,
    "backends.mla.indexer.BuildPrefillChunkMetadataKernel.kernel": visible_rows,
    "backends.mla.sparse_swa.ComputePrefillMetadataKernel.kernel": for_gpus,
    "backends.mla.sparse_swa.ComputeSWAIndicesAndLensKernel.kernel": for_gpus,
}


def repair(builder: type[Any]) -> None:
    """Adds the plans of two kinds of layers that vLLM 0.32 reads, and that its builder for CPUs leaves out."""
    forgetful = builder.build_tile_scheduler
    builder.build_tile_scheduler = lambda self, tokens: {"c1a": None, "c2a": None, **forgetful(self, tokens)}


assert current_platform.is_cpu()
register_kernels({f"vllm.v1.attention.{name}": function for name, function in TRITON.items()})
repair(DeepseekV4CPUSparseSWAMetadataBuilder)

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
