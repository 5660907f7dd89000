# SPDX-License-Identifier: Apache-2.0
"""Explains how an owner was read: the transport, why better ones were not used, and predicted and measured time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvlink.ticket import Ticket
from kvlink.transfer.engine import Transfer
from kvlink.transfer.peer import Peer, Refusal

Part = tuple[Ticket, Peer, Transfer]
"""The reads of a pull from one owner."""

_NETWORKED = ("tcp", "verbs", "fabric")


@dataclass(frozen=True, slots=True)
class PathTaken:
    """The path over which one owner was read. `refused` lists the better transports that were not used, and why."""

    worker_id: str
    transport: str
    lanes: int
    nics: tuple[str, ...]
    """Pairs of ports that carry lanes, this worker's and the owner's: "mlx5_0:1->mlx5_1:1". With several pairs each
    has its share of the bytes in flight, as in "mlx5_0:1->mlx5_1:1 75%". Only verbs has such pairs. With fabric it is
    libfabric's provider, which chooses its own ports: "efa"."""
    nics_left_out: tuple[str, ...]
    """This worker's ports that carry no lane, each with its reason."""
    bounces_at: tuple[str, ...]
    """The ends ("reader", "owner") that stage GPU memory in pinned host memory because the path cannot reach it."""
    refused: tuple[Refusal, ...]
    num_ops: int
    num_bytes: int
    predicted_us: float
    """Predicted when the pull started. 0 for a streaming pull, which waits for its owner."""
    measured_us: float
    ran_inline: bool
    staged: bool = False
    """Whether bytes went through the staging buffer on the reader's GPU, from which a kernel copied them."""
    predicted_direct_us: float | None = None
    """The predicted time without the staging buffer. None if the reader has no staging buffer."""
    predicted_staged_us: float | None = None
    """The predicted time with the staging buffer. None if the reader has no staging buffer."""
    restarted: str = ""
    """The error of a first attempt whose connection was cut, after which all was read again on a new connection."""
    soft: bool = False
    """Whether the lease was soft: the owner pinned no block, and might have given one new content during the read."""

    @property
    def in_clear(self) -> bool:
        """Whether the bytes crossed a network. No transport of kvlink encrypts them there."""
        return self.transport.removeprefix("fault+") in _NETWORKED

    @property
    def was_predicted(self) -> bool:
        """Whether the prediction is within a factor of two. The first pulls from an owner often miss it."""
        return self.measured_us <= 2 * self.predicted_us and self.predicted_us <= 2 * self.measured_us

    @property
    def brief(self) -> str:
        """The path and the time alone: "prefill-0 over shm: 10625024 bytes in 662 us"."""
        rest = ", not encrypted" * self.in_clear + ", read again" * bool(self.restarted)
        return f"{self.worker_id} over {self.transport}: {self.num_bytes} bytes in {self.measured_us:.0f} us{rest}"

    def __str__(self) -> str:
        """Returns one sentence for a log.

        It omits a prediction that missed, which `predicted_us` still holds, and of `refused` what could not have been
        better: loopback, which never leaves a process, and networks, where both ends are on one host.
        """
        no_loss = () if self.in_clear else _NETWORKED
        lanes = f"{self.lanes} lane(s)" + "".join(f" {pair}" for pair in self.nics)
        lanes += f", bounce at {' and '.join(self.bounces_at)}" if self.bounces_at else ""
        lanes += self._staging
        lanes += ", not encrypted" if self.in_clear else ""
        lanes += ", inline" if self.ran_inline else ""
        lanes += ", soft lease" if self.soft else ""
        predicted = f"predicted {self.predicted_us:.0f} us, " if self.was_predicted else ""
        restarted = f"; read again after: {self.restarted}" if self.restarted else ""
        refusals = "".join(
            f"; not {refusal.transport}: {refusal.reason}"
            for refusal in self.refused
            if refusal.transport not in ("loopback", *no_loss)
        )
        refusals += "".join(f"; not {nic}" for nic in self.nics_left_out)
        return (
            f"{self.worker_id} over {self.transport} ({lanes}): {self.num_ops} operations, {self.num_bytes} "
            f"bytes, {predicted}took {self.measured_us:.0f} us{restarted}{refusals}"
        )

    @property
    def _staging(self) -> str:
        if self.predicted_direct_us is None or self.predicted_staged_us is None:
            return ""
        other, us = (
            ("direct", self.predicted_direct_us) if self.staged else ("staged", self.predicted_staged_us)
        )
        return f", {'staged on the GPU' if self.staged else 'direct'}, {other} predicted {us:.0f} us"


def paths_taken(parts: Iterable[Part], restarted: Mapping[str, str]) -> list[PathTaken]:
    """Returns the paths of one pull. `restarted` gives the field of PathTaken by owner.

    A transport refused for the same reason by several owners, or a NIC left out, is listed only for the first of them.
    """
    refused: set[Refusal] = set()
    nics: set[str] = set()
    paths = []
    for part in parts:
        path = path_taken(part, restarted.get(part[0].worker_id, ""))
        own = tuple(each for each in path.refused if each not in refused)
        left_out = tuple(each for each in path.nics_left_out if each not in nics)
        refused.update(own)
        nics.update(left_out)
        paths.append(replace(path, refused=own, nics_left_out=left_out))
    return paths


def path_taken(part: Part, restarted: str = "") -> PathTaken:
    """Returns the path of one transfer, which may still run. `restarted` is the field of PathTaken."""
    ticket, peer, transfer = part
    stats = transfer.stats()
    paths = peer.connection.paths()
    nics = tuple(dict.fromkeys(filter(None, paths)))
    has_choice = stats.direct_us > 0
    predicted_us = stats.predicted_us
    if has_choice:
        predicted_us = stats.staged_us if stats.staged else stats.direct_us
    return PathTaken(
        ticket.worker_id,
        peer.transport,
        len(paths),
        nics,
        peer.nics_left_out if peer.transport.removeprefix("fault+") == "verbs" else (),
        peer.bounces_at,
        peer.refused,
        stats.num_ops,
        stats.bytes,
        predicted_us,
        stats.total_ns / 1000,
        stats.ran_inline,
        stats.staged,
        stats.direct_us if has_choice else None,
        stats.staged_us if has_choice else None,
        restarted,
        ticket.soft,
    )
