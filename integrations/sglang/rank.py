# SPDX-License-Identifier: Apache-2.0
"""Reads from SGLang's configuration which part of which model a scheduler process has."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel, get_serving

from kvlink.errors import ConfigError

from .caches import Rank
from .weight_changes import model_of


def rank_of(manager: Any) -> Rank:
    """Returns the rank of this CommonKVManager's process. Raises ConfigError for what kvlink cannot hand off."""
    _refuse_unsupported(manager)
    config = ModelConfig.from_server_args(manager.server_args)
    role = manager.disaggregation_mode.value
    data_rank = manager.system_dp_rank or manager.attn_dp_rank
    return Rank(
        name=f"sglang-{role}@{manager.local_ip}:{get_serving().port}/dp{data_rank}tp{manager.attn_tp_rank}",
        model=model_of(config, manager.server_args),
        dtype=manager.kv_cache_dtype_str,
        page_tokens=manager.kv_args.page_size,
        total_heads=1 if manager.is_mla_backend else config.get_total_num_kv_heads(),
        tp_rank=manager.attn_tp_rank,
        tp_size=manager.attn_tp_size,
        number=int(data_rank or 0) * manager.attn_tp_size + manager.attn_tp_rank,
        gpu=manager.kv_args.gpu_id if get_device().device.startswith("cuda") else None,
    )


def model_now(manager: Any) -> str:
    """Returns the identity of the model of this CommonKVManager's process, which may have changed."""
    return model_of(ModelConfig.from_server_args(manager.server_args), manager.server_args)


def _refuse_unsupported(manager: Any) -> None:
    wanted = {
        "pipeline parallelism (--pp-size)": get_parallel().pp_size > 1,
        "context parallelism (--attn-cp-size, --dcp-size)": manager.attn_cp_size > 1 or manager.dcp_size > 1,
        "a sharded KV cache (--enable-kv-cache-sharding)": manager.kv_shard_size > 1,
        "a draft model's KV cache (speculative decoding)": manager.kv_args.num_draft_entries > 0,
        "reception in host memory (--disaggregation-decode-host-receive-threshold)": (
            get_disagg().disaggregation_decode_host_receive_threshold < 1
        ),
        "switching roles (--enable-pd-role-switch)": bool(manager.server_args.enable_pd_role_switch),
        # Caches that come back at the same addresses are other memory than what peers and NICs have mapped.
        "the memory saver (--enable-memory-saver)": bool(
            getattr(manager.server_args, "enable_memory_saver", False)
        ),
        "staging buffers (SGLANG_DISAGG_STAGING_BUFFER)": bool(envs.SGLANG_DISAGG_STAGING_BUFFER.get()),
    }
    for what, is_wanted in wanted.items():
        if is_wanted:
            raise ConfigError(
                f"--disaggregation-transfer-backend kvlink does not support {what}; use another backend"
            )
