# SPDX-License-Identifier: Apache-2.0
"""Keeps the joined workers with their epochs and leases. Pure: takes the time as a value and returns changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.security import is_caller
from kvlink.control.values import Incarnation
from kvlink.coordinator.store import refusals
from kvlink.coordinator.store.waiting_claims import MAX_DUE
from kvlink.types import Joined, WorkerCard, WorkerChange

BEATS_PER_LEASE = 4
_LATE = 0.1
"""A delay below this fraction of a lease does not count as a stall, and loses no beat."""


def grant(last: Incarnation | None, card: WorkerCard, rejoin: bool) -> int:
    """Returns the epoch of a process that joins where `last` was the last known one.

    Raises RefusedError (REPLACED, and DENIED if the caller is another process).
    """
    if not is_caller(card.incarnation):
        raise refusals.not_the_caller(card.worker_id)
    if last is None:
        return max(1, card.epoch)
    if last.incarnation == card.incarnation:
        return last.epoch
    if rejoin and card.epoch <= last.epoch:
        raise refusals.replaced(card, last.epoch)
    return max(last.epoch + 1, card.epoch)


def num_bytes(card: WorkerCard) -> int:
    """Returns the most that a card takes in memory, and its worker beside it."""
    keys = [key for transport in card.transports for key in transport.pool_keys]
    planes = sum(len(layout.planes) for layout in card.layouts)
    return 16_384 + 256 * (planes + len(card.region_bytes) + len(keys)) + sum(map(len, keys))


class Members:
    """Keeps the joined workers, and the last epochs of a bounded number of workers that are gone."""

    def __init__(self, lease_s: float, limits: Limits) -> None:
        self._lease_s = lease_s
        self._limits = limits
        self._cards: dict[str, WorkerCard] = {}
        self.card_bytes = 0
        self._deadlines: Deadlines[str] = Deadlines()
        self._excused: set[str] = set()
        self._incarnations: OrderedDict[str, Incarnation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cards)

    def join(self, card: WorkerCard, rejoin: bool, now: float) -> tuple[int, list[WorkerChange]]:
        """Admits a process and returns its epoch. Raises RefusedError (REPLACED, TOO_MANY, DENIED)."""
        if card.worker_id not in self._cards and len(self._cards) >= self._limits.workers:
            raise refusals.too_many_workers(len(self._cards))
        before = self._cards.get(card.worker_id)
        card_bytes = self.card_bytes + num_bytes(card) - (num_bytes(before) if before else 0)
        if card_bytes > self._limits.card_bytes:
            raise refusals.too_large_cards(card, self._limits.card_bytes)
        last = self._incarnations.get(card.worker_id)
        epoch = grant(last, card, rejoin)
        assert last is None or epoch > last.epoch or (epoch, card.incarnation) == last[:2]
        card = replace(card, epoch=epoch)
        self.card_bytes = card_bytes
        self._cards[card.worker_id] = card
        self._renew(card.worker_id, now)
        self._remember(card)
        changes = [WorkerChange(Joined.DOWN, before)] if before and before.epoch != epoch else []
        return epoch, [*changes, WorkerChange(Joined.UP, card)] if before != card else changes

    def _remember(self, card: WorkerCard) -> None:
        self._incarnations[card.worker_id] = Incarnation(card.epoch, card.incarnation)
        self._incarnations.move_to_end(card.worker_id)
        while len(self._incarnations) > self._limits.remembered_epochs + len(self._cards):
            oldest = next(iter(self._incarnations))
            if oldest in self._cards:
                self._incarnations.move_to_end(oldest)
            else:
                del self._incarnations[oldest]

    def beat(self, worker_id: str, epoch: int, now: float) -> bool:
        """Renews a lease. Returns False if this epoch of the worker is not joined. Raises RefusedError (DENIED)."""
        if not self.runs(worker_id, epoch):
            return False
        self.check_caller(worker_id)
        self._renew(worker_id, now)
        return True

    def _renew(self, worker_id: str, now: float) -> None:
        self._deadlines.set(worker_id, now + self._lease_s)
        self._excused.discard(worker_id)

    def leave(self, worker_id: str, epoch: int) -> list[WorkerChange]:
        """Removes a worker unless it runs under another epoch. Raises RefusedError (DENIED)."""
        if not self.runs(worker_id, epoch):
            return []
        self.check_caller(worker_id)
        return [self._remove(worker_id)]

    def runs(self, worker_id: str, epoch: int) -> bool:
        """Returns whether exactly this epoch of the worker is joined."""
        card = self._cards.get(worker_id)
        return card is not None and card.epoch == epoch

    def check_caller(self, worker_id: str) -> None:
        """Raises RefusedError (DENIED) unless the caller is this joined worker. REQUIRES that it is joined."""
        if not is_caller(self._cards[worker_id].incarnation):
            raise refusals.not_the_caller(worker_id)

    def card(self, worker_id: str, epoch: int) -> WorkerCard:
        """Returns the card of a worker. Epoch 0 accepts any epoch. Raises RefusedError (UNKNOWN, RESTARTED)."""
        card = self._cards.get(worker_id)
        if card is None:
            raise refusals.not_joined(worker_id)
        if epoch not in (0, card.epoch):
            raise refusals.restarted(worker_id, epoch, card.epoch)
        return card

    def cards(self) -> Iterable[WorkerCard]:
        """Returns the cards of all joined workers."""
        return self._cards.values()

    def next_deadline(self) -> float:
        """Returns a time before which `expire` has nothing to do."""
        return self._deadlines.next()

    def expire(self, now: float, late_s: float = 0.0) -> list[WorkerChange]:
        """Removes some workers that stopped beating. `next_deadline` says whether there are more.

        A caller that is `late_s` seconds late, because it was paused, may have unread beats in its sockets. Each due
        worker then gets the time of one more beat, once.
        """
        changes = []
        for worker_id in self._deadlines.due(now, MAX_DUE):
            if late_s < self._lease_s * _LATE or worker_id in self._excused:
                changes.append(self._remove(worker_id))
                continue
            self._excused.add(worker_id)
            self._deadlines.set(worker_id, now + self._lease_s / BEATS_PER_LEASE)
        return changes

    def _remove(self, worker_id: str) -> WorkerChange:
        self._deadlines.discard(worker_id)
        self._excused.discard(worker_id)
        card = self._cards.pop(worker_id)
        self.card_bytes -= num_bytes(card)
        assert (self.card_bytes > 0) == bool(self._cards)
        return WorkerChange(Joined.DOWN, card)
