# SPDX-License-Identifier: Apache-2.0
"""Stands in for vLLM's specs of caches, and for what the connector's checks ask of a server's configuration.

The fields are those of `v1/kv_cache_interface.py` in vLLM 0.32 and 0.33, which tests/engines/test_vllm_source.py says;
the lane `engines` configures the same with vLLM's own.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

MODULES = ("unsupported", "engine_config")


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    block_size: int = 256
    num_kv_heads: int = 1
    head_size: int = 512
    dtype: torch.dtype = torch.uint8
    max_tp_shards: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int | Fraction = 1
    kv_quant_mode: Any = None

    @property
    def unpadded_page_size_bytes(self) -> int:
        rows = self.block_size // self.tokens_per_state
        return int(
            self.num_kv_heads * rows * (self.state_content_bytes or self.head_size * self.dtype.itemsize)
        )


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec): ...


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec): ...


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec): ...


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    rswa_window: int = 128


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    sink_len: int = 128


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    sliding_window: int = 128
    extra_retained_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    bounded_replay: bool = False


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    attention_chunk_size: int = 128


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(AttentionSpec): ...


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec): ...


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec): ...


@dataclass(frozen=True)
class HiSparseHotSpec:
    block_size: int = 256


@dataclass(frozen=True)
class HiSparseResidentSpec:
    block_size: int = 256


@dataclass(frozen=True, kw_only=True)
class MambaSpec:
    block_size: int = 256
    shapes: tuple[tuple[int, ...], ...] = ((8, 3), (2, 4, 5))
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float32)
    mamba_type: str = "GDN_ATTN"
    mamba_cache_mode: str = "none"
    num_speculative_blocks: int = 0
    tp_replicated: bool = False

    def num_bytes(self) -> int:
        return sum(prod(shape) * 4 for shape in self.shapes)


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]


@dataclass
class Group:
    """vLLM's KVCacheGroupSpec."""

    layer_names: list[str]
    kv_cache_spec: Any
    host_resident: bool = False
    enable_kv_transfer: bool = True


def together(**specs: Any) -> Group:
    """A group whose layers have specs of their own."""
    return Group(list(specs), UniformTypeKVCacheSpecs(specs))


@dataclass
class Caches:
    """vLLM's KVCacheConfig."""

    kv_cache_groups: list[Group] = field(default_factory=list)

    @property
    def transfer_groups(self) -> list[Group]:
        return [group for group in self.kv_cache_groups if group.enable_kv_transfer]


def config(**changes: Any) -> Any:
    """Returns the part of a plain server's configuration that check_supported reads."""
    given: dict[str, Any] = {
        "parallel_config": SimpleNamespace(),
        "model_config": SimpleNamespace(multimodal_config=None, use_mla=False),
        "aux_output_config": SimpleNamespace(),
        "kv_transfer_config": SimpleNamespace(kv_buffer_device="cuda"),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "speculative_config": None,
        "scheduler_config": SimpleNamespace(enable_chunked_prefill=True),
    }
    return SimpleNamespace(**given | changes)


def _module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


def interface() -> dict[str, Any]:
    """The names of vLLM's module kv_cache_interface."""
    specs = {name: made for name, made in globals().items() if name.endswith("Spec")}
    return specs | {
        "is_quantized_kv_cache": lambda name: name != "auto",
        "iter_layer_specs": lambda spec: getattr(spec, "kv_cache_specs", {"": spec}).values(),
    }


def platform(device: str = "cuda") -> Any:
    """vLLM's current_platform."""
    return SimpleNamespace(is_cpu=lambda: device == "cpu", device_type=device)


@contextmanager
def stand_in(device: str = "cuda") -> Iterator[tuple[Any, Any]]:
    """Yields the connector's modules `unsupported` and `engine_config` over these specs."""
    base = "vllm.distributed.kv_transfer.kv_connector.v1.base"
    fakes = {
        "vllm": _module("vllm", envs=SimpleNamespace()),
        base: _module(base, KVConnectorBase_V1=object, KVConnectorRole=SimpleNamespace(SCHEDULER=0)),
        "vllm.platforms": _module("vllm.platforms", current_platform=platform(device)),
        "vllm.v1.kv_cache_interface": _module("kv_cache_interface", **interface()),
        "vllm.model_executor.layers.mamba.mamba_utils": _module(
            "mamba_utils", is_conv_state_dim_first=lambda: False
        ),
    }
    package = "kvlink.integrations.vllm.model"
    ours = [f"{package}.{name}" for name in MODULES]
    before = {name: sys.modules.pop(name, None) for name in (*fakes, *ours)}
    sys.modules.update(fakes)
    try:
        unsupported, engine_config = map(importlib.import_module, ours)
        yield unsupported, engine_config
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
