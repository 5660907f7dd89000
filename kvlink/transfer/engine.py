# SPDX-License-Identifier: Apache-2.0
"""Owns the native data plane of one worker: registered memory, transports, leases and connections."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple, cast

from kvlink import _core, errors
from kvlink.config import WorkerConfig
from kvlink.config.addresses import numeric
from kvlink.config.rdma_config import Way, parse_nics, parse_ways
from kvlink.errors import ConfigError, KVLinkError
from kvlink.hardware.kernels import kernel_for
from kvlink.hardware.nics import RefusedNic
from kvlink.layout import KVLayout
from kvlink.runtime.forks import ADVICE
from kvlink.transfer import transport_names
from kvlink.transfer.gpu_read_check import unreadable_ports
from kvlink.transfer.gpu_staging import (
    log_placement,
    staging_for,
    warn_if_unserved,
    warn_of_pool,
    warn_of_staging,
)
from kvlink.transfer.native_channel import OwnChannel
from kvlink.transfer.nic_registration import NicRegistration, rdma_options, register_with_nics
from kvlink.transfer.path_stats import AllPathStats
from kvlink.transfer.planners import Planner, planners
from kvlink.transfer.pool import BlockPool
from kvlink.types import LeaseEnd, TransportCard

_log = logging.getLogger("kvlink.registration")

CompletionQueue = _core.CompletionQueue
Connection = _core.Connection
PreparedPlan = _core.PreparedPlan
Transfer = _core.Transfer

RUNNING, FAILED, VALID, SETTLED = range(4)
"""The states of a Transfer, see csrc/engine/transfer.h."""

_HOW = {1: LeaseEnd.SETTLED, 2: LeaseEnd.EXPIRED, 3: LeaseEnd.ABORTED}


class Seat(NamedTuple):
    """The slot and the nonces that `grant` returns for one reader of a lease."""

    slot: int
    nonce: int
    settle_nonce: int


class SoftLeaseCounts(NamedTuple):
    """Counts of soft leases. `active` describes the present, and the others count since the start."""

    active: int = 0
    granted: int = 0
    evicted: int = 0
    """The number that ended because a block got new content."""
    displaced: int = 0
    """The number that ended, as the oldest one, because another lease needed the slot."""
    expired: int = 0


class Ended(NamedTuple):
    """A lease that has ended. `held_s` is how long it lasted in seconds."""

    lease: int
    how: LeaseEnd
    held_s: float


class Port(NamedTuple):
    """A NIC port of this worker. `away` says why its device is missing, and is empty while the device is present."""

    name: str
    away: str
    times_away: int
    held: bool
    """Whether connections still hold the missing device."""


class LeaseCounts(NamedTuple):
    """Counts of leases. `active` and `oldest_s` describe the present, and the others count since the start."""

    active: int
    granted: int
    settled: int
    expired: int
    aborted: int
    fenced_readers: int
    oldest_s: float


def available_transports() -> list[str]:
    """Returns the names of the built-in transports, best first, whether or not this machine can use them."""
    return [row[0] for row in _core.transports()]


def transports_here() -> dict[str, str]:
    """Returns the built-in transports, best first, each with "" or why this machine cannot use it and the fix."""
    return {name: _sentences(why_not, fix) for name, _, _, why_not, fix in _core.transports()}


def why_not_here(transport: str) -> str:
    """Returns "" or why this machine cannot use a transport and the fix, also for those that are used only by name."""
    return _sentences(*_core.probe(transport))


def _sentences(why_not: str, fix: str) -> str:
    return f"{why_not}. {fix}" if why_not and fix else why_not


def host_transports() -> dict[str, str]:
    """Returns the part of `transports_here` that pools in host memory use."""
    return {name: why_not for name, why_not in transports_here().items() if not _is_cuda(name)}


class Engine:
    """Owns the native engine. Every method is safe from any thread; `close` is idempotent."""

    def __init__(self, pool: BlockPool, epoch: int, config: WorkerConfig, worker_id: str = "") -> None:
        self.pool = pool
        self.epoch = epoch
        self.worker_id = worker_id
        self.path_stats = AllPathStats()
        self.channel = OwnChannel()
        self.closed, self._notify_lock = False, threading.Lock()
        self._notified: weakref.WeakSet[CompletionQueue] = weakref.WeakSet()
        self.lease_slots = config.lease_slots
        transports = _within_reach(transport_names.select(config.transports, available_transports()), pool)
        by_nic = [name for name in transports if name.removeprefix("fault+") == "verbs"]
        self._staging = staging_for(pool, config, _reaching_gpus(transports) if pool.gpu is not None else ())
        check = partial(unreadable_ports, config=config) if config.rdma_read_check else None
        register = partial(register_with_nics, pool, config, staging=self._staging, read_check=check)
        self._nics = register() if by_nic else NicRegistration()
        with ExitStack() as if_it_raises:
            if_it_raises.callback(lambda: self._nics.close())  # the second registration, if there is one
            if_it_raises.callback(self._close_core)
            self._kernel = None if pool.gpu is None else kernel_for(pool.gpu)
            self._core = self._start(config, transports, by_nic)
            refused = next((card.refused for card in self.cards() if card.name in by_nic), "")
            if refused and self._nics.by_dma_buf:  # only the attempt shows whether the driver refuses dma-buf
                self._core.close()
                self._nics = register(nic_refuses_dma_buf=refused)
                self._core = self._start(config, transports, by_nic)
            self.bounces = frozenset(card.name for card in self.cards() if card.bounces)
            """Transports that stage reads into the pool, which is on a GPU, in host memory."""
            log_placement(pool)
            warn_of_pool(pool, self.cards())
            warn_if_unserved(pool, self.cards())
            warn_of_staging(pool, self._core.staging_refused())
            if_it_raises.pop_all()
        unused = [RefusedNic(name, None, why) for name, why in self._core.left_out()]
        for nic in unused:
            _log.warning("left out nic=%s", nic)
        self.nics_left_out: tuple[RefusedNic, ...] = (*self._nics.left_out, *unused)
        """The ports that this pool does not use, each with the reason."""
        self.on_forked: Callable[[], None] = lambda: None
        self.flush_gpu_writes = self._nics.flush
        """Called after the bytes of a pull have arrived and before they are used. None if nothing is needed."""
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
            inline_us=config.inline_us,
            num_lanes=config.lanes,
            nics=self._nics.ports,
            rdma=rdma_options(config),
            bounce_bytes=config.bounce_bytes if Way.BOUNCE in parse_ways(config.gpudirect) else 0,
            advertise=numeric(config.advertise, "KVLINK_ADVERTISE", config.host) if config.advertise else "",
            cuda_kernel=self._kernel,
            gpu_blocks=config.gpu_blocks,
            worker=self.worker_id,
            fabric_provider=config.fabric_provider,
            nics_named=any(names.ports and not names.excludes for names in parse_nics(config.nics).values()),
        )
        with ExitStack() as if_it_raises:
            if_it_raises.callback(core.close)
            for name in by_nic if self._nics.refused else ():
                core.disable(name, self._nics.refused)
            for name in by_nic if self._nics.bounced else ():
                core.force_bounce(name, self._nics.bounced)
            with self._nics.added(core, self.pool, self._staging, always=config.staging == "always"):
                core.start()
            if_it_raises.pop_all()
        return core

    @property
    def core(self) -> _core.Engine:
        """The native engine. Raises ConfigError in a forked child."""
        if self._core is None:
            raise ConfigError(
                f"this Worker was made before a fork and belongs to the parent process; {ADVICE}"
            )
        return self._core

    def cards(self) -> tuple[TransportCard, ...]:
        """Returns how each transport reaches this worker, best transport first."""
        return tuple(
            TransportCard(name, address, tuple(pool_keys), tuple(lease_keys), refused, bounces)
            for name, address, pool_keys, lease_keys, refused, bounces in self.core.access()
        )

    def accept(
        self, transport: str, hellos: Sequence[bytes], takes_keys: bool, caller: int = 0
    ) -> tuple[int, list[bytes], list[bytes], list[bytes]]:
        """Admits a reader. Returns its connection id (0 if it needs no fence), a reply per lane, pool and lease keys.

        The keys are empty while they equal those of `cards`. A reader that cannot take new keys is refused after keys
        change. Readers of the same `caller` share the limit on readers that have not connected yet.
        """
        return self.core.accept(transport, hellos, takes_keys, caller)

    def ports(self) -> list[Port]:
        """Returns the ports of this worker's NICs, including those whose devices are missing."""
        return [Port(*row) for row in self.core.ports()]

    def open(self, transport: str, address: bytes, worker_id: str, epoch: int) -> Connection:
        """Opens unconnected lanes to that worker. Raises TransportUnavailable if it cannot be reached."""
        path_stats = self.path_stats.of_path(worker_id, transport)
        return self.core.open(transport, address, path_stats, worker_id, epoch)

    def planners(
        self,
        owner: Sequence[KVLayout],
        region_bytes: Sequence[int],
        region_index: Sequence[int],
        heads: Sequence[tuple[int, int] | None],
    ) -> tuple[Planner | None, ...]:
        """Returns planners of reads from an owner, see `kvlink.transfer.planners`."""
        return planners(self.pool, owner, region_bytes, region_index, heads)

    def grant(self, lease: int, readers: int, ready: int, ttl_s: float) -> list[Seat]:
        """Takes one slot per reader. Raises ConfigError if the lease table is full."""
        return [Seat(*seat) for seat in self.core.grant(lease, readers, ready, ttl_s)]

    def take_ended(self) -> list[Ended]:
        """Returns the leases that ended since the last call. Their blocks may be reused."""
        return [Ended(lease, _HOW[how], held_s) for lease, how, held_s in self.core.take_ended()]

    def lease_counts(self) -> LeaseCounts:
        """Returns the counts of the leases of this worker's offers."""
        return LeaseCounts(*self.core.lease_counts())

    def soft_lease_counts(self) -> SoftLeaseCounts:
        """Returns the counts of this worker's soft leases."""
        return SoftLeaseCounts(*self.core.soft_lease_counts())

    def close(self) -> None:
        """Breaks connections, joins threads and revokes keys. On return no peer can read the pool over a network."""
        _live.discard(self)
        self._close_core()
        with self._notify_lock:
            self.closed = True
            for queue in self._notified:
                os.eventfd_write(queue.fileno(), 1)

    def _close_core(self) -> None:
        self.channel.close()  # it admits readers to the core
        if getattr(self, "_core", None) is not None:  # there is none before the constructor is done
            self._core.close()

    def notify_when_closed(self, queue: CompletionQueue) -> None:
        """Wakes waiters of `queue` after `closed` becomes true, until `stop_notifying`."""
        with self._notify_lock:
            self._notified.add(queue)

    def stop_notifying(self, queue: CompletionQueue) -> None:
        """Undoes `notify_when_closed`. Call it before `queue` is closed."""
        with self._notify_lock:
            self._notified.discard(queue)

    def _abandon(self) -> None:
        # The child has none of the threads. It must not use their locks or the parent's sockets.
        _abandoned.extend((self._core, self.channel))
        self.channel = OwnChannel()
        self._core = None  # type: ignore[assignment]
        self.on_forked()


def _is_cuda(transport: str) -> bool:
    return transport.removeprefix("fault+") == "cuda"


def _reaching_gpus(transports: Sequence[str]) -> set[str]:
    """Returns those of `transports` that reach GPU memory and that this machine can use."""
    plain = {name.removeprefix("fault+") for name in transports}
    return {name for name in plain & {"cuda", "verbs"} if not transports_here()[name]}


def _within_reach(transports: list[str], pool: BlockPool) -> list[str]:
    """Returns `transports` without cuda for a pool in host memory, unless no other transport is allowed."""
    others = [name for name in transports if pool.gpu is not None or not _is_cuda(name)]
    return others or transports


def failure(transfer: Transfer, where: str) -> KVLinkError | None:
    """Returns the error of an ended transfer, or None. `where` names the request and the peer."""
    failed = transfer.failure()
    return None if failed is None else error_of(failed, where)


def error_of(failed: _core.Failure, where: str) -> KVLinkError:
    """Returns the error of a failure that the core describes."""
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
_abandoned: list[object] = []


def _after_fork_in_child() -> None:
    for engine in list(_live):
        engine._abandon()


os.register_at_fork(after_in_child=_after_fork_in_child)
