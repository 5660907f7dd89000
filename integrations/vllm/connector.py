# SPDX-License-Identifier: Apache-2.0
"""Defines the class that vLLM loads (0.32, 0.33). It translates; `scheduler` and `worker` do the work.

vLLM ends the engine when one of these methods raises. Both sides keep an exception inside the request that it is of.
The methods that may raise say so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_transfer_state import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.request import RequestStatus

from . import register
from .chats.turns import Turns
from .model.caches import caches_of
from .model.engine_config import (
    at_this_host,
    back_off_of,
    drain_s,
    grows,
    launched,
    layer_group_of,
    model_of,
    number_of,
    page_format_of,
    rank_of,
    states_of,
    window_of,
)
from .model.other_connectors import check_others
from .model.seeds import continue_seeds
from .model.unsupported import check_bidirectional, check_supported
from .model.weight_changes import watch_weights
from .prefill.announcements import Announcements
from .prefill.lease_slots import SlotGroups
from .prefill.outgoing import Chunk
from .scheduler import SchedulerSide
from .settings import Settings, streams_from
from .stats import KVLinkMetrics, KVLinkStats
from .wire.handoff import RankInfo
from .wire.step_commands import StepCommands
from .wire.stream_timing import LoadCost, slowest
from .worker import WorkerSide


@dataclass
class KVLinkMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """The metadata of one step."""

    commands: StepCommands


@dataclass
class KVLinkHandshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """The handshake of one rank."""

    rank_info: RankInfo


@dataclass
class KVLinkWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Ranks that restarted after sleep, workers that took leases of running requests, costs by prefill server."""

    rank_infos: dict[int, RankInfo] = field(default_factory=dict)
    holders: Counter[str] = field(default_factory=Counter)
    costs: dict[str, LoadCost] = field(default_factory=dict)

    def aggregate(self, other: KVLinkWorkerMetadata) -> KVLinkWorkerMetadata:
        """Combines the metadata of several ranks."""
        ranks, costs = self.rank_infos | other.rank_infos, slowest(self.costs, other.costs)
        return KVLinkWorkerMetadata(ranks, self.holders + other.holders, costs)


_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class KVLinkConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Exports prefill's blocks, and pulls them for decode by one-sided reads. Raises ConfigError if not supported."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_supported(vllm_config, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._settings = at_this_host(Settings.of(transfer.kv_connector_extra_config))
        if self._settings.offers_softly:
            check_bidirectional(vllm_config, kv_cache_config)
        self._engine_id = str(transfer.engine_id)
        self._rank = rank_of(vllm_config, role)
        self._scheduling: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        self._tensors: dict[str, Any] = {}
        self._weights = ""
        """Stands for the weights, once they were changed in memory."""
        self._rank_infos: dict[int, RankInfo] = {}
        self._woken: dict[int, RankInfo] = {}
        if role is KVConnectorRole.SCHEDULER:
            announcements = Announcements.of(self._settings.worker)
            self._scheduling = SchedulerSide(
                self._engine_id,
                SlotGroups(self._settings.pinning_slots, self._settings.seats),
                kv_cache_config.select_transfer_block_ids,
                self._settings.worker.lease_s,
                self._rank,
                may_send=transfer.is_kv_producer,
                announcements=announcements,
                streaming_from=streams_from(self._settings, vllm_config.scheduler_config),
                streams_always=self._settings.streams_always,
                grows=[grows(group) for group in kv_cache_config.transfer_groups],
                windows=[window_of(group) for group in kv_cache_config.transfer_groups],
                states=[states_of(group) for group in kv_cache_config.transfer_groups],
                turns=Turns.of(self._settings, announcements),
                back_off=back_off_of(vllm_config),
            )

    # The following methods run in the worker's process.

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Exports the caches to peers from now on."""
        if has_kv_transfer_group():
            check_others(self, get_kv_transfer_group())
        self._tensors = kv_caches
        watch_weights(self)
        if not self._vllm_config.use_v2_model_runner:
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # which this process runs

            continue_seeds(GPUModelRunner)
        self.restore_kv_caches()

    def restore_kv_caches(self) -> None:
        """Undoes `unregister_kv_caches` as a new worker: earlier offers are gone."""
        if self._worker is not None:
            return
        groups = [layer_group_of(group) for group in self._kv_cache_config.transfer_groups]
        device = next(iter(self._tensors.values())).device.type
        pages = page_format_of(self._vllm_config, self._kv_cache_config, device)
        num_blocks = self._kv_cache_config.num_blocks
        caches = caches_of(self._tensors, groups, num_blocks, self._rank, self._model(), pages)
        options = self._settings.worker.of_worker(number_of(self._vllm_config, self._rank))
        self._worker = WorkerSide(f"{self._engine_id}-{self._rank.tp_rank}", caches, options)
        self._woken = {self._rank.tp_rank: self._worker.rank_info}

    def _model(self) -> str:
        groups = self._kv_cache_config.transfer_groups
        return model_of(self._vllm_config, self._settings.worker.same_model, self._weights, groups)

    def weights_changed(self, weights: str) -> None:
        """Goes on with weights that were changed in memory. `weights` is their fingerprint, see `live_weights`."""
        self._weights = weights
        if self._worker is not None:
            self._worker.model_changed(self._model())
            self._woken = {self._rank.tp_rank: self._worker.rank_info}

    def unregister_kv_caches(self) -> None:
        """Prepares for sleep: afterwards nothing accesses the caches. Idempotent."""
        serving, self._worker = self._worker, None
        if serving is not None:
            serving.close()

    def get_handshake_metadata(self) -> KVLinkHandshake | None:
        """Returns the handshake for the scheduler's side."""
        return None if self._worker is None else KVLinkHandshake(self._worker.rank_info)

    def handle_preemptions(self, kv_connector_metadata: KVLinkMetadata) -> None:
        """Ends offers of blocks that the step writes. vLLM calls it before anything else of the step.

        An exception must end the step: readers would take the new content of such a block for what was offered.
        """
        if self._worker is not None:
            self._worker.before_writes(kv_connector_metadata.commands)

    def bind_connector_metadata(self, connector_metadata: KVLinkMetadata) -> None:
        """Carries out the commands before the step: pulls start now, not after the forward, where vLLM starts them."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None:
            self._worker.carry_out(connector_metadata.commands, lambda: launched(self._tensors))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Does nothing: the loads have started already."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: a request is scheduled once all its layers are loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Does nothing: readers read the blocks in place."""

    def wait_for_save(self) -> None:
        """Saves nothing, but lets readers of a prompt that is still being computed read what this step wrote."""
        if self._worker is not None and self.has_connector_metadata():
            written = self._get_connector_metadata().commands.written
            if written:
                self._worker.computed(written, lambda: launched(self._tensors))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Returns what ended since the last step."""
        if self._worker is None:
            return KVConnectorTransferResults()
        results = self._worker.results()
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Returns the same for callers of the older name."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def build_connector_worker_meta(self) -> KVLinkWorkerMetadata | None:
        """Returns the worker's metadata, or None if it is empty."""
        woken, self._woken = self._woken, {}
        if self._worker is None:
            return KVLinkWorkerMetadata(woken) if woken else None
        held, costs = self._worker.take_held(), self._worker.take_costs()  # counts that cannot fail
        return KVLinkWorkerMetadata(woken, Counter(held), costs) if woken or held or costs else None

    def get_kv_connector_stats(self) -> KVLinkStats | None:
        """Returns the statistics since the last step; in the scheduler's process, those of unused handoffs."""
        if self._scheduling is not None:
            return KVLinkStats.of_scheduler(
                unused=self._scheduling.take_counts(),
                decisions=self._scheduling.decisions.take(),
                turns=self._scheduling.turns.take_counts(),
                guarded=self._scheduling.guard.take_counts(),
            )
        data = self._worker.take_stats() if self._worker is not None else None
        return None if data is None else KVLinkStats(data=data)

    # The following methods run in the scheduler's process.

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVLinkHandshake]) -> None:
        """Stores the addresses of this server's workers, by rank.

        MultiConnector passes the handshakes of its first connector that has one. If they are another's, the workers
        report these addresses with the first step.
        """
        ours = {rank: one.rank_info for rank, one in metadata.items() if isinstance(one, KVLinkHandshake)}
        self._store_ranks(ours)

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Follows which cached blocks get new content, if their content is offered.

        Raises ConfigError for a pool that forgets blocks in a way that is not known here. The pool's methods may raise
        from now on: a block that is given away unseen would be read as what was offered.
        """
        if self._scheduler.turns.answers is not None:
            self._scheduler.turns.answers.watch(gpu_block_pool)

    def has_pending_push_work(self) -> bool:
        """Returns whether a step must come without a request, to end the offers of a cache that was reset."""
        return self._scheduler.turns.pending

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        """Returns all transferred groups, because a handoff restores every one."""
        groups: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return groups

    def on_new_request(self, request: Any) -> None:
        """Registers a request before it is scheduled."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Returns the number of tokens that the prefill server has and this server has not."""
        return self._scheduler.num_matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plans the load, or the lease of a request that will be handed off."""
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVLinkMetadata:
        """Returns the metadata of this step."""
        preempted = scheduler_output.preempted_req_ids or ()
        self._scheduler.scheduled(lambda: self._chunks(scheduler_output), preempted)
        return KVLinkMetadata(
            self._scheduler.take_commands(idle=scheduler_output.total_num_scheduled_tokens == 0)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        """Handles what the workers reported."""
        scheduler = self._scheduler
        scheduler.received(connector_output.finished_recving or (), connector_output.failed_recving or ())
        scheduler.sent(connector_output.finished_sending or ())
        reported = connector_output.kv_connector_worker_meta
        if isinstance(reported, KVLinkWorkerMetadata):
            self._store_ranks(reported.rank_infos)
            scheduler.held(reported.holders)
            with scheduler.guard.around("costs"):
                scheduler.decisions.learn(reported.costs)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Calls `request_finished_all_groups` for a model with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Returns whether the blocks stay until they were read, and the parameters for the decode server."""
        return self._scheduler.finished(request, block_ids, request.status in _COMPLETE)

    def reset_cache(self) -> bool:
        """Serves /reset_prefix_cache?reset_external=true. Returns False while leases are active until the next step.

        vLLM answers an exception with an error of this call, and goes on.
        """
        return self._scheduler.reset()

    # The following methods run in either process.

    def shutdown(self) -> None:
        """Closes both sides; a server that drains waits for its readers first. Idempotent."""
        if self._worker is not None:
            with self._worker.guard.around("drain"):
                self._worker.drain(drain_s(self._vllm_config))
        self.unregister_kv_caches()
        if self._scheduling is not None:
            self._scheduling.close()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVLinkStats:
        """Restores statistics that crossed processes."""
        return KVLinkStats(data=data) if data is not None else KVLinkStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVLinkMetrics:
        """Returns the metrics for /metrics."""
        return KVLinkMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduler(self) -> SchedulerSide:
        assert self._scheduling is not None, "called in a worker's process"
        return self._scheduling

    def _chunks(self, scheduler_output: Any) -> dict[str, Chunk]:
        select = self._kv_cache_config.select_transfer_block_ids
        cached = scheduler_output.scheduled_cached_reqs
        more = dict(zip(cached.req_ids, cached.new_block_ids, strict=True))
        return {
            request_id: Chunk(select(blocks) if (blocks := more.get(request_id)) else (), num_tokens)
            for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items()
        }

    def _store_ranks(self, rank_infos: dict[int, RankInfo]) -> None:
        self._rank_infos |= rank_infos
        self._scheduler.set_ranks(rank_info for _, rank_info in sorted(self._rank_infos.items()))


register()  # MultiConnector looks statistics up by name, also for a connector that came by kv_connector_module_path
