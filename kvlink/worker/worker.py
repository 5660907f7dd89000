# SPDX-License-Identifier: Apache-2.0
"""Implements Worker, which registers a block pool, offers requests, and pulls requests from other workers."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from functools import partial as bound
from typing import Any

from kvlink.config import WorkerConfig
from kvlink.config.timeouts import checked
from kvlink.control import ticket_signing
from kvlink.control.codec import CARD
from kvlink.errors import ConfigError, KVLinkError
from kvlink.monitoring import metrics
from kvlink.monitoring.worker_stats import Reporter, WorkerStats
from kvlink.runtime.background import ControlThread
from kvlink.runtime.names import check_kind, check_name
from kvlink.ticket import LeaseSeat, Ticket
from kvlink.transfer import soft_offers, spans
from kvlink.transfer.completion import each_ended, when_ended
from kvlink.transfer.device_work import DeviceWork, has_ended
from kvlink.transfer.engine import Engine, LeaseCounts, SoftLeaseCounts
from kvlink.transfer.group_ids import GroupIds, NumTokens, TokenRanges, copied, reader_of_ids
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.transfer.pool import BlockPool
from kvlink.transfer.pull import Observer, Pull
from kvlink.transfer.pull_request import PullSpec, start
from kvlink.transfer.pulls import Pulls
from kvlink.types import LeaseEvent, ReadyUnit, WorkerCard
from kvlink.worker.membership import WorkerMembership
from kvlink.worker.prefixes import PREFIX_TTL_S, SharedPrefix, SharedPrefixes
from kvlink.worker.prepared import PreparedPull, Reader, check_ticket
from kvlink.worker.reachability import advertised_host
from kvlink.worker.relay import Relay, Relays
from kvlink.worker.sources import Sources, Tickets, parsed
from kvlink.worker.stats import gather
from kvlink.worker.unread import Releaser, is_empty

_log = logging.getLogger("kvlink.worker")
_NEEDED: Any = None
_JOIN_S, _CLOSE_S = 10.0, 5.0
_DRAIN_POLL_S = 0.01


class Worker:
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
            self._peers.on_opened = self._membership.directory.channels.opened
            releaser = Releaser(self._peers, self._membership.directory, self._in_background)
            self._pulls = self._control.run(self._open_pulls(releaser, observer), _JOIN_S)
            self._sources = Sources(self._membership, pool.layout, self._checked, releaser)
            self._relays = Relays(
                pool, self._control, self.offers, self._sources, self._pulls, self._read_ids
            )
            self._prefixes = SharedPrefixes(
                self._engine, self.card, self._control, self._membership, self._peers, self._checked
            )
            self._membership.report = Reporter(self)
            if self.config.metrics_port:
                opened.callback(metrics.serve(self, self.config))
            opened.callback(_open_workers.discard, self)
            _open_workers.add(self)
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
        claimed, tickets = self._sources.of(ticket)
        want = PullSpec(block_ids, tokens, layers, settle)
        return self._pulls.begin(claimed, tickets, want, limit_s, complete=not partial, after=after)

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
        reader = Reader(self._peers, self._checked, self._pulls, self.pull, self._timeout_s)
        return PreparedPull(reader, peer, ticket, copied(self._read_ids(into)), (tokens, layers))

    def release(self, ticket: Tickets | None = None, *, request_id: str | None = None) -> None:
        """Settles a request without reading its blocks, with the arguments and errors of `pull`. Does not block or
        connect: owners without a connection are settled in the background. An ended lease is no error."""
        if self._closed:
            raise ConfigError("this worker is closed")
        self._sources.release(parsed(ticket, request_id), self._timeout_s)

    def sealed_card(self) -> bytes:
        """Returns this worker's card for readers that are no part of its deployment, which give it to `add_card`.

        It is secret: with `KVLINK_CHANNEL` set, whoever has it may connect.
        """
        return CARD.encode(self.card)

    def add_card(self, card: bytes) -> WorkerCard:
        """Makes an owner known that has a native channel and no agent, by its sealed card, and returns that card.

        Tickets of the owner can be pulled from then on. Add its new card when it has restarted. Raises ConfigError.
        """
        return self._control.run(self._add_card(card), _JOIN_S)

    async def _add_card(self, card: bytes) -> WorkerCard:
        return self._membership.directory.channels.add(card)

    def connect(self, ticket: Ticket, timeout_s: float = 5.0) -> Peer | None:
        """Connects before the first pull. Returns None if this rank reads nothing there. Raises KVLinkError."""
        deadline = time.monotonic() + checked(timeout_s)
        job = self._peers.connect(self._checked(ticket).worker_id, ticket.epoch, ticket.agent, deadline)
        return self._control.run(job, timeout_s + _CLOSE_S)  # the job itself ends in time

    def split(self, ticket: Ticket) -> list[Ticket]:
        """Returns a ticket for each seat of an offer of this worker, for readers that pull independently of each other.

        Use it with `offer(..., readers=n)`. The offer ends when all n have settled, or by its time to live.
        """
        return [self.offers.sign(replace(ticket, seats=(seat,))) for seat in ticket.seats]

    def relay(
        self,
        ticket: Ticket | str,
        into: GroupIds,
        *,
        readers: int = 1,
        fallback: Ticket | str | None = None,
        offer_as: str | None = None,
        publish: bool = False,
        ttl_s: float | None = None,
        batch_bytes: int | None = None,
        timeout_s: float | None = None,
    ) -> Relay:
        """Pulls a request, and offers its blocks on while they arrive.

        A chain of relays takes little more time than one pull, because each worker forwards a batch while it reads the
        next one. `kvlink.broadcast_parents` says who reads from whom.

        ticket: of the worker to read from, which may be a relay itself. Or a request id to claim at the coordinator.
        into: as for `pull`. Write these blocks again only after the pull has ended and the event of the offer has come.
        readers: how many workers read from this one. The ticket of the Relay has a seat for each, see `split`.
            With 0 nothing is offered.
        fallback: another ticket of the same tokens, usually of their first owner. If the first source fails, the rest
            is read from there, and the readers of this worker do not notice. Otherwise this ticket is released in the
            end, with all its seats: pass one of `split` if it has seats of others.
        offer_as: the request id of this worker's offer, by default that of `ticket`. At the coordinator, each relay
            needs an id of its own.
        publish, ttl_s: as for `offer`, for the offer of this worker.
        batch_bytes: how much is read before it is validated and announced. By default 1/64 of the request, and 256 KiB
            at least.
        timeout_s: deadline of the whole, as for `pull`. The sources share it: a first one that hangs costs half of it.
        Raises ConfigError for a pool on a GPU, for several cache groups and for a request that this worker reads from
        several owners; UnknownRequest if there is nothing to claim. The Relay raises what happens later.
        """
        limit_s = self._timeout_s if timeout_s is None else checked(timeout_s)
        sources, block_ids = self._relays.checked((ticket, fallback), into, limit_s)
        offered = None
        if readers:
            offered = self.offer(
                sources[0].request_id if offer_as is None else offer_as,
                block_ids,
                num_tokens=sources[0].num_tokens,
                ttl_s=ttl_s,
                readers=readers,
                ready=0,
                ready_unit=ReadyUnit.TOKENS,
                publish=publish,
            )
        return self._relays.begin(sources, block_ids, offered, batch_bytes, limit_s)

    def offer_soft(
        self,
        request_id: str,
        block_ids: GroupIds,
        *,
        num_tokens: NumTokens | None = None,
        digests: Sequence[bytes] = (),
        ttl_s: float | None = None,
        trace: str = "",
    ) -> Ticket:
        """Offers blocks without pinning them, and returns the ticket. Makes no remote call.

        Any number of readers pull with the ticket, as often as they like, and none settles it. The blocks remain in the
        engine's own cache. Before the engine gives one of them new content, it must call `revoke`; a reader that comes
        later gets StaleBlocks and recomputes. No event follows. A request that has grown is offered again: each call
        gives a ticket of its own, and older tickets of the request remain valid.

        The offer ends by `revoke`, by its `ttl_s`, with the worker, or when lease slots run out: the oldest soft offer
        then makes room, also for `offer`.

        block_ids: as for `offer`. Full blocks, whose content a finished step has written and no later step changes.
        num_tokens: as for `offer`; by default as many as fit, and no block may be partial.
        digests: of prefixes of the tokens at equal distances, usually one for each block; 8 to 64 bytes each. A reader
            finds the part that it has in common by `Ticket.common_tokens`.
        ttl_s: seconds after which the offer ends; by default it does not expire.
        trace: as for `offer`.
        Raises ConfigError for invalid arguments, and if offers that pin blocks have all lease slots.
        """
        return soft_offers.offer_soft(
            self._engine,
            self.card,
            request_id,
            block_ids,
            num_tokens,
            digests,
            ttl_s,
            trace,
            self.offers.sign,
        )

    def grant_soft_at(
        self,
        seat: LeaseSeat,
        block_ids: GroupIds,
        *,
        num_tokens: NumTokens | None = None,
        ttl_s: float | None = None,
    ) -> None:
        """Takes the lease of `offer_soft` at a seat that the caller chose, for schedulers that create tickets.

        seat: a slot of 1 to KVLINK_LEASE_SLOTS, a random nonce, and SHARED_SEAT. A soft offer that has the slot ends.
        Raises ConfigError as `offer_soft` does, and if an offer that pins blocks has the slot.
        """
        soft_offers.grant_soft_at(self._engine, seat, block_ids, num_tokens, ttl_s)

    def revoke(self, block_ids: GroupIds) -> int:
        """Ends the soft offers that cover one of these blocks. On return the blocks may get new content.

        Call it in each step, on every rank, with the blocks that the step gives new content, before the first kernel or
        load writes one. What readers read later does not validate, and over tcp it is not even sent. Offers that pin
        blocks are not affected. A block that no soft offer covers costs a few nanoseconds. array("I") or contiguous
        numpy uint32 is fastest. With several cache groups, one list or a list for each; a number names a block of every
        group.

        Returns the number of offers that ended. Raises ConfigError for anything but block ids.
        """
        return soft_offers.revoke(self._engine, block_ids)

    def soft_lease_counts(self) -> SoftLeaseCounts:
        """Returns the counts of this worker's soft offers."""
        return self._engine.soft_lease_counts()

    @property
    def secret(self) -> str:
        """Proves to coordinators that a call comes from this worker, where a scheduler in another process makes it."""
        return self._membership.secret

    def publish_prefix(self, ticket: Ticket, *, ttl_s: float = PREFIX_TTL_S) -> None:
        """Tells the coordinator that peers can pull with this soft ticket, until its lease ends. Does not block.

        Peers with the same model find it by their digests. It is withdrawn a few seconds after the lease has ended,
        and published again when the coordinator has lost it. A prefix of the same request id is replaced. A server of
        several ranks publishes from every rank, with a request id that no other server uses.

        ticket: from `offer_soft` of this worker, with digests.
        ttl_s: seconds until a coordinator forgets it if this worker does not publish it again, which it does earlier.
        Raises ConfigError for other tickets, without a coordinator, and if the pool's layout names no model.
        """
        self._prefixes.publish(ticket, ttl_s)

    def withdraw_prefix(self, request_id: str) -> None:
        """Withdraws a published prefix, whose offer goes on. Does nothing if it is not published. Does not block."""
        self._prefixes.withdraw(request_id)

    def find_prefix(
        self,
        digests: Sequence[bytes],
        *,
        tokens_per_digest: int,
        own_tokens: int = 0,
        most: int = 1,
        timeout_s: float = 1.0,
    ) -> Future[list[SharedPrefix]]:
        """Asks the coordinator which peers have the longest prefix of a prompt. Returns a future at once.

        The future has at most `most` peers, those on this host first, and none if no peer has more than `own_tokens`
        tokens. Their tickets are for `pull`. A peer may have evicted the blocks since: the pull then raises
        StaleBlocks, and the prompt is computed. A peer from which no pull has succeeded since one has failed is left
        out for a minute, unless no other peer has a prefix.

        digests: of the prompt's prefixes, as for `offer_soft`: the first covers `tokens_per_digest` tokens.
        own_tokens: how many of the first tokens this worker has in its own cache.
        The call raises ConfigError as `publish_prefix` does; the future raises CoordinatorError.
        """
        return self._prefixes.find(digests, tokens_per_digest, own_tokens, most, timeout_s)

    def events(self) -> list[LeaseEvent]:
        """Returns the offers that ended since the last call, whose blocks may be written again. Never blocks."""
        return self.offers.events()

    def lease_counts(self) -> LeaseCounts:
        """Returns the counts of this worker's offers by outcome."""
        return self._engine.lease_counts()

    def watch_events(self) -> AsyncIterator[LeaseEvent]:
        """Yields offers as they end, on the running event loop, until this worker is closed."""
        return when_ended(self._engine, self.offers.events)

    def watch_events_blocking(self, timeout_s: float | None = None) -> Iterator[LeaseEvent]:
        """Yields like `watch_events` on the calling thread, and ends if no offer has ended for `timeout_s` seconds."""
        limit_s = None if timeout_s is None else checked(timeout_s)
        return each_ended(self._engine, self.offers.events, limit_s)

    def peers(self) -> list[Peer]:
        """Returns the owners that this worker is connected to."""
        return self._peers.all()

    def stats(self) -> WorkerStats:
        """Returns all statistics. It is meant for scrapes and too slow to call for every pull."""
        return gather(self.worker_id, self._engine, self.offers, self._peers, self._membership, self._pulls)

    def drain(self, grace_s: float) -> bool:
        """Waits at most `grace_s` seconds until every offer that pins blocks has ended. Returns whether all have.

        Call it before `close`, when the server has ended its requests and takes no more: `close` ends the offers that
        are left, and their readers compute again. Offers can still be made and read meanwhile, and events be taken.
        Soft offers do not count. From the first call on the worker shows that it drains, also at the coordinator.
        """
        ends = time.monotonic() + checked(grace_s)
        self._control.on_loop("drain", self._membership.begin_drain)
        while self.lease_counts().active:
            if time.monotonic() >= ends:
                return False
            time.sleep(_DRAIN_POLL_S)
        return True

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


_open_workers: weakref.WeakSet[Worker] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for worker in list(_open_workers):
        worker.close()
