# SPDX-License-Identifier: Apache-2.0
"""Keeps the identity of the model of a scheduler process: its weights, which SGLang can change, and its adapters.

SGLang does not tell a disaggregation backend which adapter a request has. So all adapters of a server belong to the
identity, by name and content: two servers exchange caches while they have the same ones.
"""

from __future__ import annotations

import weakref
from typing import Any

from kvlink.config import WorkerConfig

from ..models import Adapters, live_weights, model_text, unknown, weights_text

_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
_CHANGES = (
    "update_weights_from_disk", "update_weights_from_tensor", "update_weights_from_ipc",
    "load_weights_from_distributed", "end_weight_update",
)  # fmt: skip

_managers: weakref.WeakSet[Any] = weakref.WeakSet()
_adapters: dict[str, str] = {}
_weights = ""
"""Stands for the weights, once they were changed in memory."""


def model_of(config: Any, server_args: Any) -> str:
    """Returns the identity of the model as it is now."""
    scales = getattr(server_args, "quantization_param_path", None)
    return model_text(
        config.hf_config.architectures,
        config.hf_text_config,
        name=str(getattr(server_args, "model_path", "") or ""),
        revision=str(getattr(server_args, "revision", "") or ""),
        load_format=str(getattr(server_args, "load_format", "auto")),
        weights=_weights,
        same=WorkerConfig.from_env().same_model,
        quantization=getattr(server_args, "quantization", None),
        dtype=str(getattr(config, "dtype", "")).removeprefix("torch."),
        kv_scales=weights_text(str(scales)) if scales else None,
        adapters=dict(_adapters),
    )


def follow(manager: Any) -> None:
    """Calls the manager's `model_changed` from now on when this process changes its weights or adapters."""
    _managers.add(manager)


def register_hooks(registry: Any, around: Any) -> None:
    """Registers what notices the changes with SGLang's HookRegistry."""
    for name in _CHANGES:
        registry.register(f"{_UPDATER}.{name}", _watched(name), around)
    registry.register(f"{_LORA}._load_lora_adapter", _adapter_loaded, around)
    registry.register(f"{_LORA}._load_lora_adapter_from_tensors", _adapter_received, around)
    registry.register(f"{_LORA}._unload_lora_adapter", _adapter_unloaded, around)


def _watched(name: str) -> Any:
    def watched(original: Any, updater: Any, *args: Any, **options: Any) -> Any:
        global _weights
        result, _weights = None, unknown()  # until it is known what came of it
        try:
            result = original(updater, *args, **options)
            path = options.get("model_path", args[0] if args else "") if name.endswith("disk") else ""
            ok = not isinstance(result, tuple) or result[0]
            found = weights_text(str(path)) if path and ok else ""
            if not found or ":" in found:
                found = live_weights(updater.get_model().named_parameters())
            _weights = found
        finally:
            _tell()
        return result

    return watched


def _adapter_loaded(original: Any, manager: Any, reference: Any, *args: Any, **options: Any) -> Any:
    result = original(manager, reference, *args, **options)
    path = str(reference.lora_path or "")
    _adapters[str(reference.lora_name)] = Adapters().text(0, path)
    _tell()
    return result


def _adapter_received(original: Any, manager: Any, reference: Any, *args: Any, **options: Any) -> Any:
    result = original(manager, reference, *args, **options)
    _adapters[str(reference.lora_name)] = unknown()
    _tell()
    return result


def _adapter_unloaded(original: Any, manager: Any, reference: Any, *args: Any, **options: Any) -> Any:
    result = original(manager, reference, *args, **options)
    _adapters.pop(str(reference.lora_name), None)
    _tell()
    return result


def _tell() -> None:
    for manager in list(_managers):
        manager.model_changed()
