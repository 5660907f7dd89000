# SPDX-License-Identifier: Apache-2.0
"""kvlink's connector for vLLM to load by `kv_connector_module_path`, in processes that do not spin while they wait.

vLLM's processes spin for a second after each message from each other. Where two servers share the CPUs of one machine,
that takes time from the other one, which two hosts would not.
"""

from __future__ import annotations

import time

from vllm.distributed.device_communicators import shm_broadcast

from kvlink.integrations.vllm.connector import KVLinkConnector

__all__ = ["KVLinkConnector"]

_REST_S = 200e-6


def _rest() -> None:
    time.sleep(_REST_S)


shm_broadcast.sched_yield = _rest
