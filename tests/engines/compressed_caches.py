# SPDX-License-Identifier: Apache-2.0
"""vLLM's own caches of DeepSeek-V4, without a model: its specs, groups, packed memory and views, handed off by kvlink.

Runs in vLLM's environment. Prints one JSON object: how the groups are described, the outcome of a handoff by rows and
one by blocks, and which of vLLM's specs are served.
"""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import vllm.v1.kv_cache_interface as interface
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import CircularBufferSpec, MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_config_from_groups, get_kv_cache_groups
except ImportError:  # vLLM 0.32
    from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups

from kvlink import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.integrations.vllm.model import caches
from kvlink.integrations.vllm.model.caches import Caches, Rank, caches_of
from kvlink.integrations.vllm.model.engine_config import layer_group_of, window_of
from kvlink.integrations.vllm.model.unsupported import _check_group
from kvlink.integrations.vllm.model.windows import needed_from
from kvlink.integrations.vllm.prefill.lease_slots import SlotGroups
from kvlink.integrations.vllm.wire.handoff import Handoff, expanded, prompt_digest
from kvlink.integrations.vllm.wire.step_commands import HandedOff, Load, StepCommands
from kvlink.integrations.vllm.worker import WorkerSide

RATIOS = [0, 0, 4, 128, 4, 128]
NUM_BLOCKS, PROMPT = 220, 301
FP8 = {
    "cache_dtype_str": "fp8_ds_mla",
    "alignment": 576,
    "model_version": "deepseek_v4",
    "state_content_bytes": 584,
}


def specs() -> dict[str, Any]:
    """As models/deepseek_v4 makes them for these ratios: attention.py, compressor.py and sparse_swa.py."""
    found: dict[str, Any] = {}
    one = {"num_kv_heads": 1, "max_tp_shards": 1}
    for layer, ratio in enumerate(RATIOS):
        found[f"{layer}.swa"] = SlidingWindowMLASpec(
            block_size=64, head_size=512, dtype=torch.uint8, sliding_window=128, **one, **FP8
        )
        if not ratio:
            continue
        sparse = {"block_size": 256, "dtype": torch.uint8, "tokens_per_state": ratio, **one}
        found[f"{layer}.sparse"] = MLAAttentionSpec(head_size=512, **sparse, **FP8)
        state = {"dtype": torch.float32, "alignment": 576, **one}
        overlap = 1 + (ratio == 4)
        size, window = (4 if ratio == 4 else 8), overlap * ratio
        found[f"{layer}.state"] = SlidingWindowMLASpec(
            block_size=size, head_size=2 * overlap * 512, sliding_window=window, **state
        )
        if ratio == 4:
            found[f"{layer}.indexer"] = MLAAttentionSpec(head_size=132, alignment=576, **sparse)
            found[f"{layer}.indexer.state"] = SlidingWindowMLASpec(
                block_size=size, head_size=2 * overlap * 128, sliding_window=window, **state
            )
    return found


def config() -> Any:
    """Returns the part of a server's configuration that vLLM plans its caches by."""
    cache = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: KVCacheLayout.BLHNC,
        prefix_cache_retention_interval=None,
        num_gpu_blocks_override=NUM_BLOCKS,
    )
    return SimpleNamespace(
        cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
    )


class Side:
    """One rank with vLLM's memory."""

    def __init__(self, name: str, groups: list[Any]) -> None:
        self.groups = groups
        made = get_kv_cache_config_from_groups(config(), groups, 1 << 30)
        self.tensors = allocate_kv_cache(made, torch.device("cpu"), KVCacheLayout.BLHNC)
        for tensor in self.tensors.values():
            tensor.view(torch.uint8).random_(256)
        described = [layer_group_of(group) for group in groups]
        self.caches: Caches = caches_of(
            self.tensors, described, made.num_blocks, Rank(0, 1, 1), "deepseek-v4"
        )
        self.worker = WorkerSide(name, self.caches, WorkerConfig(transports="loopback", lease_slots=16))

    def pieces(self, name: str, blocks: array[int], spec: Any) -> list[tuple[int, torch.Tensor]]:
        """A prompt's rows, or its pages if scales are behind all values, each with the end of its tokens.

        An empty one where it has no block.
        """
        tensor, size = self.tensors[name].view(torch.uint8), spec.block_size // spec.tokens_per_state
        if spec.dtype is torch.uint8:
            return [
                ((index + 1) * spec.block_size, tensor[block] if block else torch.empty(0))
                for index, block in enumerate(blocks)
            ]
        return [
            (
                (row + 1) * spec.tokens_per_state,
                tensor[blocks[row // size], 0, row % size] if blocks[row // size] else torch.empty(0),
            )
            for row in range(PROMPT // spec.tokens_per_state)
        ]


def handed_off(groups: list[Any]) -> list[str]:
    """Returns the layers that decode has other rows of than prefill, among those that it reads."""
    prefill, decode = Side("p", groups), Side("d", groups)
    windows = [window_of(group) for group in groups]
    next_id, blocks = 1, ([], [])
    for group, window in zip(groups, windows, strict=True):
        size = group.kv_cache_spec.block_size
        gaps = window.kept_from(PROMPT) // size if window else 0
        count = -(-PROMPT // size) - gaps
        for end in (0, 1):
            ids = range(next_id, next_id + count)
            blocks[end].append(array("I", [0] * gaps + list(ids if end else reversed(ids))))
        next_id += count
    seats = SlotGroups(16, 8).take()
    prefill.worker.carry_out(StepCommands(granted={"r": seats}, handed_off={"r": HandedOff(1, 30.0)}))
    owner, sizes = prefill.worker.rank_info.owner, prefill.worker.rank_info.block_tokens
    theirs = tuple(map(expanded, blocks[0], prefill.worker.rank_info.kernel_blocks))
    handoff = Handoff("r", (owner,), seats, theirs, sizes, PROMPT, prompt_digest([1]), 30.0)
    reads = needed_from(windows, PROMPT, PROMPT)
    decode.worker.carry_out(
        StepCommands(loads=[Load("x", handoff, tuple(blocks[1]), 0, PROMPT, needed_from=reads)])
    )
    failed: set[str] = set()
    received: set[str] = set()
    while "x" not in received:
        results = decode.worker.results()
        received |= results.received
        failed |= results.failed
    wrong = ["load"] if failed else []
    for index, group in enumerate(groups):
        for name, spec in group.kv_cache_spec.kv_cache_specs.items():
            pairs = zip(
                prefill.pieces(name, blocks[0][index], spec),
                decode.pieces(name, blocks[1][index], spec),
                strict=True,
            )
            if not all(torch.equal(one, other) for (end, one), (_, other) in pairs if end > reads[index]):
                wrong.append(name)
    for side in (decode, prefill):
        side.worker.close()
    return wrong


def refusal_of(spec: Any) -> str:
    """Empty: it is served."""
    try:
        _check_group(SimpleNamespace(layer_names=["layer"], kv_cache_spec=spec))
    except ConfigError as error:
        return str(error)
    return ""


def kinds() -> dict[str, str]:
    """Every kind of attention that vLLM defines, with what kvlink says to it."""
    more = {"RSWASpec": {"rswa_window": 128}, "ChunkedLocalAttentionSpec": {"attention_chunk_size": 128}}
    found = {}
    for name, kind in vars(interface).items():
        if not isinstance(kind, type) or not issubclass(kind, interface.AttentionSpec):
            continue
        given = more.get(name, {}) | (
            {"sliding_window": 128} if issubclass(kind, interface.SlidingWindowSpec) else {}
        )
        spec = kind(block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, **given)
        found[name] = refusal_of(spec)
    return found


def main() -> None:
    register_all_kvcache_specs(config())
    groups = get_kv_cache_groups(config(), specs())
    ring = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=128, head_size_v=0, dtype=torch.float32)
    described = layer_group_of(SimpleNamespace(layer_names=["ring"], kv_cache_spec=ring))
    by_blocks = handed_off(groups)
    with patch.object(caches, "_interleaves", lambda tensor: False):
        by_rows = handed_off(groups)
        side = Side("described", groups)
        units = [[unit.tokens for unit in group.units] for group in side.caches.groups]
        tokens = [group.block_tokens for group in side.caches.groups]
        side.worker.close()
    print(
        json.dumps(
            {
                "block_tokens": tokens,
                "units": units,
                "by_blocks": by_blocks,
                "by_rows": by_rows,
                "ring": described.states.num_bytes() if described.states else 0,
                "kinds": kinds(),
                "refused": [
                    refusal_of(group.kv_cache_spec) for group in groups if refusal_of(group.kv_cache_spec)
                ],
            }
        )
    )


if __name__ == "__main__":
    main()
