# SPDX-License-Identifier: Apache-2.0
"""Lets SGLang hand off requests through kvlink: `--disaggregation-transfer-backend kvlink`. See docs/servers/sglang.md.

- `backend`: SGLang's classes for a backend, derived from their common ones
- `outgoing`: prefill's side, which offers the pages of requests chunk by chunk
- `incoming`: decode's side, which pulls the pages of each request
- `requests`: what keeps a request in its room, and its failure in the request
- `manager`, `listener`: what a scheduler process has once, and the thread that receives the peers' messages
- `wants`: which decode ranks prefill accepts, and when
- `messages`: the messages between the two sides over SGLang's control sockets
- `bootstrap`: the checks of what SGLang's bootstrap servers say
- `weight_changes`: the identity of the model, whose weights and adapters may change
- `caches`: SGLang's buffers as kvlink pools
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import KVLinkReceiver, KVLinkSender
    from .manager import KVLinkManager

__all__ = ["KVLinkManager", "KVLinkReceiver", "KVLinkSender", "register"]

_NAME = "kvlink"


def __getattr__(name: str) -> Any:
    """Imports the backend's classes when SGLang asks for them. Their modules need SGLang, this one does not."""
    if name in ("KVLinkManager", "KVLinkReceiver", "KVLinkSender"):
        from . import backend

        return getattr(backend, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> None:
    """Registers the backend with SGLang, which calls this at the start of each of its processes.

    SGLang's set of backends is closed. Its enumeration calls `_missing_` for unknown names, and its plug-ins may wrap
    `get_kv_class`.
    """
    from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
    from sglang.srt.disaggregation.utils import TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    ours = object.__new__(TransferBackend)
    ours._name_, ours._value_ = _NAME.upper(), _NAME
    TransferBackend._missing_ = classmethod(lambda cls, value: ours if value == _NAME else None)
    add_disagg_transfer_backend_choices([_NAME])

    def get_kv_class(original: Any, transfer_backend: Any, class_type: Any) -> Any:
        if transfer_backend is not ours:
            return original(transfer_backend, class_type)
        from .backend import class_of

        return class_of(class_type)

    def query_prefill_dp_ranks(original: Any, *args: Any, **options: Any) -> dict[str, int]:
        from .bootstrap import checked_dp_ranks

        return checked_dp_ranks(original(*args, **options))

    def check_host(original: Any, address: Any) -> None:
        """Keeps a client's bootstrap_host that is no text from ending the scheduler."""
        from .bootstrap import NOWHERE

        if not isinstance(address.host, str):
            object.__setattr__(address, "host", NOWHERE)
        original(address)

    HookRegistry.register(
        "sglang.srt.utils.network.NetworkAddress.__post_init__", check_host, HookType.AROUND
    )
    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", get_kv_class, HookType.AROUND)
    from .weight_changes import register_hooks

    register_hooks(HookRegistry, HookType.AROUND)
    receiver = "sglang.srt.disaggregation.common.conn.CommonKVReceiver"
    HookRegistry.register(f"{receiver}.query_prefill_dp_ranks", query_prefill_dp_ranks, HookType.AROUND)
