# SPDX-License-Identifier: Apache-2.0
"""Implements Worker, which registers a block pool, offers requests, and pulls requests from other workers."""

from __future__ import annotations

import logging
import os
import threading
import time
from array import array
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import replace
from functools import partial as bound
from typing import Any

from kvlink.background import ControlThread
from kvlink.config import WorkerConfig
from kvlink.control import ticket_signing
from kvlink.errors import ConfigError, KVLinkError
from kvlink.monitoring import metrics
from kvlink.monitoring.worker_report import Reporter
from kvlink.monitoring.worker_stats import WorkerStats
from kvlink.names import check_kind, check_name
from kvlink.ticket import Ticket
from kvlink.timeouts import checked
from kvlink.transfer import spans
from kvlink.transfer.device_work import DeviceWork, has_ended
from kvlink.transfer.engine import Engine
from kvlink.transfer.group_ids import GroupIds, NumTokens, TokenRanges, copied, reader_of_ids
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.transfer.pool import BlockPool
from kvlink.transfer.pull import Observer, Pull
from kvlink.transfer.pull_request import Want, start
from kvlink.transfer.pulls import Pulls
from kvlink.types import ReadyUnit, WorkerCard
from kvlink.worker.exit import open_workers
from kvlink.worker.membership import WorkerMembership
from kvlink.worker.prepared import PreparedPull, check_ticket
from kvlink.worker.reachability import advertised_host
from kvlink.worker.relays import Relays
from kvlink.worker.sources import Sources, Tickets, parsed
from kvlink.worker.stats import gather
from kvlink.worker.unread import Releaser, is_empty

_log = logging.getLogger("kvlink.worker")
_NEEDED: Any = None
_JOIN_S, _CLOSE_S = 10.0, 5.0


class Worker(Relays):
    """Joins a deployment on construction, and leaves with `close` or at the end of a `with` block. Thread-safe.

    pool: the blocks that it offers and pulls into.
    worker_id: unique among the workers of a deployment, and stable over restarts; 1 to 512 bytes.
    coordinator: "host:port"; not needed if the router's messages carry the tickets.
    transports: in the form of KVLINK_TRANSPORTS, for example "shm,tcp".
    config: all other options; read from the environment by default.
    Raises ConfigError, CoordinatorUnavailable.
    """

    def __init__(
        self,
        pool: BlockPool,
        worker_id: str,
        *,
        coordinator: str | None = None,
        transports: str | None = None,
        config: WorkerConfig | None = None,
    ) -> None:
        check_name(worker_id, "worker id")
        check_kind(pool, BlockPool, "pool", "a BlockPool")
        config = WorkerConfig.from_env() if config is None else config
        check_kind(config, WorkerConfig, "config", "a WorkerConfig")
        self.config = replace(
            config,
            coordinator=config.coordinator if coordinator is None else coordinator,
            transports=config.transports if transports is None else transports,
        )
        advertised_host(self.config)  # raises before anything listens
        self.pool, self.worker_id, self._read_ids = pool, worker_id, reader_of_ids(pool.groups)
        self._one_group = len(pool.groups) == 1
        self._timeout_s, self._pid = self.config.timeout_s, os.getpid()
        self._closed, self._closing = False, threading.RLock()
        self._signing, self._checked = ticket_signing(self.config)
        offers, observer = spans.kinds()
        with ExitStack() as opened:
            self._control = ControlThread.shared()
            opened.callback(self._close_engine)  # before there is one: an interrupt may come at any time
            self._engine = Engine(pool, time.time_ns(), self.config, worker_id)
            opened.callback(self._leave)
            self._membership = self._control.run(
                WorkerMembership.of(self.config, lambda: self._engine), _JOIN_S
            )
            self._control.run(self._membership.open(), _JOIN_S)
            self.card: WorkerCard = self._control.run(self._join(), _JOIN_S)
            self.offers = offers(self._engine, worker_id, self.card.epoch, self.card.agent)
            self.offers.on_ended = lambda request_id: self._control.on_loop(
                "ended offer", self._membership.forget, request_id
            )
            self.offers.in_background = bound(self._in_background, what="waiting for the device")
            self.offers.sign = self._sign if pool.model.number else self._signing
            self._peers = Peers(self._engine, self._membership.directory)
            releaser = Releaser(self._peers, self._membership.directory, self._in_background)
            self._pulls = self._control.run(self._open_pulls(releaser, observer), _JOIN_S)
            self._sources = Sources(self._peers, self._membership, pool.layout, self._checked, releaser)
            self._membership.report = Reporter(self)
            if self.config.metrics_port:
                opened.callback(metrics.serve(self, self.config))
            opened.callback(open_workers.discard, self)
            open_workers.add(self)
            self._opened = opened.pop_all()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self.offers)} offers, {len(self._peers.all())} peers"
        return f"Worker({self.worker_id!r} epoch {self.card.epoch} at {self.card.agent}: {state})"

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def offer(
        self,
        request_id: str,
        block_ids: GroupIds,
        *,
        num_tokens: NumTokens | None = None,
        ttl_s: float | None = None,
        readers: int = 1,
        ready: int | None = None,
        ready_unit: ReadyUnit = ReadyUnit.BLOCKS,
        after: DeviceWork | None = None,
        publish: bool = False,
        trace: str = "",
    ) -> Ticket:
        """Pins a request's blocks for its readers and returns the ticket that they need. Makes no remote call.

        block_ids: integers that cover tokens 0…num_tokens in order; with several cache groups, a list of those of each.
            Do not write these blocks before the offer's event.
        num_tokens: by default as many as fit; the last block may be partial. Or a list, with what each group keeps.
        ttl_s: seconds after which an unsettled offer ends; by default KVLINK_LEASE_S.
        readers: the number of seats; `layout.num_seats` says how many readers of another TP degree need.
        ready: units that are written already, by default all. With fewer, readers stream, see `set_ready`.
        after: a torch.cuda.Event recorded behind the kernels that write the blocks, or their stream. Readers wait for
            it, and this call does not. Without it, the blocks must be written before the call.
        publish: also sends the ticket to the coordinator, in the background.
        trace: W3C `traceparent` of the request for tracing; a malformed one is ignored.
        Raises ConfigError for invalid arguments and if the lease table is full.
        """
        if publish:
            self._membership.require_coordinator(f"request {request_id}: publish=True")
        return self.offers.offer(
            request_id,
            block_ids,
            num_tokens=num_tokens,
            ttl_s=self.config.lease_s if ttl_s is None else ttl_s,
            readers=readers,
            ready=ready,
            ready_unit=ready_unit,
            after=after,
            trace=trace,
            publish=self._publish if publish else None,
        )

    def _publish(self, ticket: Ticket) -> None:
        self._in_background(self._membership.publish(ticket), ticket.request_id, "publish")

    def _sign(self, ticket: Ticket) -> Ticket:
        return self._signing(replace(ticket, model=self.pool.model.number))

    def set_ready(self, offer: Ticket | str, ready: int) -> None:
        """Announces to streaming readers that `ready` units are written. Never decreases. Raises UnknownRequest.

        offer: the ticket that `offer` returned, or the request id of the live offer. A call with the ticket cannot meet
            a later offer of the same request; use it where calls may come late.
        """
        self.offers.set_ready(offer, ready)

    def extend(self, offer: Ticket | str, ttl_s: float) -> None:
        """Extends an offer, named as for `set_ready`, to at least `ttl_s` seconds from now. Raises UnknownRequest."""
        self.offers.extend(offer, ttl_s)

    def abort(self, offer: Ticket | str) -> None:
        """Ends an offer, named as for `set_ready`, now. A running read becomes stale, and an event follows.

        Raises UnknownRequest.
        """
        self.offers.abort(offer)

    def pull(
        self,
        ticket: Tickets | None = None,
        into: GroupIds = _NEEDED,
        *,
        request_id: str | None = None,
        tokens: TokenRanges | None = None,
        layers: tuple[int, int] | None = None,
        settle: bool = True,
        after: DeviceWork | None = None,
        partial: bool = False,
        timeout_s: float | None = None,
    ) -> Pull:
        """Starts reading a request's blocks into this worker's blocks; see Pull for how to wait. With an empty range or
        an empty `into`, the pull reads nothing, ends at once, and settles as `release` does.

        ticket: a Ticket or its text, a list with one of each owner rank, or a request id.
        request_id: a request id to claim at the coordinator, instead of `ticket`.
        into: block ids in the forms that `offer` accepts; array("I") or contiguous numpy uint32 is fastest.
        tokens, layers: half-open ranges to read. One range counts the request's tokens; groups that keep fewer are then
            read whole. A list has a range for each cache group, which counts what the group keeps.
        settle: settle the offer at the owner at once after all bytes are valid.
        after: as for `offer`: a step that still uses the blocks of `into`. Nothing is written before it has ended.
        partial: read from some of the owner ranks only. By default tickets of all that this rank reads from are needed.
        timeout_s: deadline of the whole pull in seconds, by default KVLINK_TIMEOUT_S; 0 does not wait.
        Raises ConfigError for invalid arguments, AccessDenied for a signature of another tenant; else the Pull raises.
        """
        if request_id is not None or not isinstance(ticket, Ticket):
            ticket = parsed(ticket, request_id)
        # Small pulls take microseconds, so the usual forms make as few calls as possible.
        plain = self._one_group and type(into) is array and into.typecode == "I"
        block_ids: Any = into if plain else self._read_ids(into)
        limit_s = self._timeout_s if timeout_s is None else checked(timeout_s)
        ranged = tokens is not None or layers is not None or len(block_ids) == 0
        if ranged and is_empty(len(block_ids), tokens, layers):
            return self._sources.empty_pull(ticket, tokens, layers, settle, limit_s)
        if isinstance(ticket, Ticket) and (after is None or has_ended(after)):
            peer = self._peers.get(self._checked(ticket).worker_id, ticket.epoch)
            if peer is not None and (partial or peer.is_alone):
                core = start(peer, ticket, block_ids, tokens, layers, settle, limit_s)
                if core is not None:
                    return self._pulls.started(core, ticket, peer, block_ids, tokens, layers, settle)
        claimed, find = self._sources.of(ticket, partial)
        return self._pulls.begin(claimed, find, Want(block_ids, tokens, layers, settle), limit_s, after)

    def prepare(
        self,
        ticket: Ticket,
        into: GroupIds,
        *,
        tokens: tuple[int, int] | None = None,
        layers: tuple[int, int] | None = None,
        timeout_s: float = 5.0,
    ) -> PreparedPull:
        """Plans a pull for tickets that offer the same blocks again, and connects if needed, for at most `timeout_s`.

        The arguments are those of `pull`, for one owner and one cache group. Raises KVLinkError.
        """
        check_ticket(ticket)
        peer = self.connect(ticket, timeout_s)
        return PreparedPull(self, peer, ticket, copied(self._read_ids(into)), (tokens, layers))

    def release(self, ticket: Tickets | None = None, *, request_id: str | None = None) -> None:
        """Settles a request without reading its blocks, with the arguments and errors of `pull`. Does not block or
        connect: owners without a connection are settled in the background. An ended lease is no error."""
        if self._closed:
            raise ConfigError("this worker is closed")
        self._sources.release(parsed(ticket, request_id), self._timeout_s)

    def connect(self, ticket: Ticket, timeout_s: float = 5.0) -> Peer | None:
        """Connects before the first pull. Returns None if this rank reads nothing there. Raises KVLinkError."""
        deadline = time.monotonic() + checked(timeout_s)
        job = self._peers.connect(self._checked(ticket).worker_id, ticket.epoch, ticket.agent, deadline)
        return self._control.run(job, timeout_s + _CLOSE_S)  # the job itself ends in time

    def peers(self) -> list[Peer]:
        """Returns the owners that this worker is connected to."""
        return self._peers.all()

    def stats(self) -> WorkerStats:
        """Returns all statistics. It is meant for scrapes and too slow to call for every pull."""
        return gather(self.worker_id, self._engine, self.offers, self._peers, self._membership, self._pulls)

    def close(self) -> None:
        """Ends running pulls, offers and the membership. On return nothing accesses the pool. Idempotent."""
        if self._pid != os.getpid():
            return
        with self._closing:  # a second caller waits for the first
            if not self._closed:
                self._closed = True
                try:
                    self._opened.close()
                finally:
                    self._peers.close()

    async def _open_pulls(self, releaser: Releaser, observer: Callable[[bool], Observer] | None) -> Pulls:
        return Pulls(
            self._control, self._engine, self._peers, releaser.settle_by_agent, releaser.release, observer
        )

    def _close_engine(self) -> None:
        if hasattr(self, "_engine"):
            self._engine.close()

    def _leave(self) -> None:
        if hasattr(self, "_pulls"):
            self._pulls.close()
        if not hasattr(self, "_membership"):
            return
        try:
            self._control.run(self._end_calls(), _CLOSE_S)
        except KVLinkError as error:
            _log.warning("worker did not leave cleanly worker=%s error=%s", self.worker_id, error)

    async def _end_calls(self) -> None:
        if hasattr(self, "_peers"):
            self._peers.connects.close()
            self._peers.stop()
        if hasattr(self, "_pulls"):
            self._pulls.close_queue()
        await self._membership.leave()

    async def _join(self) -> WorkerCard:
        card = await self._membership.join(self.worker_id, self._engine)
        if card.epoch != self._engine.epoch:
            # The clock of this host went back. The lease table must have the epoch that readers get.
            self._engine.close()
            self._engine = Engine(self.pool, card.epoch + 1, self.config, self.worker_id)
            card = await self._membership.join(self.worker_id, self._engine)
        return card

    def _in_background(self, job: Coroutine[Any, Any, None], request_id: str, what: str) -> None:
        self._control.in_background(job, f"{what} failed request={request_id}", name="worker job")
