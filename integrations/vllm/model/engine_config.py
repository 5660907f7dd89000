# SPDX-License-Identifier: Apache-2.0
"""Reads what the connector needs from vLLM's configuration."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    is_quantized_kv_cache,
    iter_layer_specs,
)

from kvlink.transfer.device_work import DeviceWork

from ...models import model_text, weights_text
from ..settings import Settings
from .caches import LayerGroup, Rank, page_format
from .states import RING, States
from .unsupported import SERVED, specs_of
from .windows import Window


def rank_of(vllm_config: Any, role: KVConnectorRole) -> Rank:
    """Returns the rank of this worker; in the scheduler's process any rank of the server."""
    size = vllm_config.parallel_config.tensor_parallel_size
    model = vllm_config.model_config
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    if role is KVConnectorRole.SCHEDULER:
        return Rank(0, size, heads)
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return Rank(get_tensor_model_parallel_rank(), size, heads)


def drain_s(vllm_config: Any) -> float:
    """Returns how long a server that ends may wait for its readers: 0 unless it was started with --shutdown-timeout.

    vLLM ends a worker's process after VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS, and closing takes a part of the last one.
    """
    return max(envs.VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS - 1.0, 0.0) if vllm_config.shutdown_timeout else 0.0


def number_of(vllm_config: Any, rank: Rank) -> int:
    """Returns the rank among all workers of the server, data-parallel ranks included, from 0 on."""
    return int(vllm_config.parallel_config.data_parallel_index) * rank.tp_size + rank.tp_rank


def model_of(vllm_config: Any, same: str, weights: str = "", groups: Sequence[Any] = ()) -> str:
    """Returns the identity of the model, see `model_text`. `weights` stands for weights that changed in memory."""
    model, config = vllm_config.model_config, vllm_config.model_config.hf_text_config
    load_format = getattr(vllm_config.load_config, "load_format", "auto")
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return model_text(
        getattr(config, "architectures", None),
        config,
        name=str(model.model),
        revision=str(model.revision or ""),
        load_format=str(getattr(load_format, "value", load_format)),
        weights=weights,
        same=same,
        quantization=str(model.quantization or ""),
        dtype=str(model.dtype).removeprefix("torch."),
        draft=None if draft is None else weights_text(str(draft.model), str(draft.revision or "")),
        groups="+".join(str(len(group.layer_names)) for group in groups),
    )


def page_format_of(vllm_config: Any, kv_cache_config: Any, device: str) -> str:
    """Returns what two servers must agree on to read each other's pages, beside dtype and shape."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    fp8 = (
        str(current_platform.fp8_dtype()).removeprefix("torch.") if is_quantized_kv_cache(cache_dtype) else ""
    )
    kernels: set[str] = set()
    if device == "cpu" and not vllm_config.model_config.use_mla:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        kernels = {
            _get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype)
            for group in kv_cache_config.transfer_groups
            for spec in iter_layer_specs(group.kv_cache_spec)
            if isinstance(spec, SERVED)
        }
    return " ".join(page_format(cache_dtype, fp8, kernels))


def layer_group_of(group: Any) -> LayerGroup:
    """Returns what the pool needs to know about one of vLLM's cache groups."""
    attention = {name: spec for name, spec in specs_of(group).items() if isinstance(spec, AttentionSpec)}
    return LayerGroup(
        tuple(group.layer_names),
        states_of(group),
        row_tokens={name: int(spec.tokens_per_state) for name, spec in attention.items()},
        replicated=frozenset(
            name for name, spec in attention.items() if getattr(spec, "max_tp_shards", None) == 1
        ),
        paged=frozenset(name for name, spec in attention.items() if _is_paged(spec)),
    )


def _is_paged(spec: AttentionSpec) -> bool:
    """Returns whether a page may have the scales of all its tokens behind the values of all, as indexers do.

    A row of vLLM's view of such a page has bytes of other tokens. So may packed formats (`state_content_bytes`):
    DeepSeek-V4's, NVFP4. A cache with one scale for all tokens has rows.
    """
    mode = str(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))
    packs = not spec.dtype.is_floating_point and mode != "FP8_PER_TENSOR"
    return packs or getattr(spec, "state_content_bytes", None) is not None


def states_of(group: Any) -> States | None:
    """Returns the states of the group's layers, or None for layers whose blocks hold the tokens of a request.

    A circular buffer is a state: one block of a request has its last tokens, which are not compressed yet.
    """
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    if isinstance(spec, CircularBufferSpec):
        dtype = str(spec.dtype).removeprefix("torch.")
        page = (spec.unpadded_page_size_bytes // spec.dtype.itemsize,)
        return States(RING, (page,), (dtype,), (spec.dtype.itemsize,), replicated=True)
    if not isinstance(spec, MambaSpec):
        return None
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

    return States(
        kind=str(getattr(spec.mamba_type, "name", spec.mamba_type)),
        shapes=tuple(tuple(shape) for shape in spec.shapes),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in spec.dtypes),
        item_bytes=tuple(dtype.itemsize for dtype in spec.dtypes),
        columns_first=bool(is_conv_state_dim_first()),
        replicated=bool(getattr(spec, "tp_replicated", False)),
    )


def back_off_of(vllm_config: Any) -> int:
    """Returns how many of a prompt's last tokens decode computes itself, for drafts by several MTP modules.

    At prefill, their caches would have drafts that nobody has verified in place of the tokens that follow.
    """
    return max(int(getattr(vllm_config, "num_prefill_lookahead_tokens", 0)) - 1, 0)


def grows(group: Any) -> bool:
    """Returns whether a request keeps this group's blocks until it ends, because the group has no window."""
    return all(isinstance(spec, FullAttentionSpec) for spec in iter_layer_specs(group.kv_cache_spec))


def window_of(group: Any) -> Window | None:
    """Returns the window of the group's layers, or None if they read all tokens. The layers of a group share it."""
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    if isinstance(spec, SlidingWindowSpec):
        # Blocks of a few more tokens are kept for draft models that compute them again.
        retained = int(getattr(spec, "extra_retained_tokens", 0))
        return Window(spec.sliding_window + retained, spec.block_size)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Window(spec.attention_chunk_size, spec.block_size, chunked=True)
    return None


def at_this_host(settings: Settings) -> Settings:
    """Sets the host address that peers on other hosts use. vLLM's setting applies if kvlink's is not given."""
    host = os.environ.get("VLLM_HOST_IP", "")
    if not host or os.environ.get("KVLINK_HOST") or settings.worker.host != "127.0.0.1":
        return settings
    return replace(settings, worker=replace(settings.worker, host=host))


def launched(caches: Mapping[str, torch.Tensor]) -> DeviceWork | None:
    """Returns the kernels that are launched by now and may use these caches. None on a CPU, where they have run.

    With asynchronous scheduling, the last step may still write blocks that its requests have released.
    """
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return None
    event = torch.Event(device)
    event.record()
    return event
