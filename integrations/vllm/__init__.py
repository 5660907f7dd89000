# SPDX-License-Identifier: Apache-2.0
"""Is the connector for vLLM: `--kv-transfer-config '{"kv_connector":"KVLinkConnector","kv_role":"kv_both"}'`.

The entry point below registers the name. Where plug-ins are off, `kv_connector_module_path` is this module.

vLLM loads `connector`, which consists of `scheduler` (in the engine's process, makes decisions) and `worker` (beside
the model, moves bytes). `handoff` is what the router's message carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .connector import KVLinkConnector

__all__ = ["KVLinkConnector", "register"]


def __getattr__(name: str) -> Any:
    """Imports the connector when vLLM asks for it. Its module needs vLLM, this one does not."""
    if name == "KVLinkConnector":
        from .connector import KVLinkConnector

        return KVLinkConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Registers the connector by name. vLLM calls it in every process (entry point vllm.general_plugins)."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from .dynamo import make_known

    # It may be called twice, and registering twice raises.
    if "KVLinkConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(
            "KVLinkConnector", "kvlink.integrations.vllm.connector", "KVLinkConnector"
        )
    make_known()
