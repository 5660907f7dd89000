# SPDX-License-Identifier: Apache-2.0
"""Implements the worker's side, beside the model: holds leases on what is prefilled here; `loads` pulls the rest.

vLLM calls it around each step. It posts and polls; kvlink's own threads move the bytes, whatever the step does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvlink import LeaseEnd, Worker, WorkerConfig
from kvlink.errors import KVLinkError
from kvlink.transfer.device_work import DeviceWork, has_ended

from .caches import Caches
from .handoff import Owner, RankInfo
from .loads import Loads
from .rank_stats import RankStats
from .step_commands import HandedOff, StepCommands
from .stream_timing import LoadCost

_log = logging.getLogger("vllm.kvlink")

_UNTIL_HANDED_OFF_S = 86400.0
_IDLE_S = 0.001
"""A load that ends within this time is noticed one step earlier. vLLM sleeps as long between steps without work."""


class Results(NamedTuple):
    """Request ids since the last call; `failed` are among `received`."""

    sent: set[str]
    received: set[str]
    failed: set[str]


class WorkerSide:
    """One rank's kvlink worker, with what it does for vLLM."""

    def __init__(self, worker_id: str, caches: Caches, config: WorkerConfig) -> None:
        self._caches = caches
        self._worker = Worker(caches.pool, worker_id, config=config)
        self._held: set[str] = set()  # leases of requests that are not handed off yet
        self._just_held: set[str] = set()  # requests that are read while they are computed
        self._out: set[str] = set()  # leases whose tickets are sent
        self._ended: set[str] = set()  # leases that ended before their tickets were known to be sent
        self._sent: set[str] = set()
        # What readers wait for, each with the kernels that write it, or None.
        self._written: list[tuple[DeviceWork | None, dict[str, int]]] = []
        self._idle_wait_s = 0.0
        self._stats = RankStats()
        card = self._worker.card
        owner = Owner(card.worker_id, card.epoch, card.agent)
        self.rank_info = RankInfo(
            owner,
            tuple(group.block_tokens for group in caches.groups),
            tuple(group.kernel_blocks for group in caches.groups),
        )
        self._loads = Loads(self._worker, caches, self._stats)
        self._begun: StepCommands | None = None
        self._num_layouts = sum(group.num_layouts for group in caches.groups)
        # Readers of one layout follow blocks, those of several follow tokens of the layouts.
        attention = [group for group in caches.groups if group.block_tokens]
        self._ready_step = (
            attention[0].block_tokens // attention[0].token_unit if attention and len(card.layouts) > 1 else 1
        )
        transports = [
            f"{one.name}{f' (cannot export: {one.refused})' if one.refused else ''}"
            for one in card.transports
        ]
        _log.info(
            "kvlink worker %s at %s exports %r by %s",
            worker_id,
            card.agent,
            caches.pool,
            ", ".join(transports),
        )

    def before_writes(self, commands: StepCommands) -> None:
        """Ends the soft leases of blocks that the step gives new content. Call it before anything writes one.

        `carry_out` calls it too, and the second call for a step does nothing.
        """
        if commands is self._begun:
            return
        self._begun = commands
        for lease in commands.offered:
            blocks = lease.blocks if self._num_layouts == 1 else [lease.blocks] * self._num_layouts
            try:
                self._worker.grant_soft_at(lease.seat, blocks, ttl_s=lease.ttl_s)
            except KVLinkError as error:  # its readers find it stale
                _log.warning("answer not offered: %s", error)
        if commands.given_away:
            self._worker.revoke(commands.given_away)

    def carry_out(self, commands: StepCommands, launched: DeviceWork | None = None) -> None:
        """Carries out commands before the step. Takes microseconds; a new peer is connected in the background.

        `launched` are kernels that may still use the blocks that are pulled into.
        """
        self.before_writes(commands)
        self._idle_wait_s = _IDLE_S if commands.idle else 0.0
        for request_id in commands.withdrawn:
            self._withdraw(request_id)
        if commands.withdrawn:
            self._collect_ended()  # a request that was preempted may be granted a lease again
        for request_id, seats in commands.granted.items():
            self._worker.offers.grant_at(request_id, seats, _UNTIL_HANDED_OFF_S)
            self._held.add(request_id)
        self._just_held.update(commands.granted.keys() & commands.written.keys())
        for request_id, handed_off in commands.handed_off.items():
            self._handoff(request_id, handed_off)
        for request_id in commands.retired:
            with contextlib.suppress(KVLinkError):  # the lease has ended, and its event follows
                self._worker.offers.abort(request_id)
        for load in commands.loads:
            self._loads.start(load, launched)
        for request_id, parts in commands.parts.items():
            for part in parts:
                self._loads.add(request_id, part, launched)
        for request_id, why in commands.cut.items():
            self._loads.cut(request_id, why)
        self._publish()

    def computed(self, written: Mapping[str, int], launched: DeviceWork | None) -> None:
        """Lets readers of `written` continue once the step's launched kernels have run. None: they have run."""
        self._written.append((launched, dict(written)))
        self._publish()

    def results(self) -> Results:
        """Returns what ended, after the step. Waits only in a step that is idle, and then for a millisecond."""
        if self._out or self._held or len(self._worker.offers):  # a server that only decodes has none
            self._collect_ended()
        self._publish()
        if len(self._loads) and self._idle_wait_s:
            self._loads.wait(self._idle_wait_s)
        sent, self._sent = self._sent, set()
        received, failed = self._loads.take()
        return Results(sent, received, failed)

    def take_held(self) -> set[str]:
        """Returns requests that are read while they are computed, whose leases were taken since the last call."""
        held, self._just_held = self._just_held, set()
        return held

    def take_costs(self) -> dict[str, LoadCost]:
        """Returns the cost of loads from the servers that loads came from since the last call."""
        return self._loads.take_costs()

    def take_stats(self) -> dict[str, Any] | None:
        """Returns the statistics since the last call."""
        if not len(self._worker.offers):
            return self._stats.take(0, 0.0)
        counts = self._worker.lease_counts()
        return self._stats.take(counts.active, counts.oldest_s)

    def drain(self, grace_s: float) -> None:
        """Waits at most `grace_s` seconds until decode has read what was handed off, so that it need not compute it."""
        if not self._worker.drain(grace_s):
            _log.warning(
                "closing although %d requests were not read; their decode servers compute them again",
                self._worker.lease_counts().active,
            )

    def close(self) -> None:
        """Ends pulls and leases. On return nothing accesses the caches. Idempotent."""
        self._worker.close()

    # The following methods handle leases.

    def _withdraw(self, request_id: str) -> None:
        self._held.discard(request_id)
        for _, written in self._written:
            written.pop(request_id, None)
        if request_id in self._ended:
            self._ended.discard(request_id)
            return
        try:
            self._worker.offers.abort(request_id)
        except KVLinkError as error:
            _log.warning("lease not withdrawn request=%s error=%s", request_id, error)

    def _handoff(self, request_id: str, handed_off: HandedOff) -> None:
        """Hands off a request. A fast reader may have settled before this command arrives."""
        self._collect_ended()
        self._held.discard(request_id)
        if request_id in self._ended:
            self._ended.discard(request_id)
            self._sent.add(request_id)
            return
        self._out.add(request_id)
        with contextlib.suppress(KVLinkError):  # the lease ended just now, and its event follows
            self._worker.offers.hand_off(request_id, handed_off.num_blocks, handed_off.ttl_s)

    def _collect_ended(self) -> None:
        for event in self._worker.events():
            if event.how is LeaseEnd.EXPIRED:
                self._stats.expired += 1
                _log.warning(
                    "request %s: no reader fetched it within its lease (held %.1f s); its blocks are free again",
                    event.request_id,
                    event.held_s,
                )
            if event.request_id in self._out:
                self._out.discard(event.request_id)
                self._sent.add(event.request_id)
            elif event.request_id in self._held:
                self._ended.add(event.request_id)

    def _publish(self) -> None:
        while self._written:
            launched, written = self._written[0]
            if launched is not None and not has_ended(launched):
                return
            del self._written[0]
            for request_id, num_blocks in written.items():
                with contextlib.suppress(KVLinkError):  # its reader is gone
                    self._worker.offers.set_ready(request_id, num_blocks * self._ready_step)
