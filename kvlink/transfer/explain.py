# SPDX-License-Identifier: Apache-2.0
"""How an owner was read: the transport that was taken, why better ones were not, predicted against measured time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from kvlink.transfer.peer import Refusal
from kvlink.transfer.pull_start import Part

_NETWORKED = ("tcp", "verbs")


@dataclass(frozen=True, slots=True)
class PathTaken:
    """How one owner was read. `refused` are the better transports that were not taken, and why."""

    worker_id: str
    transport: str
    lanes: int
    nics: tuple[str, ...]
    """Pairs of ports that carry lanes, this worker's and the owner's: "mlx5_0:1->mlx5_1:1", and when there are
    several the part of the bytes under way that each may have, as in "mlx5_0:1->mlx5_1:1 75%". Only of verbs."""
    nics_left_out: tuple[str, ...]
    """This worker's ports that carry none, each with its reason."""
    bounces_at: tuple[str, ...]
    """Ends ("reader", "owner") that stage GPU memory in pinned host memory, because the path does not reach it."""
    refused: tuple[Refusal, ...]
    num_ops: int
    num_bytes: int
    predicted_us: float
    measured_us: float
    ran_inline: bool
    staged: bool = False
    """Whether bytes landed in the staging buffer on the reader's GPU, for a kernel to take them to their places."""
    predicted_direct_us: float | None = None
    """This and the next where the reader has such a buffer: what either way should take."""
    predicted_staged_us: float | None = None
    restarted: str = ""
    """What a first attempt failed with whose connection was cut, after which all was read again on a new one."""

    @property
    def in_clear(self) -> bool:
        """Whether the bytes crossed a network, where none of kvlink's transports encrypts them."""
        return self.transport.removeprefix("fault+") in _NETWORKED

    @property
    def was_predicted(self) -> bool:
        """Whether the prediction is within a factor of two: the first pulls from an owner teach it, others miss it."""
        return self.measured_us <= 2 * self.predicted_us and self.predicted_us <= 2 * self.measured_us

    def __str__(self) -> str:
        """One sentence for a log. A prediction that missed is left out; it stands in `predicted_us`."""
        lanes = f"{self.lanes} lane(s)" + "".join(f" {pair}" for pair in self.nics)
        lanes += f", bounce at {' and '.join(self.bounces_at)}" if self.bounces_at else ""
        lanes += self._staging
        lanes += ", not encrypted" if self.in_clear else ""
        lanes += ", inline" if self.ran_inline else ""
        predicted = f"predicted {self.predicted_us:.0f} us, " if self.was_predicted else ""
        restarted = f"; read again after: {self.restarted}" if self.restarted else ""
        refusals = "".join(f"; not {refusal.transport}: {refusal.reason}" for refusal in self.refused)
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
    """Of one pull. `restarted`: as PathTaken has it, by owner. What several owners have in common, a transport refused
    for the same reason or a NIC left out, stands with the first of them alone."""
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
    """The path of one transfer, which may still run. `restarted`: as PathTaken has it."""
    ticket, peer, transfer = part
    stats = transfer.stats()
    paths = peer.connection.paths()
    nics = tuple(dict.fromkeys(filter(None, paths)))
    has_choice = stats.direct_us > 0
    predicted_us = peer.cost.predict_us(stats.num_ops, stats.bytes)
    if has_choice:
        predicted_us = stats.staged_us if stats.staged else stats.direct_us
    if transfer.done() and stats.bytes:
        peer.cost.learn(stats.num_ops, stats.bytes, stats.total_ns / 1000)
    return PathTaken(
        ticket.worker_id,
        peer.transport,
        len(paths),
        nics,
        peer.nics_left_out if nics else (),
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
    )
