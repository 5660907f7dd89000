# SPDX-License-Identifier: Apache-2.0
"""Describes the paths of a machine from the command line. Figures that were not measured here are marked assumed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlink.errors import ConfigError

from ..workloads.models import Model
from .path import NVLINK_GBPS, Path, Request, Staging, pcie_gbps, wire_efficiency

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
        bounced = replace(direct, start_us=start_us + 2 * _BOUNCE_US)
        return [
            direct,
            replace(bounced, name="bounce", staging=Staging.CHUNKS, chunk_us=_LAUNCH_US),
            replace(bounced, name="bounce-whole", staging=Staging.WHOLE),
            Path("nvlink", ranks, NVLINK_GBPS[self.nvlink], _SOFTWARE_US + _KERNEL_US, 0.0),
        ]


def request_of(model: Model, tokens: int, ranks: int, block_tokens: int, run: int) -> Request:
    """Returns a request of all ranks. `run` is the mean number of adjacent blocks at the owner. Raises ConfigError."""
    if tokens < 1 or run < 1:
        raise ConfigError("a request needs one token at least, and a run one block")
    geometry = model.geometry(ranks, 1, block_tokens)
    planes = geometry.num_layers * geometry.planes_per_layer
    row_bytes = geometry.total_heads * geometry.row_bytes
    blocks = -(-tokens // block_tokens)
    return Request(tokens * planes * row_bytes * ranks, -(-blocks // run) * planes * ranks, model.layers)
