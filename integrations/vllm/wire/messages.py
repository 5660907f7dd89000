# SPDX-License-Identifier: Apache-2.0
"""Defines what vLLM carries between the connector's two sides."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from .handoff import RankInfo
from .step_commands import StepCommands
from .stream_timing import LoadCost, slowest


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
