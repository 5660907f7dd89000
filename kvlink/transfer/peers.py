# SPDX-License-Identifier: Apache-2.0
"""Manages the owners that a decode worker reads from: their cards, the path to each, and the open connections."""

from __future__ import annotations

import asyncio
import itertools
import operator
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from kvlink.errors import KVLinkError, LayoutMismatch, StaleBlocks, StaleReason
from kvlink.layout import GroupsAssignment, assign_groups, owner_ranks
from kvlink.layout.groups import difference
from kvlink.runtime.background import off_loop
from kvlink.runtime.supervised import guarded, start_loop
from kvlink.transfer.engine import Connection, Engine
from kvlink.transfer.gpu_staging import bouncing_ends, warn_of_path
from kvlink.transfer.path_log import PathLog
from kvlink.transfer.path_memory import PathMemory, pause_s
from kvlink.transfer.path_stats import Path
from kvlink.transfer.peer import PathRefusedError, Peer, Refusal, Refusals, refuse_path
from kvlink.transfer.shared_connect import SharedConnects
from kvlink.types import PROTOCOL_VERSION, TransportCard, WorkerCard

_DRAIN_TICK_S = 0.02
_CHECKS = 16  # of older connections, whenever one is made
_TRIAL_S = 5.0
"""How long a look for a better path takes at most."""


class Directory(Protocol):
    """Finds cards and asks owners to admit a reader. The control plane implements it."""

    async def card(self, worker_id: str, epoch: int, agent: str, *, fresh: bool) -> WorkerCard:
        """Returns the card of a worker. `fresh` ignores a known card, because the worker may have restarted.

        Raises PeerUnreachable.
        """

    async def connect(
        self, card: WorkerCard, transport: str, hellos: Sequence[bytes]
    ) -> tuple[int, Sequence[bytes], Sequence[bytes], Sequence[bytes]]:
        """Returns the connection id, a reply per lane, and pool and lease keys, empty if they are those of the card."""


@dataclass(slots=True)
class Peers:
    """Connected owners by (worker_id, epoch). Any thread may call `get`, and the control loop the other methods."""

    engine: Engine
    directory: Directory
    connects: SharedConnects = field(init=False)
    on_lost: Callable[[Peer], object] = lambda _: None
    """Called when settles that were queued may have died with a connection."""
    on_opened: Callable[[Peer], object] = lambda _: None
    """Called with each owner that gets connected."""
    _peers: dict[tuple[str, int], Peer] = field(default_factory=dict)
    _epochs: dict[str, set[int]] = field(default_factory=dict)
    """The epochs of each worker in `_peers`."""
    _checked_in_turns: OrderedDict[tuple[str, int], None] = field(default_factory=OrderedDict)
    """The keys of `_peers`. The first one has waited longest for a check of its connection."""
    _retiring: dict[asyncio.Task[None], Peer] = field(default_factory=dict)
    memory: PathMemory = field(default_factory=PathMemory)
    _improving: dict[tuple[str, int], asyncio.Task[None]] = field(default_factory=dict)
    """The looks for a better path, beside the connections that work."""
    _path_log: PathLog = field(default_factory=PathLog)

    def __post_init__(self) -> None:
        """Registers callbacks. A forked child has no peers, because their connections belong to the parent."""
        self.connects = SharedConnects(self._connect)
        self.engine.on_forked = self._abandon
        self.engine.path_stats.is_live = self._is_live

    def get(self, worker_id: str, epoch: int) -> Peer | None:
        """Returns a peer whose connection worked when it was last used, or None."""
        return self._peers.get((worker_id, epoch))

    def all(self) -> list[Peer]:
        """Returns every connected owner."""
        return list(self._peers.values())

    async def connect(self, worker_id: str, epoch: int, agent: str, deadline: float) -> Peer | None:
        """Connects, or joins a running attempt. Returns None if this rank reads nothing from that owner.

        `deadline` refers to `time.monotonic()`. Raises KVLinkError.
        """
        peer = self._peers.get((worker_id, epoch))
        if peer is not None and not peer.connection.broken:
            return peer
        return await self.connects.connect((worker_id, epoch), agent, deadline)

    def _abandon(self) -> None:
        _abandoned.append(self._peers)
        self._forget_all()

    def _forget_all(self) -> None:
        self._peers, self._epochs, self._checked_in_turns = {}, {}, OrderedDict()

    def _is_live(self, path: Path) -> bool:
        """Returns whether a path leads to a connected owner."""
        peers = [self._peers[path.worker_id, epoch] for epoch in self._epochs.get(path.worker_id, ())]
        return any(peer.transport == path.transport and not peer.connection.broken for peer in peers)

    def close(self) -> None:
        """Closes every connection. Idempotent."""
        for peer in [*self._peers.values(), *self._retiring.values()]:  # a copy: the loop may change both
            peer.connection.close()
        self._forget_all()

    async def _connect(self, key: tuple[str, int], agent: str, timeout_s: float, fresh: bool) -> Peer | None:
        known = self._peers.get(key)
        if known is not None and known.connection.broken:
            self._judge(known)
        peer = await self._open(key, agent, timeout_s, fresh)
        if peer is not None:
            self._replace(key, peer)
            if peer.wants_better and key not in self._improving:
                self._improve_beside(key, agent)
        return peer

    def _improve_beside(self, key: tuple[str, int], agent: str) -> None:
        self._improving[key] = start_loop("better path", partial(self._improve, key, agent))

    def _judge(self, peer: Peer) -> None:
        """Remembers whether a connection that broke did its work."""
        before, peer.work_before = peer.work_before, None
        if before is not None:
            path = peer.card.worker_id, peer.transport
            valid, failed = map(operator.sub, self.engine.path_stats.work(*path), before)
            self.memory.ended(*path, valid, failed, time.monotonic())

    async def _improve(self, key: tuple[str, int], agent: str) -> None:
        """Looks for a better path, while pulls go on over the one that there is. A path that never works costs less
        and less."""
        for num_tries in itertools.count():
            await asyncio.sleep(pause_s(num_tries))
            peer = self._peers.get(key)
            if peer is None or not peer.wants_better:
                break
            with suppress(KVLinkError):
                found = await self._open(key, agent, _TRIAL_S, True, better_than=peer)
                if found is None:
                    continue
                if self._peers.get(key) is peer and found.is_better_than(peer):
                    self._replace(key, found)
                else:
                    found.connection.close()
        self._improving.pop(key, None)

    def stop(self) -> None:
        """Ends the looks for better paths, on the control loop."""
        for task in self._improving.values():
            task.cancel()

    async def _open(
        self,
        key: tuple[str, int],
        agent: str,
        timeout_s: float,
        fresh: bool,
        *,
        better_than: Peer | None = None,
    ) -> Peer | None:
        card = await self.directory.card(*key, agent, fresh=fresh)
        if card.epoch != key[1]:
            raise StaleBlocks(
                f"{key[0]} restarted: the ticket has epoch {key[1]}, and epoch {card.epoch} runs",
                StaleReason.RESTARTED,
            )
        assignment = self.assignment(card)
        if assignment is None:
            return None
        refusals = Refusals(card.worker_id)
        by_nic: list[str] = []
        opened: set[str] = set()
        candidates, put_off = self._put_off(key[0], self._candidates(card, refusals), refusals)
        if better_than is not None:
            candidates = _up_to(candidates, better_than)
        ends = time.monotonic() + timeout_s
        while candidates and (left_s := ends - time.monotonic()) > 0:
            name, offered = candidates.pop(0)
            is_verbs = name.removeprefix("fault+") == "verbs"
            connection = None
            try:
                with refuse_path():
                    connection = self.engine.open(name, offered.address, *key)
                # A network that drops all packets must leave time for another transport.
                path_s = left_s / 2 if is_verbs and candidates else left_s
                peer = await self._try(connection, card, name, offered, assignment, refusals.rows, path_s)
            except PathRefusedError as refused:
                refusals.note(name, refused.error)
                if connection is not None and connection.lost_large and name not in opened:
                    candidates.insert(0, (name, offered))  # which sends smaller packets now
                by_nic += [name] if is_verbs else []
                opened |= {name} if connection is not None else set()
                continue
            peer.is_fallback = put_off or (
                name not in by_nic and bool(by_nic) and self._is_fallback(key, by_nic, opened)
            )
            return peer
        for name, _ in candidates:
            refusals.note(name, "no time was left to try it")
        raise refusals.error()

    def _put_off(
        self, worker_id: str, candidates: list[tuple[str, TransportCard]], refusals: Refusals
    ) -> tuple[list[tuple[str, TransportCard]], bool]:
        """Returns the candidates without those that failed their work lately, unless all did, and whether some did."""
        now = time.monotonic()
        reasons = {name: self.memory.given_up(worker_id, name, now) for name, _ in candidates}
        rest = [candidate for candidate in candidates if not reasons[candidate[0]]]
        if not rest or len(rest) == len(candidates):
            return candidates, False
        for name, reason in reasons.items():
            if reason:
                refusals.note(name, reason)
        return rest, True

    def _is_fallback(self, key: tuple[str, int], by_nic: Sequence[str], opened: set[str]) -> bool:
        """Returns whether the refused transports `by_nic` may work later.

        They may if one worked before, if NICs are missing here, or if only the owner refused.
        """
        known = self._peers.get(key)
        worked = known is not None and (known.is_fallback or known.transport in by_nic)
        return worked or not opened.isdisjoint(by_nic) or any(port.away for port in self.engine.ports())

    def assignment(self, card: WorkerCard) -> GroupsAssignment | None:
        """Returns what this rank reads from an owner, or None if it reads nothing. Raises LayoutMismatch."""
        if card.protocol_version != PROTOCOL_VERSION:
            raise LayoutMismatch(
                f"{card.worker_id} speaks protocol {card.protocol_version}, this worker {PROTOCOL_VERSION}"
            )
        own = self.engine.pool.groups
        found = difference(own, card.layouts)
        if found is not None:
            raise LayoutMismatch(f"{card.worker_id}: {found}")
        return assign_groups(own, card.layouts)

    def _candidates(self, card: WorkerCard, refusals: Refusals) -> list[tuple[str, TransportCard]]:
        """Returns the transports that both ends have, in this worker's order.

        A fault wrapper at one end connects to the plain transport at the other.
        """
        offered = {own.name.removeprefix("fault+"): own for own in card.transports}
        candidates = []
        for own in self.engine.cards():
            theirs = offered.get(own.name.removeprefix("fault+"))
            if theirs is None:
                refusals.note(own.name, f"{card.worker_id} does not offer it")
            elif theirs.refused:
                refusals.note(own.name, f"{card.worker_id} cannot export its pool: {theirs.refused}")
            else:
                candidates.append((own.name, theirs))
        return candidates

    async def _try(
        self,
        connection: Connection,
        card: WorkerCard,
        name: str,
        offered: TransportCard,
        assignment: GroupsAssignment,
        refused: Sequence[Refusal],
        timeout_s: float,
    ) -> Peer:
        ends = time.monotonic() + timeout_s
        try:
            hellos = connection.hellos()
            with refuse_path(keep_retryable=True):
                number, replies, pool_keys, lease_keys = await self.directory.connect(
                    card, offered.name, hellos
                )
            keys = (pool_keys or offered.pool_keys, lease_keys or offered.lease_keys)
            left_s = max(ends - time.monotonic(), 0.0)  # without what the owner's agent took
            with refuse_path():
                regions = await off_loop(connection.establish, number, replies, *keys, card.epoch, left_s)
            planners = self.engine.planners(card.layouts, card.region_bytes, regions, assignment.heads)
        except BaseException:
            connection.close()
            raise
        left_out = [*map(str, self.engine.nics_left_out)]
        left_out += [f"{port.name}: {port.away}" for port in self.engine.ports() if port.away]
        bounces_at = bouncing_ends(name in self.engine.bounces, offered.bounces)
        if bounces_at:
            reasons = [f"not {refusal.transport}: {refusal.reason}" for refusal in refused]
            warn_of_path(card.worker_id, name, bounces_at, reasons)
        return Peer(
            card,
            name,
            connection,
            planners,
            assignment,
            owner_ranks(self.engine.pool.groups, card.layouts),
            tuple(refused),
            tuple(left_out),
            bounces_at,
            model=self.engine.pool.model,
            work_before=self.engine.path_stats.work(card.worker_id, name),
        )

    def _replace(self, key: tuple[str, int], peer: Peer) -> None:
        """Adds a peer and retires its predecessor, the peers of older epochs of the same worker, and broken ones.

        Connecting must not take longer with many peers, so only some are checked, in turns.
        """
        for known in [(key[0], epoch) for epoch in self._epochs.get(key[0], ()) if epoch <= key[1]]:
            self._drop(known)
        for known in [*itertools.islice(self._checked_in_turns, _CHECKS)]:
            self._checked_in_turns.move_to_end(known)
            if self._peers[known].connection.broken:
                self._drop(known)
        self._peers[key] = peer
        self._epochs.setdefault(key[0], set()).add(key[1])
        self._checked_in_turns[key] = None
        self._path_log.opened(peer)
        self.on_opened(peer)

    def with_connection(self, token: int) -> list[Peer]:
        """Returns the owner to which a connection leads, also while that is being closed."""
        peers = [*self._peers.values(), *self._retiring.values()]
        return [peer for peer in peers if peer.connection.token == token]

    def _drop(self, key: tuple[str, int]) -> None:
        epochs = self._epochs[key[0]]
        epochs.discard(key[1])
        if not epochs:
            del self._epochs[key[0]]
        del self._checked_in_turns[key]
        self._retire(self._peers.pop(key))

    def _retire(self, peer: Peer) -> None:
        """Closes a connection after the pulls on its other lanes have ended."""
        task = start_loop("retired connection", partial(self._close_when_idle, peer))
        self._retiring[task] = peer
        task.add_done_callback(guarded("connection retired", self._retiring.pop))

    async def _close_when_idle(self, peer: Peer) -> None:
        while not peer.connection.idle:
            await asyncio.sleep(_DRAIN_TICK_S)
        peer.connection.close()
        self.on_lost(peer)


def _up_to(candidates: list[tuple[str, TransportCard]], peer: Peer) -> list[tuple[str, TransportCard]]:
    """Returns the transports that are better than that of a peer, and that one, too, if lanes of it are missing."""
    names = [name for name, _ in candidates]
    end = names.index(peer.transport) if peer.transport in names else 0
    return candidates[: end + (peer.connection.num_missing > 0)]


_abandoned: list[dict[tuple[str, int], Peer]] = []
