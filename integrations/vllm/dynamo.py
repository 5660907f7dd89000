# SPDX-License-Identifier: Apache-2.0
"""Dynamo's workers carry the handoffs of connectors that they know by name (since its pull request 9414, 2026-05)."""

from __future__ import annotations

import sys

_PROTOCOLS = "dynamo.vllm.kv_connector_protocols"


def make_known() -> None:
    """Has them carry ours as they carry NIXL's: untouched, from prefill's answer. Elsewhere it does nothing."""
    protocols = getattr(sys.modules.get(_PROTOCOLS), "KV_CONNECTOR_PROTOCOLS", {})
    if "NixlConnector" in protocols:
        protocols.setdefault("KVLinkConnector", protocols["NixlConnector"])
