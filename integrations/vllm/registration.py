# SPDX-License-Identifier: Apache-2.0
"""Registers the connectors by name, with vLLM and with Dynamo.

Dynamo's workers carry the handoffs of connectors that they know by name, since its pull request 9414, 2026-05.
"""

from __future__ import annotations

import sys

_PROTOCOLS = "dynamo.vllm.kv_connector_protocols"


def make_known() -> None:
    """Makes Dynamo carry this connector's handoffs like NIXL's: unchanged, from prefill's answer, if it is there."""
    protocols = getattr(sys.modules.get(_PROTOCOLS), "KV_CONNECTOR_PROTOCOLS", {})
    if "NixlConnector" in protocols:
        protocols.setdefault("KVLinkConnector", protocols["NixlConnector"])


def register() -> None:
    """Registers the connectors by name. vLLM calls it in every process (entry point vllm.general_plugins)."""
    from vllm.distributed.ec_transfer.ec_connector.factory import ECConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    # It may be called twice, and registering twice raises.
    if "KVLinkConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVLinkConnector", "kvlink.integrations.vllm.connector", "KVLinkConnector"
        )
    if "KVLinkEncoderConnector" not in ECConnectorFactory._registry:
        ECConnectorFactory.register_connector(
            "KVLinkEncoderConnector", "kvlink.integrations.vllm.encoder.connector", "KVLinkEncoderConnector"
        )
    make_known()
