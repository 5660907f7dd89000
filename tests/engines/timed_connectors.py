# SPDX-License-Identifier: Apache-2.0
"""The connectors by their own names, for vLLM to load by `kv_connector_module_path`: each call of a step is timed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from call_times import CALLS, FILE_SETTING, CallTimes
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl as vllm_nixl

from kvlink.integrations.vllm import connector as kvlink_vllm


class _Timed:
    """Before the connector itself among the bases."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.WORKER:
            _time_calls(self, CallTimes(Path(os.environ[FILE_SETTING])))


class KVLinkConnector(_Timed, kvlink_vllm.KVLinkConnector):  # type: ignore[misc]
    """kvlink's."""


class NixlConnector(_Timed, vllm_nixl.NixlConnector):  # type: ignore[misc]
    """vLLM's."""


def _time_calls(connector: Any, times: CallTimes) -> None:
    for name in CALLS:
        setattr(connector, name, _timed(name, getattr(connector, name), times))


def _timed(name: str, call: Any, times: CallTimes) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter_ns()
        result = call(*args, **kwargs)
        times.took(name, start, time.perf_counter_ns())
        return result

    return timed
