# SPDX-License-Identifier: Apache-2.0
"""Registers the connector with Dynamo, whose workers carry the handoffs of connectors that they know by name.

That holds since its pull request 9414, 2026-05.
"""

from __future__ import annotations

import sys

_PROTOCOLS = "dynamo.vllm.kv_connector_protocols"


def make_known() -> None:
    """Makes Dynamo carry this connector's handoffs like NIXL's: unchanged, from prefill's answer, if it is there."""
    protocols = getattr(sys.modules.get(_PROTOCOLS), "KV_CONNECTOR_PROTOCOLS", {})
    if "NixlConnector" in protocols:
        protocols.setdefault("KVLinkConnector", protocols["NixlConnector"])
