# SPDX-License-Identifier: Apache-2.0
"""Defines the class that vLLM loads for encoder outputs. It translates; `scheduler` and `commands` do the work."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)
from vllm.distributed.ec_transfer.ec_connector.encoder_output_width import get_encoder_output_width
from vllm.distributed.ec_transfer.ec_connector.metrics import ECConnectorPromMetrics, ECConnectorStats
from vllm.distributed.ec_transfer.ec_connector.utils import (
    PlaceholderMetadataResolver,
    collect_ec_item_metadata,
)
from vllm.platforms import current_platform
from vllm.utils.gpu_sync_debug import gpu_sync_allowed

from kvlink.layout.model_identity import model_id

from ..model.engine_config import at_this_host, model_of
from ..model.weight_changes import watch_weights
from ..settings import Settings
from .commands import EncoderCopies, EncoderStep
from .items import KEY
from .model_format import check_supported, format_of
from .scheduler import EncoderScheduler
from .settings import EncoderSettings

_log = logging.getLogger("vllm.kvlink")


class KVLinkEncoderMetadata(ECConnectorMetadata):  # type: ignore[misc]
    """Carries the copies of a step to the workers."""

    def __init__(self, step: EncoderStep) -> None:
        self.step = step


class KVLinkEncoderConnector(ECConnectorBase):  # type: ignore[misc]
    """Offers encoder outputs to other servers, and pulls theirs. Raises ConfigError for what it does not serve."""

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        check_supported(vllm_config)
        self._scheduling: EncoderScheduler | None = None
        self._copies: EncoderCopies | None = None
        if role is ECConnectorRole.SCHEDULER:
            self._metadata = PlaceholderMetadataResolver(vllm_config.model_config)
            self._scheduling = self._open(vllm_config)
        else:
            from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

            self._copies = EncoderCopies(get_tensor_model_parallel_rank())
            self._config, self._same = (
                vllm_config,
                EncoderSettings.of(
                    vllm_config.ec_transfer_config.ec_connector_extra_config
                ).worker.same_model,
            )
            self._model = model_id(model_of(vllm_config, self._same))
            watch_weights(self)

    def _open(self, vllm_config: Any) -> EncoderScheduler:
        transfer, parallel = vllm_config.ec_transfer_config, vllm_config.parallel_config
        settings = EncoderSettings.of(transfer.ec_connector_extra_config)
        number = int(parallel.data_parallel_index)
        return EncoderScheduler(
            f"{transfer.engine_id}-encoder-{number}",
            settings.shape(parallel.tensor_parallel_size),
            format_of(vllm_config, settings.worker.same_model),
            at_this_host(Settings(settings.worker)).worker.of_worker(number),
            produces=transfer.is_ec_producer,
            consumes=transfer.is_ec_consumer,
            width_of=lambda modality: get_encoder_output_width(vllm_config, modality),
            has_input=self._has_input,
        )

    def shutdown(self) -> None:
        """Ends pulls and offers. Idempotent."""
        if self._scheduling is not None:
            self._scheduling.close()

    # The following methods run in the worker's process.

    def weights_changed(self, weights: str) -> None:
        """Stops sharing outputs if the weights, whose fingerprint this is, are others than at the start."""
        if self._copies is not None:
            self._copies.is_outdated = model_id(model_of(self._config, self._same, weights)) != self._model

    @property
    def _step(self) -> EncoderStep:
        step: EncoderStep = self._get_connector_metadata().step
        return step

    def start_load_caches(self, encoder_cache: dict[str, Any], **kwargs: Any) -> None:
        """Copies items that were pulled into vLLM's cache, before the step reads it."""
        if self._copies is not None and self._step.loads:
            device = current_platform.device_type
            if current_platform.is_cuda_alike():
                device = f"{device}:{current_platform.current_device()}"
            with gpu_sync_allowed():
                self._copies.load(self._step, encoder_cache, device)

    def start_save_caches(self, **kwargs: Any) -> None:
        """Saves items that vLLM's cache has from earlier steps."""
        if self._copies is not None and self._step.saves:
            with gpu_sync_allowed():
                self._copies.save_all(self._step, kwargs["encoder_cache"])

    def save_caches(self, encoder_cache: dict[str, Any], mm_hash: str, **kwargs: Any) -> None:
        """Saves an item that the step has encoded."""
        if self._copies is not None and self.is_producer:
            with gpu_sync_allowed():
                self._copies.save(self._step, encoder_cache, mm_hash)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Tells the scheduler's side, through the shared memory, that the copies of the step have ended."""
        if self._copies is not None:
            self._copies.finish(self._step)
        return None, None

    # The following methods run in the scheduler's process.

    @property
    def _scheduler(self) -> EncoderScheduler:
        assert self._scheduling is not None
        return self._scheduling

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Returns False while an item of the request is pulled. Starts its pull the first time."""
        return self._scheduler.available(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        """Returns requests whose items can neither be pulled nor encoded here."""
        return self._scheduler.take_unavailable()

    def has_cache_item(self, identifier: str) -> bool:
        """Returns whether the step can load an item, so that the encoder need not run."""
        return self._scheduler.has(identifier)

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """Registers that the step loads or encodes an item."""
        self._scheduler.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> KVLinkEncoderMetadata:
        """Returns the copies of the step."""
        return KVLinkEncoderMetadata(self._scheduler.take_step(scheduler_output.num_scheduled_tokens))

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Returns the tickets that the answer carries, beside what lets a reader skip the processor."""
        offered = self._scheduler.ended(request)
        if not offered:
            return False, None
        with self._scheduler.guard.around("offer", request.request_id):
            described = collect_ec_item_metadata(request.mm_features, self._metadata)
            return False, {name: {**described[name], KEY: params} for name, params in offered.items()}
        return False, None

    def get_ec_connector_stats(self) -> KVLinkEncoderStats | None:
        """Returns the counts since the last call, on the scheduler's side."""
        counts = self._scheduling.take_counts() if self._scheduling is not None else {}
        return KVLinkEncoderStats(data=counts) if counts else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLinkEncoderStats:
        """Returns statistics from their serialized form."""
        return KVLinkEncoderStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVLinkEncoderMetrics:
        """Returns the metrics of `KVLinkEncoderStats`."""
        return KVLinkEncoderMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def _has_input(self, feature: Any) -> bool:
        """Returns whether a feature has more than the sizes that its placeholders are made from."""
        if not feature.data:
            return False
        sizes = self._metadata.fields_for(feature.modality)
        return any(value.data is not None for name, value in feature.data.items() if name not in sizes)


class KVLinkEncoderStats(ECConnectorStats):  # type: ignore[misc]
    """The statistics. `data` has the counts by result."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Clears the statistics."""
        self.data = {}

    def aggregate(self, other: ECConnectorStats) -> ECConnectorStats:
        """Adds those of a later step."""
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self) -> dict[str, int | float]:
        """Returns the values of the log line."""
        return dict(sorted(self.data.items()))

    def is_empty(self) -> bool:
        """Returns whether nothing was counted."""
        return not self.data


class KVLinkEncoderMetrics(ECConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus metrics, with labels for each engine of the process."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._items = self._counter_cls(
            name="vllm:kvlink_encoder_items_total",
            documentation="Encoder outputs that were offered or pulled, by what became of them.",
            labelnames=[*labelnames, "result"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Adds the counts of `KVLinkEncoderStats.data`."""
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for result, count in transfer_stats_data.items():
            self._items.labels(*labels, result).inc(count)
