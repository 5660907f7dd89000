# SPDX-License-Identifier: Apache-2.0
"""Who is joined, under which epoch, until when. Pure: takes the time as a value, returns what changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from kvlink.control.deadlines import Deadlines
from kvlink.control.limits import Limits
from kvlink.control.refusal import Reason, Refused, named
from kvlink.types import Joined, WorkerCard, WorkerChange


class _Life(NamedTuple):
    """The last known process of a worker_id."""

    epoch: int
    incarnation: bytes


class Members:
    """The joined workers, and the last epoch of those that are gone (bounded, oldest forgotten first)."""

    def __init__(self, lease_s: float, limits: Limits) -> None:
        self._lease_s = lease_s
        self._limits = limits
        self._cards: dict[str, WorkerCard] = {}
        self._deadlines: Deadlines[str] = Deadlines()
        self._lives: OrderedDict[str, _Life] = OrderedDict()

    def __len__(self) -> int:
        return len(self._cards)

    def join(self, card: WorkerCard, rejoin: bool, now: float) -> tuple[int, list[WorkerChange]]:
        """Admits a process and returns its epoch. Raises Refused (REPLACED, TOO_MANY)."""
        if card.worker_id not in self._cards and len(self._cards) >= self._limits.workers:
            raise Refused(Reason.TOO_MANY, f"{len(self._cards)} workers have joined, which is the limit")
        epoch = self._grant(card, rejoin)
        card = replace(card, epoch=epoch)
        before = self._cards.get(card.worker_id)
        self._cards[card.worker_id] = card
        self._deadlines.set(card.worker_id, now + self._lease_s)
        self._remember(card)
        changes = [WorkerChange(Joined.DOWN, before)] if before and before.epoch != epoch else []
        return epoch, [*changes, WorkerChange(Joined.UP, card)] if before != card else changes

    def _grant(self, card: WorkerCard, rejoin: bool) -> int:
        life = self._lives.get(card.worker_id)
        if life is None:
            return max(1, card.epoch)
        if life.incarnation == card.incarnation:
            return life.epoch
        if rejoin and card.epoch <= life.epoch:
            raise Refused(
                Reason.REPLACED,
                f"worker {named(card.worker_id)} epoch {card.epoch} was replaced by another process, "
                f"epoch {life.epoch}; give every worker its own worker_id",
            )
        return max(life.epoch + 1, card.epoch)

    def _remember(self, card: WorkerCard) -> None:
        self._lives[card.worker_id] = _Life(card.epoch, card.incarnation)
        self._lives.move_to_end(card.worker_id)
        while len(self._lives) > self._limits.remembered_epochs + len(self._cards):
            oldest = next(iter(self._lives))
            if oldest in self._cards:
                self._lives.move_to_end(oldest)
            else:
                del self._lives[oldest]

    def beat(self, worker_id: str, epoch: int, now: float) -> bool:
        """Renews a lease. False: this worker and epoch is not joined."""
        if not self.runs(worker_id, epoch):
            return False
        self._deadlines.set(worker_id, now + self._lease_s)
        return True

    def leave(self, worker_id: str, epoch: int) -> list[WorkerChange]:
        """Removes a worker unless it runs under another epoch by now."""
        return [self._remove(worker_id)] if self.runs(worker_id, epoch) else []

    def runs(self, worker_id: str, epoch: int) -> bool:
        """Whether exactly this life of the worker is joined."""
        card = self._cards.get(worker_id)
        return card is not None and card.epoch == epoch

    def card(self, worker_id: str, epoch: int) -> WorkerCard:
        """The card of a worker, of that epoch unless 0. Raises Refused (UNKNOWN, RESTARTED)."""
        card = self._cards.get(worker_id)
        if card is None:
            raise Refused(
                Reason.UNKNOWN,
                f"worker {named(worker_id)} is not joined: it never was, left, or stopped beating",
            )
        if epoch not in (0, card.epoch):
            raise Refused(
                Reason.RESTARTED,
                f"worker {named(worker_id)} restarted: epoch {epoch} asked, {card.epoch} running",
            )
        return card

    def cards(self) -> Iterable[WorkerCard]:
        """Everyone who is joined."""
        return self._cards.values()

    def next_deadline(self) -> float:
        """`expire` has nothing to do before."""
        return self._deadlines.next()

    def expire(self, now: float) -> list[WorkerChange]:
        """Removes the workers that stopped beating."""
        return [self._remove(worker_id) for worker_id in self._deadlines.due(now)]

    def _remove(self, worker_id: str) -> WorkerChange:
        self._deadlines.discard(worker_id)
        return WorkerChange(Joined.DOWN, self._cards.pop(worker_id))
