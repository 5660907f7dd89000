# SPDX-License-Identifier: Apache-2.0
"""Defines paths: their rates, and the cost of a request of a given shape. GB are 10^9 bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

_ROCE_BYTES = (
    86  # besides the payload: preamble and gap 20, Ethernet 18, IPv4 20, UDP 8, BTH 12, AETH 4, ICRC 4
)
_INFINIBAND_BYTES = 26  # LRH 8, BTH 12, ICRC 4, VCRC 2
_PCIE_LANE_GBPS = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
_PCIE_USABLE = 0.9  # of 63 GB/s about 57 on Gen5 x16
_LANES = 16
NVLINK_GBPS = {4: 450.0, 5: 900.0}
"""The rate of one direction, by generation: Hopper's and Blackwell's."""


def wire_efficiency(mtu: int, infiniband: bool = False) -> float:
    """Returns the payload's share of a link's rate, for reads of `mtu` bytes or more."""
    return mtu / (mtu + (_INFINIBAND_BYTES if infiniband else _ROCE_BYTES))


def pcie_gbps(generation: int) -> float:
    """Returns the usable rate of 16 lanes in one direction."""
    return _PCIE_LANE_GBPS[generation] * _LANES * _PCIE_USABLE


class Staging(Enum):
    """Where data from GPU memory is copied on its way."""

    NONE = "GPUDirect"
    CHUNKS = "bounce buffers, in chunks"
    WHOLE = "bounce buffers, whole request"


@dataclass(frozen=True, slots=True)
class Request:
    """The data of all ranks. A piece is contiguous at the owner: one block of one plane of one rank, or a run."""

    num_bytes: int
    pieces: int
    layers: int


@dataclass(frozen=True, slots=True)
class Path:
    """The resources of one request: `rails` NICs (or streams) that share it evenly."""

    name: str
    rails: int
    wire_gbps: float
    """The payload rate of one rail."""
    start_us: float
    post_ns: float
    """The CPU time of one piece, on one thread per rail."""
    pcie_gbps: float = float("inf")
    """The rate between one rail and memory."""
    rail_ns: float = 0.0
    """The time of one piece in the rail itself."""
    round_trip_us: float = 0.0
    window: int = 0
    """The number of reads in flight on one rail; 0 means no limit."""
    staging: Staging = Staging.NONE
    chunk_bytes: int = 512 << 10
    chunk_us: float = 0.0
    """The time of one chunk beside that of its bytes, on one rail."""

    def terms_ms(self, request: Request) -> dict[str, float]:
        """Returns the time that each stage would take alone."""
        each_bytes, each_pieces = request.num_bytes / self.rails, request.pieces / self.rails
        window_us = each_pieces * self.round_trip_us / self.window if self.window else 0.0
        return {
            "wire": each_bytes / self.wire_gbps / 1e6,
            "PCIe": each_bytes / self.bus_gbps() / 1e6,
            "posting": each_pieces * self.post_ns / 1e6,
            "NIC operations": each_pieces * self.rail_ns / 1e6,
            "window": window_us / 1e3,
        }

    def predict(self, request: Request) -> Prediction:
        """Returns the time, and its bottleneck."""
        terms = self.terms_ms(request)
        bottleneck = max(terms, key=lambda name: terms[name])
        total = self.start_us / 1e3 + terms[bottleneck] + self._staging_ms(request)
        if self.start_us / 1e3 > terms[bottleneck]:
            bottleneck = "start-up"
        return Prediction(self.name, total, bottleneck, terms)

    def rails_to_hide(self, request: Request, prefill_ms: float) -> int | None:
        """Returns how many rails move all layers but the last while prefill computes, or None if no number does."""
        behind = prefill_ms * (request.layers - 1) / request.layers
        for rails in range(1, 1025):
            terms = replace(self, rails=rails).terms_ms(request)
            if max(terms.values()) <= behind:
                return rails
        return None

    def exposed_ms(self, request: Request, prefill_ms: float) -> float:
        """Returns the time after prefill if each layer moves as soon as it is computed, with a start-up for each."""
        moving, start_ms = max(self.terms_ms(request).values()), self.start_us / 1e3
        behind = prefill_ms * (request.layers - 1) / request.layers
        late = max(0.0, moving + request.layers * start_ms - behind)
        return start_ms + late + moving / request.layers

    def bus_gbps(self) -> float:
        """Returns the rate between one rail and memory, with the time of its chunks."""
        byte_ns = 1 / self.pcie_gbps
        if self.staging is Staging.CHUNKS:
            byte_ns += self.chunk_us * 1e3 / self.chunk_bytes
        return 1 / byte_ns if byte_ns else float("inf")

    def _staging_ms(self, request: Request) -> float:
        """Returns the time of copies through host memory on both sides, which nothing hides."""
        if self.staging is Staging.NONE:
            return 0.0
        unhidden = request.num_bytes / self.rails if self.staging is Staging.WHOLE else self.chunk_bytes
        return 2 * unhidden / self.pcie_gbps / 1e6


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted time. `terms_ms` has the time of each stage alone."""

    path: str
    total_ms: float
    bottleneck: str
    terms_ms: dict[str, float]

    def gib_per_s(self, num_bytes: int) -> float:
        """Returns the rate in 2^30 bytes per second."""
        return num_bytes / 2**30 / (self.total_ms / 1e3)
