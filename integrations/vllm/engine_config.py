# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's configuration the connector depends on, and what of it is refused at the start."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
    iter_layer_specs,
)

from kvlink.errors import ConfigError

from .caches import Rank
from .settings import Settings
from .windows import Window

_SERVED = (FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec)
"""Block n of a request holds its n-th tokens, for as long as they are read."""


def rank_of(vllm_config: Any, role: KVConnectorRole) -> Rank:
    """This worker; in the scheduler's process any."""
    size = vllm_config.parallel_config.tensor_parallel_size
    model = vllm_config.model_config
    heads = 1 if model.use_mla else model.get_total_num_kv_heads()
    if role is KVConnectorRole.SCHEDULER:
        return Rank(0, size, heads)
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    return Rank(get_tensor_model_parallel_rank(), size, heads)


def number_of(vllm_config: Any, rank: Rank) -> int:
    """This worker's place among all of the server, data-parallel ranks included, from 0 on."""
    return int(vllm_config.parallel_config.data_parallel_index) * rank.tp_size + rank.tp_rank


def check_parallelism(parallel: Any) -> None:
    """Raises ConfigError."""
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"KVLinkConnector does not serve {name}={getattr(parallel, name)} yet; set it to 1"
            )


def check_outputs(vllm_config: Any) -> None:
    """What the prefill server would have to return beside the cache. Raises ConfigError."""
    if getattr(vllm_config.aux_output_config, "enable_return_routed_experts", False):
        raise ConfigError(
            "KVLinkConnector does not carry the experts that prefill chose; remove --enable-return-routed-experts"
        )


def check_groups(kv_cache_config: Any) -> None:
    """Raises ConfigError."""
    for group in kv_cache_config.transfer_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            if not isinstance(spec, _SERVED) or spec.tokens_per_state != 1:
                raise ConfigError(
                    f"KVLinkConnector does not serve layers with {type(spec).__name__} yet ({group.layer_names[0]} "
                    "and others): only attention whose cache has one row a token"
                )


def grows(group: Any) -> bool:
    """Whether a request keeps this group's blocks until it ends: no window leaves any behind."""
    return all(isinstance(spec, FullAttentionSpec) for spec in iter_layer_specs(group.kv_cache_spec))


def window_of(group: Any) -> Window | None:
    """What the group's layers read; None: all tokens. The layers of one group have one window."""
    spec = next(iter(iter_layer_specs(group.kv_cache_spec)))
    if isinstance(spec, SlidingWindowSpec):
        # Blocks of a few tokens more are kept for draft models that compute them again.
        retained = int(getattr(spec, "extra_retained_tokens", 0))
        return Window(spec.sliding_window + retained, spec.block_size)
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return Window(spec.attention_chunk_size, spec.block_size, chunked=True)
    return None


def at_this_host(settings: Settings) -> Settings:
    """Peers on other hosts need an address of this one; vLLM's own setting serves where kvlink's is not given."""
    host = os.environ.get("VLLM_HOST_IP", "")
    if not host or os.environ.get("KVLINK_HOST") or settings.worker.host != "127.0.0.1":
        return settings
    return replace(settings, worker=replace(settings.worker, host=host))


def when_launched_has_run(caches: Mapping[str, torch.Tensor]) -> Callable[[], bool]:
    """Says whether the kernels have run that write these caches and are launched by now. On a CPU they have."""
    device = next(iter(caches.values())).device
    if device.type == "cpu":
        return lambda: True
    event = torch.Event(device)
    event.record()
    return event.query
