# SPDX-License-Identifier: Apache-2.0
"""Tells peers which prefixes are in this worker's cache, and finds prefixes in the caches of peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from kvlink.config.timeouts import checked
from kvlink.control.limits import MAX_FOUND, MAX_PREFIX_KEYS, MAX_PREFIX_TICKET_BYTES, MAX_TTL_S
from kvlink.control.values import KEY_BYTES, FoundPrefix, Prefix, PrefixQuery
from kvlink.errors import AccessDenied, ConfigError
from kvlink.layout.scope import cache_scope
from kvlink.runtime.background import ControlThread
from kvlink.ticket import Ticket, check_request_id
from kvlink.transfer.engine import Engine
from kvlink.transfer.peers import Peers
from kvlink.types import WorkerCard
from kvlink.worker.membership import WorkerMembership
from kvlink.worker.prefix_choice import WatchedSources

PREFIX_TTL_S = 600.0
"""Seconds until a coordinator forgets a prefix that its worker does not publish again."""


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


class SharedPrefixes:
    """Shares cached prefixes of one worker through the coordinator. Thread-safe.

    `checked` returns a ticket that the worker may use, and raises AccessDenied for any other.
    """

    def __init__(
        self,
        engine: Engine,
        card: WorkerCard,
        control: ControlThread,
        membership: WorkerMembership,
        peers: Peers,
        checked: Callable[[Ticket], Ticket],
    ) -> None:
        self._core, self._card, self._control = engine.core, card, control
        self._membership, self._checked = membership, checked
        self._pool = engine.pool

        def outcomes(worker_id: str) -> tuple[int, int]:
            good, failed = engine.path_stats.outcomes(worker_id)
            return good, failed + peers.connects.failed[worker_id]

        self._sources = WatchedSources(outcomes)
        """Belongs to the control loop."""

    def publish(self, ticket: Ticket, ttl_s: float) -> None:
        """Implements `Worker.publish_prefix`."""
        what = f"request {ticket.request_id}: publishing a prefix"
        self._membership.require_coordinator(what)
        prefix = _prefix(ticket, cache_scope(self._pool.groups, self._pool.model), ttl_s, what)
        if (ticket.worker_id, ticket.epoch) != (self._card.worker_id, self._card.epoch):
            raise ConfigError(f"{what}: the ticket is of {ticket.worker_id}; its owner can publish it")
        core, seat = self._core, ticket.seats[0]
        self._on_loop(
            self._membership.publish_prefix, prefix, lambda: core.holds_lease(seat.slot, seat.nonce)
        )

    def withdraw(self, request_id: str) -> None:
        """Implements `Worker.withdraw_prefix`."""
        check_request_id(request_id)
        self._on_loop(self._membership.withdraw_prefix, request_id)

    def find(
        self,
        digests: Sequence[bytes],
        tokens_per_digest: int,
        own_tokens: int,
        most: int,
        timeout_s: float,
    ) -> Future[list[SharedPrefix]]:
        """Implements `Worker.find_prefix`."""
        self._membership.require_coordinator("finding a prefix")
        if tokens_per_digest < 1 or own_tokens < 0 or not 1 <= most <= MAX_FOUND:
            raise ConfigError(
                f"finding a prefix: tokens_per_digest must be 1 or more and not {tokens_per_digest}, own_tokens 0 or "
                f"more and not {own_tokens}, and most 1 to {MAX_FOUND} and not {most}"
            )
        limit_s = checked(timeout_s)
        mine = digests[:MAX_PREFIX_KEYS]
        if len(mine) * tokens_per_digest <= own_tokens:
            nothing: Future[list[SharedPrefix]] = Future()
            nothing.set_result([])
            return nothing
        keys = b"".join(_key(each) for each in mine)
        more_than = own_tokens // tokens_per_digest
        query = PrefixQuery(
            cache_scope(self._pool.groups, self._pool.model),
            tokens_per_digest,
            keys,
            more_than,
            most,
            self._card.worker_id,
        )

        async def find() -> list[SharedPrefix]:
            sources = self._sources
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
