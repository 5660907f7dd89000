# SPDX-License-Identifier: Apache-2.0
"""Refuses at the start what the connector does not serve, by the name of the setting or of the layer."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    is_quantized_kv_cache,
    iter_layer_specs,
)

from kvlink.errors import ConfigError

from .prompt_inputs import check_media

SERVED = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
)
"""Kinds of attention in which block n of a request holds its n-th tokens, for as long as they are read.

Their subclasses are not among them, because vLLM gives their blocks other rules.
"""

_QUANTIZED_ON_CPUS = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
"""The last is DeepSeek-V4's, which its model chooses by itself."""


def check_supported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError for the first part of the configuration that is not supported."""
    _check_parallelism(vllm_config.parallel_config)
    _check_sleep(vllm_config.model_config)
    _check_outputs(vllm_config)
    check_media(vllm_config)
    _check_buffer(vllm_config.kv_transfer_config)
    _check_cache_dtype(vllm_config)
    _check_drafts(vllm_config)
    for group in kv_cache_config.kv_cache_groups:
        _check_group(group)


def check_bidirectional(vllm_config: Any, kv_cache_config: Any) -> None:
    """Raises ConfigError if this server cannot offer its answers to later turns, or pull those of others."""
    transfer, groups = vllm_config.kv_transfer_config, kv_cache_config.kv_cache_groups
    specs = [spec for group in groups for spec in iter_layer_specs(group.kv_cache_spec)]
    if not vllm_config.cache_config.enable_prefix_caching:
        why = "it offers blocks of the prefix cache; remove --no-enable-prefix-caching"
    elif transfer.kv_role != "kv_both":
        why = 'a server both offers and pulls; set "kv_role": "kv_both"'
    elif transfer.kv_load_failure_policy != "recompute":
        why = 'answers are evicted all the time; set "kv_load_failure_policy": "recompute"'
    elif len(groups) != 1 or not all(isinstance(spec, FullAttentionSpec) for spec in specs):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs}))
        why = f"it serves models with full attention in every layer, and not {len(groups)} cache groups of {kinds}"
    elif getattr(kv_cache_config, "needs_kv_cache_zeroing", False):
        why = "vLLM clears blocks of this model before the connector can end their offers"
    else:
        return
    raise ConfigError(f"KVLinkConnector cannot be bidirectional here: {why}")


def _check_parallelism(parallel: Any) -> None:
    """Raises ConfigError for parallelism that is not supported."""
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ConfigError(
                f"KVLinkConnector does not serve {name}={getattr(parallel, name)} yet; set it to 1"
            )


def _check_sleep(model_config: Any) -> None:
    """Raises ConfigError if a vLLM that sleeps discards the memory of its caches while peers may read it."""
    if getattr(model_config, "enable_sleep_mode", False) and not hasattr(
        KVConnectorBase_V1, "unregister_kv_caches"
    ):
        raise ConfigError(
            "KVLinkConnector does not serve --enable-sleep-mode with this vLLM, which replaces the caches' memory "
            "without telling connectors, so that peers would read the old memory; remove the option, or use /pause"
        )


def _check_outputs(vllm_config: Any) -> None:
    """Raises ConfigError for outputs that the prefill server would have to return besides the cache."""
    if getattr(vllm_config.aux_output_config, "enable_return_routed_experts", False):
        raise ConfigError(
            "KVLinkConnector does not carry the experts that prefill chose; remove --enable-return-routed-experts"
        )


def _check_buffer(kv_transfer_config: Any) -> None:
    """Raises ConfigError for a buffer that would be ignored: caches are read and written where they are."""
    wanted, device = getattr(kv_transfer_config, "kv_buffer_device", None), current_platform.device_type
    if wanted not in (None, device):
        raise ConfigError(
            f'KVLinkConnector does not serve "kv_buffer_device": "{wanted}" on {device}: it reads and writes the '
            "caches in place, and stages in host memory by itself where a transport needs it; remove the setting"
        )


def _check_cache_dtype(vllm_config: Any) -> None:
    """Raises ConfigError for quantized caches that vLLM's backend for CPUs does not list, although servers start."""
    cache_dtype = vllm_config.cache_config.cache_dtype
    if (
        current_platform.is_cpu()
        and is_quantized_kv_cache(cache_dtype)
        and cache_dtype not in _QUANTIZED_ON_CPUS
    ):
        raise ConfigError(
            f"KVLinkConnector does not serve --kv-cache-dtype {cache_dtype} on a CPU, where it gave other tokens; "
            "use fp8 or auto"
        )


def _check_drafts(vllm_config: Any) -> None:
    """Raises ConfigError where vLLM checks drafts without the tokens before them, and so gives other tokens.

    Its reference backend for MLA computes several tokens as a whole prompt. vLLM turns chunked prefill off with it.
    """
    several_at_once = vllm_config.scheduler_config.enable_chunked_prefill
    if (
        current_platform.is_cpu()
        and vllm_config.speculative_config is not None
        and vllm_config.model_config.use_mla
        and not several_at_once
    ):
        raise ConfigError(
            "KVLinkConnector does not serve --speculative-config with vLLM's backend CPU_MLA, which checks drafts "
            "without the tokens before them and gives other tokens than without drafts; remove --speculative-config"
        )


def specs_of(group: Any) -> dict[str, Any]:
    """Returns the spec of each layer of one of vLLM's cache groups."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return dict(specs or dict.fromkeys(group.layer_names, group.kv_cache_spec))


def _check_group(group: Any) -> None:
    """Raises ConfigError for a cache group that is not supported."""
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        raise ConfigError(
            f"KVLinkConnector does not serve HiSparse, which keeps blocks of {group.layer_names[0]} and others in a "
            "host pool of their own; turn it off"
        )
    for layer, spec in specs_of(group).items():
        if isinstance(spec, MambaSpec):
            _check_states(spec, layer)
        elif type(spec) in SERVED:
            _check_attention(spec, layer)
        elif type(spec) is not CircularBufferSpec:
            raise ConfigError(
                f"KVLinkConnector does not serve layers with {type(spec).__name__} ({layer} and others): it serves "
                "full, sliding-window and chunked attention, MLA, compressed caches with what is not compressed yet, "
                "and Mamba's states"
            )


def _check_attention(spec: Any, layer: str) -> None:
    """Raises ConfigError unless blocks consist of whole rows, and stay as long as their tokens are read."""
    if spec.tokens_per_state < 1 or spec.block_size % spec.tokens_per_state:
        raise ConfigError(
            f"KVLinkConnector does not serve caches with {spec.tokens_per_state} tokens a row in blocks of "
            f"{spec.block_size} ({layer} and others): it moves whole rows, each of one or several tokens"
        )
    if getattr(spec, "bounded_replay", False):
        raise ConfigError(
            f"KVLinkConnector does not serve --swa-bounded-replay ({layer} and others), with which prefixes that "
            "decode has cached lack their window; pass --no-swa-bounded-replay"
        )


def _check_states(spec: MambaSpec, layer: str) -> None:
    """Raises ConfigError unless the state after a request's last computed token is the last block of its group."""
    if spec.mamba_cache_mode not in ("none", "align"):
        raise ConfigError(
            f"KVLinkConnector does not serve --mamba-cache-mode {spec.mamba_cache_mode} ({layer} and others have "
            "states): pass --mamba-cache-mode align, or --no-enable-prefix-caching"
        )
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type))
    if spec.mamba_cache_mode == "align" and current_platform.is_cpu() and kind != "GDN_ATTN":
        raise ConfigError(
            f"vLLM's engine ends at the first prompt beyond a block where it caches prefixes of {kind} on a CPU "
            f"({layer} and others): pass --no-enable-prefix-caching"
        )
    if spec.num_speculative_blocks:
        raise ConfigError(
            f"KVLinkConnector does not serve speculative decoding with states yet ({layer} and others have them): "
            "remove --speculative-config"
        )
