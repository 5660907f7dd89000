# SPDX-License-Identifier: Apache-2.0
"""Notices that vLLM changes the weights of a running server, whose cache is then that of another model.

vLLM reloads weights from files, or receives them from a trainer in several calls. A worker extension that changes
weights in its own way calls `weights_changed` afterwards.
"""

from __future__ import annotations

import functools
import logging
import weakref
from typing import Any

from ...models import live_weights, unknown, weights_text

_log = logging.getLogger("vllm.kvlink")
_METHODS = ("reload_weights", "update_weights", "finish_weight_update")
_HOOK = "_kvlink_watches_weights"
_connectors: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_weights(connector: Any) -> None:
    """Tells the connector from now on when this process changes the weights, see `weights_changed`. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker  # the workers for CPUs and others are based on it

    _connectors.add(connector)
    hook(Worker)


def hook(worker_class: Any) -> None:
    """Lets the methods of a worker's class that change weights call `weights_changed`. Idempotent."""
    for name in _METHODS:
        method = getattr(worker_class, name, None)
        if method is not None and not getattr(method, _HOOK, False):
            setattr(worker_class, name, _watched(name, method))


def weights_changed(model: Any = None, weights: str = "") -> None:
    """Says that the weights of this process were changed, to those of `model` now; without one they are unknown."""
    try:
        weights = weights or (unknown() if model is None else live_weights(model.named_parameters()))
    except Exception as error:
        _log.warning("the new weights cannot be read, so their caches match no other server's: %r", error)
        weights = unknown()
    for connector in list(_connectors):
        connector.weights_changed(weights)


def _watched(name: str, method: Any) -> Any:
    @functools.wraps(method)
    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = method(self, *args, **kwargs)
        except BaseException:
            weights_changed()  # some of them may have been changed
            raise
        if name == "update_weights":
            weights_changed()  # more may follow
        else:
            weights_changed(self.model_runner.get_model(), _of_files(self, name, args, kwargs))
        return result

    setattr(watched, _HOOK, True)
    return watched


def _of_files(worker: Any, name: str, args: Any, kwargs: Any) -> str:
    """Returns the fingerprint of the files that were reloaded, or "" for weights that came from elsewhere."""
    given = {**dict(zip(("weights_iterator", "weights_path"), args, strict=False)), **kwargs}
    if name != "reload_weights" or given.get("weights_iterator") is not None:
        return ""
    model, path = worker.vllm_config.model_config, given.get("weights_path")
    found = weights_text(path) if path else weights_text(str(model.model), str(model.revision or ""))
    return "" if ":" in found else found
