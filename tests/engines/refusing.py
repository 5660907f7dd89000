# SPDX-License-Identifier: Apache-2.0
"""Prints the connector's refusals at vLLM's start, without a model: `refusing.py MODEL`.

Runs in vLLM's environment. Prints one JSON object: what was configured, and what the connector said to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from stepping import caches_of, config_of
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec, SlidingWindowMLASpec

from kvlink.errors import ConfigError
from kvlink.integrations.vllm.connector import KVLinkConnector


def _in_two_stages(config: Any, caches: Any) -> None:
    config.parallel_config.pipeline_parallel_size = 2


def _contexts_shared(config: Any, caches: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2


def _that_sleeps(config: Any, caches: Any) -> None:
    config.model_config.enable_sleep_mode = True


def _with_routed_experts(config: Any, caches: Any) -> None:
    config.aux_output_config.enable_return_routed_experts = True


def _with_states(config: Any, caches: Any, **more: Any) -> None:
    """A layer of Mamba-2 beside attention."""
    states = MambaSpec(
        block_size=16, shapes=((8, 3), (2, 4, 5)), dtypes=(torch.float32, torch.float32), **more
    )
    caches.kv_cache_groups.append(KVCacheGroupSpec(["mamba"], states))


def _with_states_of_all_blocks(config: Any, caches: Any) -> None:
    _with_states(config, caches, mamba_cache_mode="all")


def _with_states_cached(config: Any, caches: Any) -> None:
    _with_states(config, caches, mamba_cache_mode="align")


def _with_states_and_drafts(config: Any, caches: Any) -> None:
    _with_states(config, caches, num_speculative_blocks=2)


def _with_numbered_images(config: Any, caches: Any) -> None:
    config.model_config.multimodal_config = SimpleNamespace(mm_processor_cache_gb=0)
    config.cache_config.enable_prefix_caching = False


def _with_a_buffer(config: Any, caches: Any) -> None:
    config.kv_transfer_config.kv_buffer_device = "cuda"


def _with_a_host_pool(config: Any, caches: Any) -> None:
    caches.kv_cache_groups[0].host_resident = True


def _with_a_replay(config: Any, caches: Any) -> None:
    window = SlidingWindowMLASpec(
        block_size=16,
        num_kv_heads=1,
        head_size=64,
        dtype=torch.bfloat16,
        sliding_window=32,
        bounded_replay=True,
    )
    caches.kv_cache_groups.append(KVCacheGroupSpec(["window"], window))


def _with_scales_of_tokens(config: Any, caches: Any) -> None:
    config.cache_config.cache_dtype = "int8_per_token_head"


def _with_mla_and_drafts(config: Any, caches: Any) -> None:
    """As vLLM configures its reference backend for MLA on a CPU."""
    config.model_config = SimpleNamespace(use_mla=True, multimodal_config=None)
    config.speculative_config = SimpleNamespace(method="ngram", num_speculative_tokens=1)
    config.scheduler_config.enable_chunked_prefill = False


def _bidirectional(config: Any, caches: Any) -> None:
    config.kv_transfer_config.kv_connector_extra_config["bidirectional"] = True


def _bidirectional_without_prefix_caching(config: Any, caches: Any) -> None:
    _bidirectional(config, caches)
    config.cache_config.enable_prefix_caching = False


def _bidirectional_producer(config: Any, caches: Any) -> None:
    _bidirectional(config, caches)
    config.kv_transfer_config.kv_role = "kv_producer"


def _bidirectional_that_fails(config: Any, caches: Any) -> None:
    _bidirectional(config, caches)
    config.kv_transfer_config.kv_load_failure_policy = "fail"


def _bidirectional_with_windows(config: Any, caches: Any) -> None:
    _bidirectional(config, caches)
    caches.kv_cache_groups += caches_of(windows=True).kv_cache_groups[1:]


def _bidirectional_with_states(config: Any, caches: Any) -> None:
    _bidirectional(config, caches)
    _with_states(config, caches)


def _as_it_is(config: Any, caches: Any) -> None:
    pass


def refusal_of(model: str, change: Callable[[Any, Any], None]) -> str:
    """Empty: it was taken."""
    config, caches = config_of(model, "127.0.0.1:1", 6), caches_of(windows=False)
    change(config, caches)
    try:
        KVLinkConnector(config, KVConnectorRole.SCHEDULER, caches).shutdown()
    except ConfigError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    changes = (
        _as_it_is,
        _in_two_stages,
        _contexts_shared,
        _that_sleeps,
        _with_routed_experts,
        _with_states_of_all_blocks,
        _with_states_cached,
        _with_states_and_drafts,
        _with_numbered_images,
        _with_a_buffer,
        _with_a_host_pool,
        _with_a_replay,
        _with_scales_of_tokens,
        _with_mla_and_drafts,
        _bidirectional,
        _bidirectional_without_prefix_caching,
        _bidirectional_producer,
        _bidirectional_that_fails,
        _bidirectional_with_windows,
        _bidirectional_with_states,
    )
    print(json.dumps({change.__name__.strip("_"): refusal_of(sys.argv[1], change) for change in changes}))
