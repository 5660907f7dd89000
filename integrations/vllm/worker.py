# SPDX-License-Identifier: Apache-2.0
"""Implements the worker's side, beside the model: `leases` holds what is prefilled here, and `loads` pulls the rest.

vLLM calls it around each step. It posts and polls; kvlink's own threads move the bytes, whatever the step does. Each
command is kept inside its request: what fails is reported as a load that failed, or as a handoff that has ended. Only
what ends offers of blocks that the step writes may raise, because readers would take wrong bytes for valid.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from kvlink import Worker, WorkerConfig
from kvlink.errors import KVLinkError
from kvlink.layout.scope import cache_scope

from ..request_guard import RequestGuard
from .decode.loads import Launched, Loads
from .model.caches import Caches
from .prefill.leases import Leases
from .rank_stats import RankStats
from .wire.handoff import Owner, RankInfo
from .wire.step_commands import SoftLease, StepCommands
from .wire.stream_timing import LoadCost

_log = logging.getLogger("vllm.kvlink")

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
        self._idle_wait_s = 0.0
        self._stats = RankStats()
        self.guard = RequestGuard(_log)
        card = self._worker.card
        owner = Owner(card.worker_id, card.epoch, card.agent)
        self.rank_info = RankInfo(
            owner,
            tuple(group.block_tokens for group in caches.groups),
            tuple(group.kernel_blocks for group in caches.groups),
            tuple(group.units for group in caches.groups),
            caches.pool.model.number,
            cache_scope(caches.pool.groups, caches.pool.model),
            self._worker.secret,
        )
        self._loads = Loads(self._worker, caches, self._stats, self.guard)
        self._begun: StepCommands | None = None
        self._leases = Leases(self._worker, self._stats, self.guard)
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

        `carry_out` calls it too, and the second call for a step does nothing. An exception must end the step.
        """
        if commands is self._begun:
            return
        for lease in commands.offered if self._is_current(commands) else ():
            self._offer(lease)
        if commands.given_away:
            self._worker.revoke(commands.given_away)
        self._begun = commands

    def _offer(self, lease: SoftLease) -> None:
        """Offers blocks of the only cache group, whose layouts may have rows of different numbers of tokens."""
        layouts, count = self._caches.pool.groups, len(lease.blocks)
        blocks = lease.blocks if len(layouts) == 1 else [lease.blocks] * len(layouts)
        rows = [count * layout.block_tokens for layout in layouts]
        try:
            self._worker.grant_soft_at(lease.seat, blocks, num_tokens=rows, ttl_s=lease.ttl_s)
        except KVLinkError as error:  # its readers find it stale
            _log.warning("answer not offered: %s", error)
        except Exception as error:
            self.guard.caught("offer", "", error)

    def carry_out(self, commands: StepCommands, launched: Launched = lambda: None) -> None:
        """Carries out commands before the step. Takes microseconds; a new peer is connected in the background.

        `launched` returns kernels that may still use the blocks that are pulled into. It is called once at most.
        """
        self.before_writes(commands)
        self._idle_wait_s = _IDLE_S if commands.idle else 0.0
        after = functools.cache(launched)
        self._leases.withdraw(commands.withdrawn)
        self._leases.grant(commands.granted, commands.written)
        if not self._is_current(commands):
            self._leases.retire_all(commands.granted)
        for request_id, handed_off in commands.handed_off.items():
            self._leases.hand_off(request_id, handed_off)
        for request_id in commands.retired:
            self._leases.retire(request_id)
        for load in commands.loads:
            self._loads.start(load, after)
        for request_id, parts in commands.parts.items():
            for part in parts:
                self._loads.add(request_id, part, after)
        for request_id, why in commands.cut.items():
            self._loads.cut(request_id, why)
        self._leases.publish()

    def model_changed(self, text: str) -> None:
        """Goes on as another model: what was prefilled or is being pulled belongs to the model before."""
        model, before = self._worker.pool.model, self._worker.pool.model.number
        model.change(text)
        if model.number == before:
            return
        _log.warning("the weights were changed: the model is now %s", text)
        self.rank_info = replace(
            self.rank_info, model=model.number, scope=cache_scope(self._caches.pool.groups, model)
        )
        self._leases.retire_all()
        self._loads.fail_all("the weights of this server were changed")

    def _is_current(self, commands: StepCommands) -> bool:
        """Returns whether the scheduler knew the present model when it wrote its tickets."""
        return commands.model in (0, self.rank_info.model)

    def computed(self, written: Mapping[str, int], launched: Launched = lambda: None) -> None:
        """Lets readers of `written` continue once the step's launched kernels have run. None: they have run."""
        self._leases.computed(written, launched)

    def results(self) -> Results:
        """Returns what ended, after the step. Waits only in a step that is idle, and then for a millisecond."""
        if len(self._leases) or len(self._worker.offers):  # a server that only decodes has none
            self._leases.collect()
        self._leases.publish()
        if len(self._loads) and self._idle_wait_s:
            self._loads.wait(self._idle_wait_s)
        received, failed = self._loads.take()
        return Results(self._leases.take_sent(), received, failed)

    def take_held(self) -> set[str]:
        """Returns requests that are read while they are computed, whose leases were taken since the last call."""
        return self._leases.take_held()

    def take_costs(self) -> dict[str, LoadCost]:
        """Returns the cost of loads from the servers that loads came from since the last call."""
        return self._loads.take_costs()

    def take_stats(self) -> dict[str, Any] | None:
        """Returns the statistics since the last call."""
        active, oldest_s = 0, 0.0
        with self.guard.around("stats"):
            if len(self._worker.offers):
                counts = self._worker.lease_counts()
                active, oldest_s = counts.active, counts.oldest_s
        return self._stats.take(active, oldest_s, self.guard.take_counts())

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
