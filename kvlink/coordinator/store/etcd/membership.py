# SPDX-License-Identifier: Apache-2.0
"""Keeps the joined workers in etcd. All keys of a worker have one lease, and compare-and-set grants its epoch."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from typing import NamedTuple

from kvlink.control.codec import StoredRecords
from kvlink.control.limits import Limits
from kvlink.control.refusal import Reason, RefusedError, named
from kvlink.control.security import is_caller
from kvlink.control.values import Incarnation
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.etcd.api import Etcd, delete, get, leased, put, unchanged
from kvlink.coordinator.store.etcd.keys import Keys
from kvlink.coordinator.store.etcd.mirror import Member, Mirror
from kvlink.coordinator.store.etcd.sync import Sync
from kvlink.coordinator.store.members import grant, num_bytes
from kvlink.errors import KVLinkError
from kvlink.runtime.supervised import start_job, survived
from kvlink.types import WorkerCard
from kvlink.v1 import etcd_pb2 as pb

_PRUNE_AT_ONCE = 60
_TOGETHER_S = 0.05
"""A renewal waits this long for others, because each stream to etcd costs a millisecond of CPU."""
_RENEWAL_PAUSES_S = (0.05, 0.2, 0.0)
MAX_TRIES = 16
"""Attempts of a write that fails because of other writes or a mirror that lags behind. The caller may retry."""


class _Seen(NamedTuple):
    """Holds what a majority agrees on about one worker_id."""

    incarnation: Incarnation | None
    incarnation_revision: int
    member: Member | None
    card: bytes

    @property
    def member_revision(self) -> int:
        return self.member.revision if self.member else 0


def _check_caller(member: Member) -> Member:
    if not is_caller(member.card.incarnation):
        raise refusals.not_the_caller(member.card.worker_id)
    return member


class Membership:
    """Joins, renews and removes workers in etcd. Raises RefusedError, CoordinatorUnavailable."""

    def __init__(
        self, etcd: Etcd, layout: Keys, mirror: Mirror, sync: Sync, lease_s: float, limits: Limits
    ) -> None:
        self._etcd = etcd
        self._layout = layout
        self._mirror = mirror
        self._sync = sync
        self._ttl_s = math.ceil(lease_s)
        self._limits = limits
        self._renewing: dict[int, asyncio.Future[bool]] = {}
        self._renewal: asyncio.Task[None] | None = None

    async def join(self, card: WorkerCard, rejoin: bool) -> int:
        """Implements Store.join. The same process keeps its lease; another process of the name gets a new one."""
        members = self._mirror.members
        if card.worker_id not in members and len(members) >= self._limits.workers:
            raise refusals.too_many_workers(len(members))
        before = num_bytes(members[card.worker_id].card) if card.worker_id in members else 0
        if self._mirror.card_bytes + num_bytes(card) - before > self._limits.card_bytes:
            raise refusals.too_large_cards(card, self._limits.card_bytes)
        for _ in range(MAX_TRIES):
            seen = await self._look(card.worker_id)
            epoch = grant(seen.incarnation, card, rejoin)
            blob = StoredRecords.CARD.encode(replace(card, epoch=epoch))
            lease = await self._lease_to_keep(seen, card)
            if lease and seen.card == blob and self._mirror.members.get(card.worker_id) == seen.member:
                return epoch
            if await self._write(seen, Incarnation(epoch, card.incarnation), blob, lease):
                await self._prune()
                return epoch
        raise refusals.write_conflict(f"worker {named(card.worker_id)}", MAX_TRIES)

    async def _write(self, seen: _Seen, incarnation: Incarnation, card: bytes, lease: int) -> bool:
        """Writes a joining worker. Returns False if another write came first. `lease` 0 means a new lease."""
        worker_id = StoredRecords.CARD.decode(card).worker_id
        epoch_key, worker_key = self._layout.epoch(worker_id), self._layout.worker(worker_id)
        lease_now = lease or await self._etcd.grant(self._ttl_s)  # an unused lease expires
        done = await self._etcd.commit(
            pb.TxnRequest(
                compare=[
                    unchanged(epoch_key, seen.incarnation_revision),
                    unchanged(worker_key, seen.member_revision),
                ],
                success=[
                    put(epoch_key, StoredRecords.INCARNATION.encode(incarnation)),
                    put(worker_key, card, lease_now),
                ],
            )
        )
        if not done.succeeded:
            return False
        if not lease and seen.member is not None:
            await self._end(seen.member.lease)
        else:
            await self._sync.reached(done.header.revision)
        return True

    async def beat(self, worker_id: str, epoch: int) -> bool:
        """Implements Store.beat."""
        try:
            member = await self.own(worker_id, epoch)
        except RefusedError as refused:
            if refused.reason in (Reason.NOT_JOINED, Reason.RESTARTED):
                return False
            raise
        return await self._renew(member.lease)

    async def leave(self, worker_id: str, epoch: int) -> None:
        """Implements Store.leave."""
        seen = await self._look(worker_id)
        if seen.member is None or seen.member.card.epoch != epoch:
            return
        _check_caller(seen.member)
        worker_key, epoch_key = self._layout.worker(worker_id), self._layout.epoch(worker_id)
        incarnation = Incarnation(epoch, seen.member.card.incarnation, left=True)
        done = await self._etcd.commit(
            pb.TxnRequest(
                compare=[leased(worker_key, seen.member.lease)],
                success=[delete(worker_key), put(epoch_key, StoredRecords.INCARNATION.encode(incarnation))],
            )
        )
        if done.succeeded:
            await self._end(seen.member.lease)

    async def member(self, worker_id: str, epoch: int, absent: Reason = Reason.UNKNOWN) -> Member:
        """Returns a joined worker. Epoch 0 accepts any epoch. RefusedError: `absent`, RESTARTED.

        It asks etcd if the mirror does not have the worker under this epoch.
        """
        member = self._mirror.members.get(worker_id)
        if member is None or epoch not in (0, member.card.epoch):
            member = (await self._look(worker_id)).member
        if member is None:
            raise refusals.not_joined(worker_id, absent)
        if epoch not in (0, member.card.epoch):
            raise refusals.restarted(worker_id, epoch, member.card.epoch)
        return member

    async def own(self, worker_id: str, epoch: int) -> Member:
        """Returns a joined worker whose process is the caller. RefusedError: NOT_JOINED, RESTARTED, DENIED."""
        member = await self.member(worker_id, epoch, Reason.NOT_JOINED)
        if member.card.epoch != epoch:  # 0 stands for any epoch only where a worker is looked up
            raise refusals.restarted(worker_id, epoch, member.card.epoch)
        return _check_caller(member)

    async def _look(self, worker_id: str) -> _Seen:
        keys = (self._layout.epoch(worker_id), self._layout.worker(worker_id))
        done = await self._etcd.commit(pb.TxnRequest(success=[get(key) for key in keys]))
        (incarnation,), (card,) = (response.response_range.kvs or (None,) for response in done.responses)
        return _Seen(
            StoredRecords.INCARNATION.decode(incarnation.value) if incarnation else None,
            incarnation.mod_revision if incarnation else 0,
            Member(StoredRecords.CARD.decode(card.value), card.lease, card.mod_revision) if card else None,
            card.value if card else b"",
        )

    async def _lease_to_keep(self, seen: _Seen, card: WorkerCard) -> int:
        """Returns the lease of the same process if it still runs, else 0."""
        member = seen.member
        if member is None or member.card.incarnation != card.incarnation:
            return 0
        return member.lease if await self._renew(member.lease) else 0

    async def _end(self, lease: int) -> None:
        """Ends a lease with its keys. Returns when the mirror has seen their deletion."""
        await self._etcd.revoke(lease)
        await self._sync.pulse()

    async def close(self) -> None:
        """Stops renewing. Closing again has no effect."""
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.gather(self._renewal, return_exceptions=True)

    def _renew(self, lease: int) -> asyncio.Future[bool]:
        """Renews a lease and returns whether it exists. Renewals within `_TOGETHER_S` are sent together."""
        renewing = self._renewing.get(lease)
        if renewing is None:
            renewing = self._renewing[lease] = asyncio.get_running_loop().create_future()
            if self._renewal is None or self._renewal.done():
                self._renewal = start_job("lease renewals", self._renew_all())
        return asyncio.shield(renewing)

    async def _renew_all(self) -> None:
        while self._renewing:
            await asyncio.sleep(_TOGETHER_S)
            batch, self._renewing = self._renewing, {}
            alive: set[int] | Exception = set()
            for pause_s in _RENEWAL_PAUSES_S:
                try:
                    alive = await self._etcd.keep_alive(batch)
                    break
                except Exception as error:
                    alive = error
                    if not isinstance(error, KVLinkError):
                        survived("lease renewals", error)
                await asyncio.sleep(pause_s)
            for lease, waiting in batch.items():
                if isinstance(alive, Exception):
                    waiting.set_exception(alive)
                    waiting.exception()  # marks it as retrieved, because the caller may be gone
                else:
                    waiting.set_result(lease in alive)

    async def _prune(self) -> None:
        """Deletes the oldest epochs of workers that are gone if there are too many."""
        incarnations, members = self._mirror.incarnations, self._mirror.members
        if len(incarnations) <= self._limits.remembered_epochs + len(members):
            return
        gone = sorted((revision, name) for name, (_, revision) in incarnations.items() if name not in members)
        ops = [delete(self._layout.epoch(name)) for _, name in gone[:_PRUNE_AT_ONCE]]
        await self._etcd.commit(pb.TxnRequest(success=ops))
