# SPDX-License-Identifier: Apache-2.0
"""The data plane of one worker, seen from Python: registered memory, transports, leases, connections."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from kvlink import _core, errors
from kvlink.config import Way, WorkerConfig, parse_ways
from kvlink.errors import ConfigError, KVLinkError
from kvlink.forks import ADVICE
from kvlink.hardware.kernels import compiled_for
from kvlink.hardware.nics import RefusedNic
from kvlink.layout import KVLayout
from kvlink.transfer import transport_names
from kvlink.transfer.gpu_staging import record_placement, staging_for, warn_of_pool, warn_of_staging
from kvlink.transfer.nic_registration import NicRegistration, register_with_nics
from kvlink.transfer.path_stats import Traffic
from kvlink.transfer.pool import BlockPool
from kvlink.types import LeaseEnd, TransportCard

CompletionQueue = _core.CompletionQueue
Connection = _core.Connection
Planner = _core.Planner
Transfer = _core.Transfer

RUNNING, FAILED, VALID, SETTLED = range(4)  # states of a Transfer, see csrc/engine/transfer.h

_HOW = {1: LeaseEnd.SETTLED, 2: LeaseEnd.EXPIRED, 3: LeaseEnd.ABORTED}


class Seat(NamedTuple):
    """What `grant` gives for one reader of a lease."""

    slot: int
    nonce: int
    settle_nonce: int


class Ended(NamedTuple):
    """A lease that ended since the last look. `held_s` is how long it lasted."""

    lease: int
    how: LeaseEnd
    held_s: float


class Port(NamedTuple):
    """A NIC port of this worker. `away` says why while its device is gone, and is empty while it is here."""

    name: str
    away: str
    times_away: int
    held: bool
    """Connections still hold the device that is gone."""


class LeaseCounts(NamedTuple):
    """`active` and `oldest_s` are of now, the rest since the start."""

    active: int
    granted: int
    settled: int
    expired: int
    aborted: int
    fenced_readers: int
    oldest_s: float


def available_transports() -> list[str]:
    """Names of the transports built in, best first, whether or not this machine can use them."""
    return [row[0] for row in _core.transports()]


def transports_here() -> dict[str, str]:
    """All that are built in, best first: why this machine cannot use one and what to do, or ""."""
    return {
        name: f"{why_not}. {fix}" if why_not and fix else why_not
        for name, _, _, why_not, fix in _core.transports()
    }


def host_transports() -> dict[str, str]:
    """Those that pools in host memory go by."""
    return {name: why_not for name, why_not in transports_here().items() if not _is_cuda(name)}


def core_layout(layout: KVLayout) -> _core.Layout:
    """The same layout as the planner takes it."""
    return _core.Layout(
        num_blocks=layout.num_blocks,
        block_tokens=layout.block_tokens,
        first_head=layout.first_head,
        num_heads=layout.num_heads,
        row_bytes=layout.row_bytes,
        block_stride=layout.block_stride,
        token_stride=layout.token_stride,
        head_stride=layout.head_stride,
        planes=[(plane.region, plane.layer, plane.offset) for plane in layout.planes],
    )


class Engine:
    """Owns the native engine. Every method is safe from any thread; `close` is idempotent."""

    def __init__(self, pool: BlockPool, epoch: int, config: WorkerConfig) -> None:
        self.pool = pool
        self.epoch = epoch
        self.traffic = Traffic()
        self.closed, self._ringing = False, threading.Lock()
        self._rung: weakref.WeakSet[CompletionQueue] = weakref.WeakSet()
        self.lease_slots = config.lease_slots
        transports = _within_reach(transport_names.select(config.transports, available_transports()), pool)
        by_nic = [name for name in transports if name.removeprefix("fault+") == "verbs"]
        self._staging = staging_for(pool, config, _reaching_gpus(transports) if pool.gpu is not None else ())
        self._loan = register_with_nics(pool, config, staging=self._staging) if by_nic else NicRegistration()
        self._core = self._start(config, transports, by_nic)
        refused = next((card.refused for card in self.cards() if card.name in by_nic), "")
        if refused and self._loan.by_dma_buf:  # which only the attempt could show
            self._core.close()
            self._loan = register_with_nics(pool, config, staging=self._staging, nic_refuses_dma_buf=refused)
            self._core = self._start(config, transports, by_nic)
        self.bounces = frozenset(card.name for card in self.cards() if card.bounces)
        """Transports that stage what they read into the pool in host memory, because it is on a GPU."""
        record_placement(pool)
        warn_of_pool(pool, self.cards())
        warn_of_staging(pool, self._core.staging_refused())
        self.on_forked: Callable[[], None] = lambda: None
        self.on_landed = self._loan.flush
        """To be called once the bytes of a pull have landed and before they are used; None: nothing is to do."""
        _live.add(self)

    def _start(self, config: WorkerConfig, transports: Sequence[str], by_nic: Sequence[str]) -> _core.Engine:
        core = _core.Engine(
            epoch=self.epoch,
            transports=transports,
            host=config.host,
            port=config.port,
            fault=config.fault,
            num_lease_slots=config.lease_slots,
            num_progress_threads=config.progress_threads,
            inline_bytes=config.inline_bytes,
            num_lanes=config.lanes,
            nics=self._loan.ports,
            rdma_connect=config.rdma_connect,
            rdma_traffic_class=config.rdma_traffic_class,
            bounce_bytes=config.bounce_bytes if Way.BOUNCE in parse_ways(config.gpudirect) else 0,
            cuda_image=b"" if self.pool.gpu is None else compiled_for(self.pool.gpu),
        )
        if self._loan.refused:
            for name in by_nic:
                core.disable(name, self._loan.refused)
        if self._loan.bounced:
            for name in by_nic:
                core.bounce(name, self._loan.bounced)
        with self._loan.added(core, self.pool, self._staging, always=config.staging == "always"):
            core.start()
        return core

    @property
    def nics_left_out(self) -> tuple[RefusedNic, ...]:
        """Ports that carry nothing for this pool, and why."""
        return self._loan.left_out

    @property
    def core(self) -> _core.Engine:
        """The native engine. Raises ConfigError in a forked child."""
        if self._core is None:
            raise ConfigError(f"this Worker was made before a fork and is the parent process's; {ADVICE}")
        return self._core

    def cards(self) -> tuple[TransportCard, ...]:
        """How peers reach this worker, best transport first."""
        return tuple(
            TransportCard(name, address, tuple(pool_keys), tuple(lease_keys), refused, bounces)
            for name, address, pool_keys, lease_keys, refused, bounces in self.core.access()
        )

    def accept(
        self, transport: str, hellos: Sequence[bytes], takes_keys: bool, caller: int = 0
    ) -> tuple[int, list[bytes], list[bytes], list[bytes]]:
        """Admits a reader. Returns its connection id (0: not to be fenced), a reply a lane, pool and lease keys.

        The keys are empty while they are those of `cards`; once they are not, who does not take them is refused.
        Those of one `caller` share what is kept for readers that have not connected yet.
        """
        return self.core.accept(transport, hellos, takes_keys, caller)

    def ports(self) -> list[Port]:
        """Of its NICs, those whose devices are gone as well."""
        return [Port(*row) for row in self.core.ports()]

    def open(self, transport: str, address: bytes, worker_id: str) -> Connection:
        """Opens unconnected lanes to `worker_id`. Raises TransportUnavailable when it cannot be reached."""
        return self.core.open(transport, address, self.traffic.tally(worker_id, transport))

    def planner(
        self,
        owner: KVLayout,
        region_bytes: Sequence[int],
        region_index: Sequence[int],
        heads: tuple[int, int],
    ) -> Planner:
        """Plans reads from `owner`'s blocks into this worker's. Raises LayoutMismatch or ConfigError."""
        return _core.Planner(
            reader=core_layout(self.pool.layout),
            owner=core_layout(owner),
            local_regions=[(region.address, region.num_bytes) for region in self.pool.regions],
            remote_region_bytes=region_bytes,
            remote_region_index=region_index,
            heads=heads,
        )

    def grant(self, lease: int, readers: int, ready: int, ttl_s: float) -> list[Seat]:
        """Takes one slot per reader. Raises ConfigError when the lease table is full."""
        return [Seat(*seat) for seat in self.core.grant(lease, readers, ready, ttl_s)]

    def take_ended(self) -> list[Ended]:
        """Leases that ended since the last call. Their blocks may be reused."""
        return [Ended(lease, _HOW[how], held_s) for lease, how, held_s in self.core.take_ended()]

    def lease_counts(self) -> LeaseCounts:
        """Of this worker's offers."""
        return LeaseCounts(*self.core.lease_counts())

    def close(self) -> None:
        """Breaks connections, joins threads, revokes keys. On return no peer can read the pool by network."""
        _live.discard(self)
        if self._core is not None:
            self._core.close()
        with self._ringing:
            self.closed = True
            for queue in self._rung:
                os.eventfd_write(queue.fileno(), 1)

    def ring_when_closed(self, queue: CompletionQueue) -> None:
        """Wakes who waits for `queue` once `closed` is true, until `forget`."""
        with self._ringing:
            self._rung.add(queue)

    def forget(self, queue: CompletionQueue) -> None:
        """To be called before `queue` is closed."""
        with self._ringing:
            self._rung.discard(queue)

    def _abandon(self) -> None:
        # The child has none of the threads and must touch neither their locks nor the parent's sockets.
        _abandoned.append(self._core)
        self._core = None  # type: ignore[assignment]
        self.on_forked()


def _is_cuda(transport: str) -> bool:
    return transport.removeprefix("fault+") == "cuda"


def _reaching_gpus(transports: Sequence[str]) -> set[str]:
    """Those that reach the memory of GPUs and are here."""
    plain = {name.removeprefix("fault+") for name in transports}
    return {name for name in plain & {"cuda", "verbs"} if not transports_here()[name]}


def _within_reach(transports: list[str], pool: BlockPool) -> list[str]:
    """Without cuda for a pool in host memory, unless nothing else is allowed: what would be refused says nothing."""
    others = [name for name in transports if pool.gpu is not None or not _is_cuda(name)]
    return others or transports


def failure(transfer: Transfer, where: str) -> KVLinkError | None:
    """What an ended transfer raises, or None. `where` names the request and the peer."""
    failed = transfer.failure()
    if failed is None:
        return None
    name, what, fix, stale = failed
    sentence = f"{where}: {what}"
    if name == "TransportUnavailable":
        return errors.TransportUnavailable(sentence, fix)
    if fix:
        sentence = f"{sentence}. {fix}"
    if name == "StaleBlocks":
        return errors.StaleBlocks(sentence, errors.StaleReason(stale))
    return cast(KVLinkError, getattr(errors, name)(sentence))


_live: weakref.WeakSet[Engine] = weakref.WeakSet()
_abandoned: list[_core.Engine] = []


def _after_fork_in_child() -> None:
    for engine in list(_live):
        engine._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
