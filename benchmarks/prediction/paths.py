# SPDX-License-Identifier: Apache-2.0
"""Defines paths, of a machine from the command line: their rates, and the cost of a request.

GB are 10^9 bytes. Figures that were not measured here are marked assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from kvlink.errors import ConfigError

from ..workloads.block_budget import Degrees
from ..workloads.models import Model

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
    chunk_bytes: int = 512 << 10
    chunk_us: float = 0.0
    """The time of one chunk of a bounce buffer beside that of its bytes, on one rail. 0 means GPUDirect."""

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
        unhidden = (
            2 * self.chunk_bytes / self.pcie_gbps / 1e6 if self.chunk_us else 0.0
        )  # a chunk at each end
        total = self.start_us / 1e3 + terms[bottleneck] + unhidden
        if self.start_us / 1e3 > terms[bottleneck]:
            bottleneck = "start-up"
        return Prediction(self.name, total, bottleneck, terms)

    def bus_gbps(self) -> float:
        """Returns the rate between one rail and memory, with the time of its chunks."""
        byte_ns = 1 / self.pcie_gbps + self.chunk_us * 1e3 / self.chunk_bytes
        return 1 / byte_ns if byte_ns else float("inf")


class Prediction(NamedTuple):
    """A predicted time. `terms_ms` has the time of each stage alone."""

    path: str
    total_ms: float
    bottleneck: str
    terms_ms: dict[str, float]

    def gib_per_s(self, num_bytes: int) -> float:
        """Returns the rate in 2^30 bytes per second."""
        return num_bytes / 2**30 / (self.total_ms / 1e3)


_POST_NS = 17.0  # to plan and post a read: `kvlink bench plan` on a 2-core cloud machine
_SOFTWARE_US = 6.0  # for one block more than the bare copy, from Python: `kvlink bench pull` there
_ROUND_TRIP_US = 5.0  # assumed: an unloaded fabric of one or two switches
_ROUND_TRIPS = 2  # the data, then the lease slot
_NIC_NS = 50.0  # assumed: 20 million reads a second
_WINDOW = 4 * 16  # queue pairs per peer, times reads in flight on each
_BOUNCE_US = 12.0  # quoted for the extra host copy of one message
_LAUNCH_US = 2.0  # assumed: between two launches on a stream; a slot's list of pieces travels with them
_KERNEL_US = 15.0  # assumed: a gather kernel and its event


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine of each side: `nics` of `gbps` Gb/s on PCIe generation `pcie` with 16 lanes, for all ranks."""

    nics: int = 8
    gbps: float = 400.0
    mtu: int = 4096
    infiniband: bool = False
    pcie: int = 5
    nvlink: int = 4

    def paths(self, ranks: int) -> list[Path]:
        """Returns the paths, GPUDirect first."""
        wire = self.gbps / 8 * wire_efficiency(self.mtu, self.infiniband)
        start_us = _SOFTWARE_US + _ROUND_TRIPS * _ROUND_TRIP_US
        direct = Path(
            "gpudirect",
            self.nics,
            wire,
            start_us,
            _POST_NS,
            pcie_gbps(self.pcie),
            _NIC_NS,
            _ROUND_TRIP_US,
            _WINDOW,
        )
        return [
            direct,
            replace(direct, name="bounce", start_us=start_us + 2 * _BOUNCE_US, chunk_us=_LAUNCH_US),
            Path("nvlink", ranks, NVLINK_GBPS[self.nvlink], _SOFTWARE_US + _KERNEL_US, 0.0),
        ]


def request_of(model: Model, tokens: int, degrees: Degrees, block_tokens: int, run: int) -> Request:
    """Returns a request of all ranks. `run` is the mean number of adjacent blocks at the owner. Raises ConfigError.

    Between unequal tensor-parallel degrees the heads of a token are a piece each, because its other heads are elsewhere
    at one end.
    """
    if tokens < 1 or run < 1:
        raise ConfigError("a request needs one token at least, and a run one block")
    here = degrees.decode or degrees.prefill
    ranks = here if model.mla else max(degrees.prefill, here)
    geometry = model.geometry(ranks, 1, block_tokens)
    model.geometry(degrees.prefill, 1, block_tokens)
    planes = geometry.num_layers * geometry.planes_per_layer
    blocks = -(-tokens // block_tokens)
    alike = model.mla or degrees.prefill == here
    pieces = -(-blocks // run) if alike else tokens
    num_bytes = tokens * planes * geometry.total_heads * geometry.row_bytes * ranks
    return Request(num_bytes, pieces * planes * ranks, model.layers)
