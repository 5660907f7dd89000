# SPDX-License-Identifier: Apache-2.0
"""Checks what kvlink needs from transformers, by feature and not by version."""

from __future__ import annotations

import threading
from importlib import import_module
from importlib.metadata import version
from typing import Any

from kvlink.errors import ConfigError

from ..models import live_weights, model_text

RAN_WITH = "5.19.0 and 5.23.0"
"""The releases of transformers that passed tests/integrations/test_transformers.py."""

_REQUESTS = "transformers.generation.continuous_batching.requests"

_MANAGER = (
    "batch_processor background_thread_status.can_accept_new_requests background_thread_status.fatal_error "
    "background_thread_status.local_status background_thread_status.mark_as_stopped background_thread_status.STOPPED "
    "_create_batch_processor distributed_helper.tp_size generation_config _generation_thread input_queue.mutex "
    "input_queue.queue is_running model.config.get_text_config num_return_sequences output_router.deliver "
    "output_router.deliver_batch output_router.fail_and_deliver pause _wake_up_loop.set"
)
_PROCESSOR = (
    "has_pending_requests prepare_next_batch use_async_batching logit_processor.check_kwargs scheduler.active_requests "
    "scheduler.waiting_requests scheduler.add_waiting_request scheduler.finish_request scheduler.schedule_batch "
    "scheduler.set_request_cancellation scheduler.starved_requests scheduler._try_to_meet_safety_margin "
    "cache.bytes_per_sector cache.cache_allocators cache.cache_tensor cache.can_store_request_tokens "
    "cache.evict_cached_blocks cache.free_blocks cache.mark_complete_blocks cache.num_sectors "
    "cache.pool.num_free_sectors cache.pool.try_to_free_sectors cache.search_prefix_match cache.use_prefix_sharing"
)
_STATE = (
    "_true_initial_tokens create_equivalent_initial_request generated_tokens initial_tokens logprobs position_offset "
    "remaining_prefill_tokens status to_generation_output tokens_to_process update_and_check_completion"
)


def request_types() -> tuple[Any, Any]:
    """Returns RequestState and RequestStatus. Raises ConfigError if this release of transformers lacks them."""
    try:
        requests = import_module(_REQUESTS)
        return requests.RequestState, requests.RequestStatus
    except (ImportError, AttributeError) as error:
        raise unsupported([str(error)]) from None


def check_manager(manager: Any) -> None:
    """Raises ConfigError for a manager that kvlink cannot drive."""
    require("ContinuousBatchingManager", manager, _MANAGER)
    state, status = request_types()
    require("RequestState", state(request_id="", initial_tokens=[0]), _STATE)
    require("RequestStatus", status, "PENDING DECODING FINISHED")
    if manager.distributed_helper.tp_size > 1:
        raise ConfigError(
            "handoffs of tensor-parallel models are not supported; run prefill and decode with TP 1"
        )
    if manager.num_return_sequences != 1:
        raise ConfigError("handoffs need num_return_sequences=1")


def check_processor(processor: Any) -> None:
    """Raises ConfigError for the batch processor of a release of transformers that lacks what kvlink uses."""
    require("ContinuousBatchProcessor", processor, _PROCESSOR)


def num_embeddings(model: Any) -> int:
    """Returns how many token ids a model can read. Others raise in its forward pass, which ends the loop."""
    embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return int(model.config.get_text_config().vocab_size if embeddings is None else embeddings)


def require(what: str, found: Any, names: str) -> None:
    """Raises ConfigError unless `found`, which errors call `what`, has attributes of these names."""
    missing = [f"{what}.{name}" for name in names.split() if not _has(found, name)]
    if missing:
        raise unsupported(missing)


def _has(found: Any, dotted: str) -> bool:
    *parents, last = dotted.split(".")
    for name in parents:
        found = getattr(found, name, None)
    return hasattr(found, last)


def unsupported(missing: list[str]) -> ConfigError:
    """Returns the error that names what this release of transformers lacks."""
    return ConfigError(
        f"transformers {version('transformers')} lacks {', '.join(missing)}; kvlink ran with {RAN_WITH}"
    )


class LoadedModel:
    """The identity of a model. `text` is that of the parameters when they were last read. Safe from any thread."""

    def __init__(self, model: Any, shared: str, same: str) -> None:
        self._model, self._shared, self._same = model, shared, same
        self._lock = threading.Lock()
        self._seen = self._state()
        self.text = self._read()

    def changed(self) -> bool:
        """Returns whether a parameter was written or replaced since the last call, and reads the new ones."""
        with self._lock:
            state = self._state()
            if state == self._seen:
                return False
            before, self.text, self._seen = self.text, self._read(), state
            return before != self.text

    def _state(self) -> int:
        tensors = ((each.data_ptr(), 0 if each.is_inference() else each._version) for each in self._tensors())
        return hash((*tensors, *self._adapters()))

    def _adapters(self) -> list[str]:
        """Returns the names of the adapters that are in use. Their parameters are among the model's."""
        loaded = getattr(self._model, "_hf_peft_config_loaded", False)
        return list(self._model.active_adapters()) if loaded else []

    def _tensors(self) -> Any:
        yield from self._model.parameters()
        yield from self._model.buffers()

    def _read(self) -> str:
        config = self._model.config.get_text_config()
        return model_text(
            getattr(config, "architectures", None) or [type(self._model).__name__],
            config,
            weights=live_weights(self._model.named_parameters()),
            same=self._same,
            dtype=str(self._model.dtype).removeprefix("torch."),
            shared=self._shared,
            adapters=self._adapters(),
        )
