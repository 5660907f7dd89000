# SPDX-License-Identifier: Apache-2.0
"""Implements prefill's part of the worker's side: the leases of one rank on requests that are prefilled here.

vLLM's ids of requests are names here; the leases have kvlink's names of them. Whatever fails, vLLM learns exactly once
that a request which was handed off is no longer read, because its blocks stay until every rank has said so.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping

from kvlink import LeaseEnd, LeaseEvent, Worker
from kvlink.errors import KVLinkError, UnknownRequest
from kvlink.ticket import LeaseSeat
from kvlink.transfer.device_work import DeviceWork, has_ended

from ...request_guard import RequestGuard
from ...request_names import name_of, printable
from ..rank_stats import RankStats
from ..wire.step_commands import HandedOff

_log = logging.getLogger("vllm.kvlink")

_UNTIL_HANDED_OFF_S = 86400.0


class Leases:
    """The leases of one rank."""

    def __init__(self, worker: Worker, stats: RankStats, guard: RequestGuard) -> None:
        self._worker = worker
        self._stats = stats
        self._guard = guard
        self._ids: dict[str, str] = {}  # vLLM's ids by kvlink's names, of leases that may still end
        self._seats: dict[
            str, LeaseSeat
        ] = {}  # of them: a call that comes late meets no later lease of the request
        self._held: set[str] = set()  # leases of requests that are not handed off yet
        self._just_held: set[str] = set()  # requests that are read while they are computed
        self._out: set[str] = set()  # leases whose tickets are sent
        self._ended: set[str] = set()  # leases that ended before their tickets were known to be sent
        self._ending: set[str] = set()  # leases to end, whose end has failed
        self._sent: set[str] = set()
        # What readers wait for, each with the kernels that write it, or None.
        self._written: list[tuple[DeviceWork | None, dict[str, tuple[LeaseSeat | str, int]]]] = []

    def __len__(self) -> int:
        return len(self._held) + len(self._out)

    def withdraw(self, request_ids: Iterable[str]) -> None:
        """Ends leases of requests whose blocks are free already. An exception must end the step that may write them."""
        for request_id in request_ids:
            self._held.discard(request_id)
            for _, written in self._written:
                written.pop(request_id, None)
            self._ended.discard(request_id)
            with contextlib.suppress(UnknownRequest):
                self._worker.offers.abort(self._offer(request_id))
        if request_ids:
            self.collect()  # a request that was preempted may be granted a lease again

    def grant(self, granted: Mapping[str, tuple[LeaseSeat, ...]], read_at_once: Iterable[str]) -> None:
        """Takes leases. One that cannot be taken has ended: its request is reported as soon as it is handed off."""
        for request_id, seats in granted.items():
            self._held.add(request_id)
            try:
                name = name_of(request_id)
                self._worker.offers.grant_at(name, seats, _UNTIL_HANDED_OFF_S)
                self._ids[name] = request_id
                self._seats[request_id] = seats[0]
            except Exception as error:
                self._guard.caught("grant", request_id, error)
                self._ended.add(request_id)
                with contextlib.suppress(Exception):
                    self._worker.offers.abort(name_of(request_id))
        if granted:
            self._just_held.update(self._held.difference(self._ended).intersection(granted, read_at_once))

    def hand_off(self, request_id: str, handed_off: HandedOff) -> None:
        """Hands off a request. A fast reader may have settled before this command arrives."""
        self.collect()
        self._held.discard(request_id)
        if request_id in self._ended and self.retire(request_id):
            self._ended.discard(request_id)
            self._sent.add(request_id)
            return
        self._out.add(request_id)
        try:
            self._worker.offers.hand_off(self._offer(request_id), handed_off.num_blocks, handed_off.ttl_s)
        except UnknownRequest:
            return  # the lease ended just now, and its event follows
        except Exception as error:
            self._guard.caught("hand_off", request_id, error)
            self.retire(request_id)

    def retire(self, request_id: str) -> bool:
        """Ends the lease of a request, now or as soon as that succeeds. Returns whether it did. Its event follows."""
        self._ending.add(request_id)
        try:
            self._worker.offers.abort(self._offer(request_id))
        except UnknownRequest:
            pass  # the lease has ended, and its event follows
        except Exception as error:
            self._guard.caught("retire", request_id, error)
            return False
        self._ending.discard(request_id)
        return True

    def retire_all(self, request_ids: Iterable[str] | None = None) -> None:
        """Ends these leases, by default all. Their events follow."""
        for request_id in list(self._held | self._out if request_ids is None else request_ids):
            self.retire(request_id)

    def computed(self, written: Mapping[str, int], launched: Callable[[], DeviceWork | None]) -> None:
        """Lets readers of `written` continue once the step's launched kernels have run. None: they have run."""
        try:
            seats = {each: (self._offer(each), ready) for each, ready in written.items()}
            self._written.append((launched(), seats))
        except Exception as error:
            self._never_written(written, error)
        self.publish()

    def publish(self) -> None:
        """Tells readers what has been written by now."""
        while self._written:
            launched, written = self._written[0]
            try:
                if launched is not None and not has_ended(launched):
                    return
            except Exception as error:
                self._never_written(written, error)
                written = {}
            del self._written[0]
            for request_id, (offer, ready) in written.items():
                with (
                    self._guard.around("publish", request_id),
                    contextlib.suppress(KVLinkError),
                ):  # its reader is gone
                    self._worker.offers.set_ready(offer, ready)

    def _offer(self, request_id: str) -> LeaseSeat | str:
        return self._seats.get(request_id) or name_of(request_id)

    def _never_written(self, written: Iterable[str], error: Exception) -> None:
        """Ends leases of blocks of which nobody knows whether they are written."""
        for request_id in written:
            self._guard.caught("publish", request_id, error)
            self.retire(request_id)

    def collect(self) -> None:
        """Looks which leases have ended, and ends those that could not be ended before."""
        with self._guard.around("collect"):
            for event in self._worker.events():
                self._has_ended(event)
        for request_id in list(self._ending):
            self.retire(request_id)

    def _has_ended(self, event: LeaseEvent) -> None:
        request_id = self._ids.pop(event.request_id, "")
        self._seats.pop(request_id, None)
        if request_id in self._out:
            self._out.discard(request_id)
            self._sent.add(request_id)
        elif request_id in self._held:
            self._ended.add(request_id)
        if event.how is LeaseEnd.EXPIRED:
            self._stats.expired += 1
            _log.warning(
                "request %s: no reader fetched it within its lease (held %.1f s); its blocks are free again",
                printable(event.request_id),
                event.held_s,
            )

    def take_sent(self) -> set[str]:
        """Returns requests that were handed off, whose leases have ended since the last call."""
        sent, self._sent = self._sent, set()
        return sent

    def take_held(self) -> set[str]:
        """Returns requests that are read while they are computed, whose leases were taken since the last call."""
        held, self._just_held = self._just_held, set()
        return held
