# SPDX-License-Identifier: Apache-2.0
"""Checks what kvlink needs from transformers, by feature and not by version, and describes the layout of its cache."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from typing import Any

from kvlink.errors import ConfigError
from kvlink.layout import Geometry, KVLayout, Order, Regions, dense

RAN_WITH = "5.19.0 and 5.23.0"
"""The releases of transformers that passed tests/integrations/test_transformers.py."""

_REQUESTS = "transformers.generation.continuous_batching.requests"
_FULL_ATTENTION = "full_attention"

_MANAGER = (
    "add_request batch_processor background_thread_status.can_accept_new_requests _create_batch_processor "
    "distributed_helper.tp_size generation_config is_running model.config.get_text_config num_return_sequences "
    "output_router.deliver output_router.deliver_batch output_router.fail_and_deliver pause _wake_up_loop.set"
)
_PROCESSOR = (
    "prepare_next_batch logit_processor.check_kwargs scheduler.active_requests scheduler.waiting_requests "
    "scheduler.add_waiting_request scheduler.finish_request scheduler.schedule_batch scheduler.starved_requests "
    "scheduler._try_to_meet_safety_margin cache.bytes_per_sector cache.cache_allocators cache.cache_tensor "
    "cache.can_store_request_tokens cache.evict_cached_blocks cache.free_blocks cache.mark_complete_blocks "
    "cache.num_sectors cache.pool.num_free_sectors cache.pool.try_to_free_sectors cache.search_prefix_match"
)
_ALLOCATOR = (
    "block_table bytes_per_block cache_dtype head_dim layer_indices layer_type num_blocks num_key_value_heads "
    "register_cache_tensor tokens_per_page"
)
_STATE = (
    "create_equivalent_initial_request generated_tokens initial_tokens logprobs position_offset "
    "remaining_prefill_tokens status to_generation_output tokens_to_process update_and_check_completion"
)


def request_types() -> tuple[Any, Any]:
    """Returns RequestState and RequestStatus. Raises ConfigError if this release of transformers lacks them."""
    try:
        requests = import_module(_REQUESTS)
        return requests.RequestState, requests.RequestStatus
    except (ImportError, AttributeError) as error:
        raise _unsupported([str(error)]) from None


def check_manager(manager: Any) -> None:
    """Raises ConfigError for a manager that kvlink cannot drive."""
    _require("ContinuousBatchingManager", manager, _MANAGER)
    state, status = request_types()
    _require("RequestState", state(request_id="", initial_tokens=[0]), _STATE)
    _require("RequestStatus", status, "PENDING DECODING FINISHED")
    if manager.distributed_helper.tp_size > 1:
        raise ConfigError(
            "handoffs of tensor-parallel models are not supported; run prefill and decode with TP 1"
        )
    if manager.num_return_sequences != 1:
        raise ConfigError("handoffs need num_return_sequences=1")


def full_attention_allocator(processor: Any) -> Any:
    """Returns the cache's only allocator. Raises ConfigError, naming the attention types that are not supported."""
    _require("ContinuousBatchProcessor", processor, _PROCESSOR)
    allocators: Mapping[str, Any] = processor.cache.cache_allocators
    if list(allocators) != [_FULL_ATTENTION]:
        others = ", ".join(sorted(set(allocators) - {_FULL_ATTENTION})) or "none"
        raise ConfigError(f"handoffs need a model of {_FULL_ATTENTION} only, this one also has {others}")
    _require("FullAttentionCacheAllocator", allocators[_FULL_ATTENTION], _ALLOCATOR)
    return allocators[_FULL_ATTENTION]


def layout_of(allocator: Any, cache_tensor: Any, config: Any, model: str) -> KVLayout:
    """Returns the cache's layout: per block, per layer, K of all tokens, then V of all tokens. Raises ConfigError."""
    dtype = allocator.cache_dtype
    layout = dense(
        Geometry(
            num_layers=len(allocator.layer_indices),
            total_heads=allocator.num_key_value_heads,
            row_bytes=allocator.head_dim * dtype.itemsize,
            # Block ids count from the start of the tensor, which has blocks that are never exported.
            num_blocks=cache_tensor.numel() * cache_tensor.element_size() // allocator.bytes_per_block,
            block_tokens=allocator.tokens_per_page,
            dtype=str(dtype).removeprefix("torch."),
            model=model or config.model_type,
        ),
        Order.CROSS_LAYER_NHD,
        Regions.ONE,
    )
    if layout.block_bytes != allocator.bytes_per_block:
        raise _unsupported(
            [f"a block of K and V ({allocator.bytes_per_block} bytes, not {layout.block_bytes})"]
        )
    return layout


def _require(what: str, found: Any, names: str) -> None:
    missing = [f"{what}.{name}" for name in names.split() if not _has(found, name)]
    if missing:
        raise _unsupported(missing)


def _has(found: Any, dotted: str) -> bool:
    *parents, last = dotted.split(".")
    for name in parents:
        found = getattr(found, name, None)
    return hasattr(found, last)


def _unsupported(missing: list[str]) -> ConfigError:
    return ConfigError(
        f"transformers {version('transformers')} lacks {', '.join(missing)}; kvlink ran with {RAN_WITH}"
    )
