# SPDX-License-Identifier: Apache-2.0
"""Offers blocks on while they are being pulled, so that one request reaches many workers through each other."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from kvlink.config.timeouts import checked
from kvlink.errors import ConfigError
from kvlink.layout import rank_of
from kvlink.ticket import Ticket
from kvlink.transfer.group_ids import GroupIds, copied
from kvlink.types import ReadyUnit
from kvlink.worker.draining import Draining
from kvlink.worker.relay import Relay
from kvlink.worker.sources import parsed

if TYPE_CHECKING:
    from kvlink.worker.worker import Worker


class Relays(Draining):
    """The part of a Worker that takes part in broadcasts. Thread-safe."""

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
        worker = cast("Worker", self)
        limit_s = worker._timeout_s if timeout_s is None else checked(timeout_s)
        if worker.pool.gpu is not None or len(worker.pool.groups) > 1:  # before a claim uses up a ticket
            raise ConfigError(
                "a relay needs a pool of one cache group in host memory; this worker has another"
            )
        block_ids = copied(worker._read_ids(into))
        sources = [
            worker._checked(self._source(each, limit_s)) for each in (ticket, fallback) if each is not None
        ]
        request_id, num_tokens = sources[0].request_id, sources[0].num_tokens
        if any(each.ready_unit is ReadyUnit.LAYERS for each in sources):
            raise ConfigError(
                f"request {request_id}: a relay follows blocks or tokens, and this offer counts layers"
            )
        if any(each.num_tokens != num_tokens for each in sources):
            raise ConfigError(
                f"request {request_id}: `fallback` has {sources[1].num_tokens} tokens, and `ticket` {num_tokens}"
            )
        offered = None
        if readers:
            offered = worker.offer(
                request_id if offer_as is None else offer_as,
                block_ids,
                num_tokens=num_tokens,
                ttl_s=ttl_s,
                readers=readers,
                ready=0,
                ready_unit=ReadyUnit.TOKENS,
                publish=publish,
            )
        lease = 0 if offered is None else worker.offers.lease_of(offered)
        return Relay(worker._pulls.begin_relay(sources, block_ids, lease, batch_bytes, limit_s), offered)

    def _source(self, given: Ticket | str, timeout_s: float) -> Ticket:
        """Returns a ticket, parsed or claimed. Raises ConfigError, UnknownRequest, CoordinatorUnavailable."""
        if isinstance(ticket := parsed(given), Ticket):
            return ticket
        if not isinstance(ticket, str):
            raise ConfigError("a relay reads from one owner: pass one ticket, not a list")
        worker = cast("Worker", self)
        worker._membership.require_coordinator(f"request {ticket}: claiming by id")
        claim = worker._membership.claim(ticket, timeout_s, *rank_of(worker.pool.layout))
        found = self._control.run(claim)
        if len(found) != 1:
            raise ConfigError(
                f"request {ticket}: a relay reads from one owner, and {len(found)} ranks offer it"
            )
        return found[0]
