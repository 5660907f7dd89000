# SPDX-License-Identifier: Apache-2.0
"""Lists the peers, with the settings of each measurement. Their defaults apply to all other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

HOST, TCP, REPEAT = "host", "tcp", "repeat"
PATHS = (HOST, TCP, REPEAT)
"""Memory of one host by the fastest way, TCP over the loopback interface, or the same blocks of one host's memory again
and again, prepared once.
"""


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to use a peer. `why` is its source, or what it shows."""

    peer: str
    name: str
    path: str
    why: str
    environment: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pushes(self) -> bool:
        """Returns whether the owner of the blocks begins the transfers."""
        return bool(self.options.get("push"))

    @property
    def allocates(self) -> bool:
        """Returns whether the memory is the peer's own, as kvlink's is over shm and not over cma."""
        return bool(self.options.get("allocate"))

    @property
    def launched(self) -> bool:
        """Returns whether mpiexec of the peer's environment starts both ends."""
        return self.peer == "openmpi"

    @property
    def settings(self) -> str:
        """Returns the settings in one line."""
        given = [f"{name}={value}" for name, value in self.environment.items()]
        given += [f"{name}: {value}" for name, value in self.options.items()]
        return f"{self.why} ({', '.join(given)})" if given else self.why


_OVER_KVLINK = {"backend": "KVLINK"}
_NO_ERRORS = {"ucx": {"ucx_error_handling_mode": "none"}}
# UCX emulates reads there, by messages to the owner's process; its writes are copies.
_MAPPED = ({"UCX_TLS": "posix,self"}, {"allocate": True, "push": True})
# A larger batch of blocks fails by default.
_QUEUES = {
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "60000",
}
_POOLED = {**_QUEUES, "MC_TCP_ENABLE_CONNECTION_POOL": "1"}
_ANY_USER = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

MODES = (
    Mode("nixl", "default", HOST, "its defaults: UCX takes process_vm_readv"),
    Mode("nixl", "fast", HOST, "without UCX's error handling", options=_NO_ERRORS),
    Mode("nixl", "posix", HOST, "UCX's shared memory alone", {"UCX_TLS": "posix,self"}, _NO_ERRORS),
    Mode("nixl", "kvlink", HOST, "over kvlink's backend, which takes cma", options=_OVER_KVLINK),
    Mode("nixl", "tcp", TCP, "its defaults over TCP", {"UCX_TLS": "tcp"}),
    Mode("nixl", "tcp-vllm", TCP, "as vLLM sets it", {"UCX_TLS": "tcp"}, {"ucx": {"num_threads": "4"}}),
    Mode("nixl", "kvlink-tcp", TCP, "over kvlink's backend", {"KVLINK_TRANSPORTS": "tcp"}, _OVER_KVLINK),
    Mode("nixl", "repost", REPEAT, "one handle, posted again", options={"repeat": True}),
    Mode(
        "nixl", "repost-fast", REPEAT, "without UCX's error handling", options={"repeat": True, **_NO_ERRORS}
    ),
    Mode("nixl", "repost-kvlink", REPEAT, "over kvlink's backend", options={"repeat": True, **_OVER_KVLINK}),
    Mode("ucx", "direct", HOST, "its defaults: process_vm_readv"),
    Mode("ucx", "direct-again", REPEAT, "its defaults: process_vm_readv"),
    Mode("ucx", "direct-mapped", HOST, "memory of its own, written through a mapping", *_MAPPED),
    Mode("ucx", "direct-tcp", TCP, "its defaults over TCP, an owner that sleeps", {"UCX_TLS": "tcp"}),
    Mode("ucx", "direct-tcp-poll", TCP, "an owner that never sleeps", {"UCX_TLS": "tcp"}, {"poll": True}),
    Mode("ucx", "direct-tcp-put", TCP, "written by the owner", {"UCX_TLS": "tcp"}, {"push": True}),
    Mode("mooncake", "read", TCP, "its defaults", _QUEUES),
    Mode("mooncake", "write", TCP, "as its vLLM connector uses it", _QUEUES, {"push": True}),
    Mode("mooncake", "pooled", TCP, "connections kept, as deployments set it", _POOLED, {"push": True}),
    Mode("openmpi", "get", HOST, "its defaults: UCX under its one-sided Get, an owner that polls", _ANY_USER),
    Mode("gloo", "packed", TCP, "send and receive of torch.distributed, packed by the owner"),
)

NOT_RUN = {
    ("mooncake", "shared memory"): "its TENT engine has it, and the wheel ignores MC_USE_TENT",
    ("uccl", "default"): "the wheel does not start without an RDMA device",
    ("infinistore", "default"): "the wheel does not start without an RDMA device",
    ("dlslime", "tcp"): "reads of 256 blocks take up to 3 s, and some end with status -1 (0.1.23)",
    ("nvshmem", "default"): "it needs NVIDIA GPUs",
}
"""Reasons why other peers, or other ways of these, have no mode."""
