# SPDX-License-Identifier: Apache-2.0
"""Tells peers which prefixes are in this worker's cache, and finds prefixes in the caches of peers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvlink.config.timeouts import checked
from kvlink.control.limits import MAX_FOUND, MAX_PREFIX_KEYS, MAX_PREFIX_TICKET_BYTES, MAX_TTL_S
from kvlink.control.prefix_values import KEY_BYTES, FoundPrefix, Prefix, PrefixQuery
from kvlink.errors import AccessDenied, ConfigError
from kvlink.layout.model_identity import cache_scope
from kvlink.runtime.background import ControlThread
from kvlink.ticket import Ticket, check_request_id
from kvlink.transfer.peers import Peers
from kvlink.transfer.pool import BlockPool
from kvlink.worker.membership import WorkerMembership
from kvlink.worker.prefix_choice import WatchedSources
from kvlink.worker.soft_leases import SoftLeases

_TTL_S = 600.0


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A prefix of a prompt that a server has in its cache. `tickets` has one for each rank of the server.

    The first `num_tokens` tokens have the same digests in every ticket as in the prompt.
    """

    num_tokens: int
    tickets: tuple[Ticket, ...]

    def __repr__(self) -> str:
        """Omits the secrets."""
        owners = ", ".join(ticket.worker_id for ticket in self.tickets)
        return f"SharedPrefix({self.num_tokens} tokens on {owners})"


class SharedPrefixes(SoftLeases):
    """The part of a Worker that shares cached prefixes through the coordinator. Thread-safe."""

    pool: BlockPool
    _membership: WorkerMembership
    _control: ControlThread
    _peers: Peers
    _checked: Callable[[Ticket], Ticket]

    @property
    def secret(self) -> str:
        """Proves to coordinators that a call comes from this worker, where a scheduler in another process makes it."""
        return self._membership.secret

    def publish_prefix(self, ticket: Ticket, *, ttl_s: float = _TTL_S) -> None:
        """Tells the coordinator that peers can pull with this soft ticket, until its lease ends. Does not block.

        Peers with the same model find it by their digests. It is withdrawn a few seconds after the lease has ended,
        and published again when the coordinator has lost it. A prefix of the same request id is replaced. A server of
        several ranks publishes from every rank, with a request id that no other server uses.

        ticket: from `offer_soft` of this worker, with digests.
        ttl_s: seconds until a coordinator forgets it if this worker does not publish it again, which it does earlier.
        Raises ConfigError for other tickets, without a coordinator, and if the pool's layout names no model.
        """
        what = f"request {ticket.request_id}: publishing a prefix"
        self._membership.require_coordinator(what)
        prefix = _prefix(ticket, cache_scope(self.pool.groups, self.pool.model), ttl_s, what)
        if (ticket.worker_id, ticket.epoch) != (self.card.worker_id, self.card.epoch):
            raise ConfigError(f"{what}: the ticket is of {ticket.worker_id}; its owner can publish it")
        core, seat = self._engine.core, ticket.seats[0]
        self._on_loop(
            self._membership.publish_prefix, prefix, lambda: core.holds_lease(seat.slot, seat.nonce)
        )

    def withdraw_prefix(self, request_id: str) -> None:
        """Withdraws a published prefix, whose offer goes on. Does nothing if it is not published. Does not block."""
        check_request_id(request_id)
        self._on_loop(self._membership.withdraw_prefix, request_id)

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
        self._membership.require_coordinator("finding a prefix")
        if tokens_per_digest < 1 or own_tokens < 0 or not 1 <= most <= MAX_FOUND:
            raise ConfigError(
                f"finding a prefix: tokens_per_digest must be 1 or more and not {tokens_per_digest}, own_tokens 0 or "
                f"more and not {own_tokens}, and most 1 to {MAX_FOUND} and not {most}"
            )
        scope, limit_s = cache_scope(self.pool.groups, self.pool.model), checked(timeout_s)
        mine = digests[:MAX_PREFIX_KEYS]
        if len(mine) * tokens_per_digest <= own_tokens:
            nothing: Future[list[SharedPrefix]] = Future()
            nothing.set_result([])
            return nothing
        keys = b"".join(_key(each) for each in mine)
        more_than = own_tokens // tokens_per_digest
        query = PrefixQuery(scope, tokens_per_digest, keys, more_than, most, self.card.worker_id)

        async def find() -> list[SharedPrefix]:
            sources = self._sources_of_prefixes
            found = await self._membership.find_prefix(query._replace(last=sources.last()), limit_s)
            usable = []
            for each in found:
                prefix = _usable(each, mine, tokens_per_digest, self._checked)
                num_tokens = 0 if prefix is None else prefix.num_tokens
                if prefix is not None and num_tokens > own_tokens:
                    usable.append(prefix)
                    sources.found(each.worker_ids)
                if num_tokens < each.num_keys * tokens_per_digest:
                    sources.lied(each.worker_ids)
            return usable

        return self._control.submit(find())

    @functools.cached_property
    def _sources_of_prefixes(self) -> WatchedSources:
        """Belongs to the control loop."""

        def outcomes(worker_id: str) -> tuple[int, int]:
            good, failed = self._engine.path_stats.outcomes(worker_id)
            return good, failed + self._peers.connects.failed[worker_id]

        return WatchedSources(outcomes)

    def _on_loop(self, call: Callable[..., None], *args: object) -> None:
        self._control.on_loop("published prefix", call, *args)


def _key(digest: bytes) -> bytes:
    if len(digest) < KEY_BYTES:
        raise ConfigError(f"digests must have {KEY_BYTES} bytes or more, and one has {len(digest)}")
    return digest[:KEY_BYTES]


def _prefix(ticket: Ticket, scope: bytes, ttl_s: float, what: str) -> Prefix:
    if not ticket.soft or ticket.digests is None:
        raise ConfigError(f"{what} needs a ticket of offer_soft with digests")
    if not 0 < ttl_s <= MAX_TTL_S:
        raise ConfigError(f"{what}: ttl_s must be in (0, {MAX_TTL_S:.0f}], not {ttl_s}")
    digests, blob = ticket.digests, ticket.to_bytes()
    if len(digests) > MAX_PREFIX_KEYS or len(blob) > MAX_PREFIX_TICKET_BYTES:
        raise ConfigError(
            f"{what}: {len(digests)} digests and {len(blob)} bytes are too many, at most {MAX_PREFIX_KEYS} and "
            f"{MAX_PREFIX_TICKET_BYTES} are possible; offer digests of longer pieces"
        )
    keys = b"".join(digests[index][:KEY_BYTES] for index in range(len(digests)))
    step = ticket.num_tokens // len(digests)
    return Prefix(ticket.request_id, ttl_s, ticket.rank, ticket.num_ranks, scope, step, keys, blob)


def _usable(
    found: FoundPrefix, digests: Sequence[bytes], step: int, check: Callable[[Ticket], Ticket]
) -> SharedPrefix | None:
    """Returns what the tickets have in common with the prompt by their own digests. The directory only hints at it.

    A worker publishes tickets of its own blocks only, or others would be blamed for it.
    """
    try:
        tickets = tuple(check(Ticket.from_bytes(blob)) for blob in found.tickets)
    except (ConfigError, AccessDenied):
        return None
    for ticket in tickets:
        if not ticket.soft or ticket.digests is None or ticket.num_tokens != step * len(ticket.digests):
            return None
    if found.worker_ids and tuple(ticket.worker_id for ticket in tickets) != found.worker_ids:
        return None
    return SharedPrefix(min(ticket.common_tokens(digests) for ticket in tickets), tickets)
