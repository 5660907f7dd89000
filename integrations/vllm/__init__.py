# SPDX-License-Identifier: Apache-2.0
"""Is the connector for vLLM: `--kv-transfer-config '{"kv_connector":"KVLinkConnector","kv_role":"kv_both"}'`.

The entry point below registers the name. Where plug-ins are off, `kv_connector_module_path` is this module.

vLLM loads `connector`, which consists of `scheduler` (in the engine's process, makes decisions) and `worker` (beside
the model, moves bytes). `handoff` is what the router's message carries. `encoder` is the connector for outputs of
encoders of images: `--ec-transfer-config '{"ec_connector":"KVLinkEncoderConnector",…}'`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVLinkConnector
    from .encoder.connector import KVLinkEncoderConnector

__all__ = ["KVLinkConnector", "KVLinkEncoderConnector", "register"]


def __getattr__(name: str) -> Any:
    """Imports a connector when vLLM asks for it. Its module needs vLLM, this one does not."""
    if name == "KVLinkConnector":
        from .connector import KVLinkConnector

        return KVLinkConnector
    if name == "KVLinkEncoderConnector":
        from .encoder.connector import KVLinkEncoderConnector

        return KVLinkEncoderConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
