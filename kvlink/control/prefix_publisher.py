# SPDX-License-Identifier: Apache-2.0
"""Keeps a worker's prefixes in the coordinator's directory for as long as their leases last.

A coordinator holds them as soft state. The publisher sends each again when half of its time has passed, and all of
them when the id of the directory shows that it is another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from kvlink.control import limits
from kvlink.control.client import CoordinatorClient
from kvlink.control.now import now
from kvlink.control.values import KEY_BYTES, Prefix, PrefixChanges, WorkerEpoch
from kvlink.errors import ConfigError, KVLinkError
from kvlink.runtime.backoff import doubled_s
from kvlink.runtime.supervised import survived

_log = logging.getLogger("kvlink.control")

_SWEEP_EVERY_S = 2.0
"""How soon a prefix is withdrawn whose lease has ended. Readers that come before find its pull stale."""
_ASK_EVERY_S = 10.0
"""How soon a lost directory is noticed if there is nothing to publish."""
_MOST_RETRY_S = 30.0
_MOST_PUBLISHED = 65_536
_OVERHEAD = 160
_BATCH_BYTES = limits.MAX_BATCH_BYTES // 2
"""The other half is for names."""


@dataclass(slots=True)
class _Published:
    prefix: Prefix
    is_live: Callable[[], bool]
    due: float = -math.inf
    """When to send it."""


class PrefixPublisher:
    """Publishes the prefixes of one worker. Belongs to the event loop on which `run` runs."""

    def __init__(
        self, client: CoordinatorClient, worker: Callable[[], WorkerEpoch], clock: Callable[[], float] = now
    ) -> None:
        """`worker` returns the worker that has joined."""
        self._client = client
        self._worker = worker
        self._clock = clock
        self._published: dict[str, _Published] = {}
        self._withdrawn: dict[str, None] = {}
        self._directory_id = 0
        self._ask_at = -math.inf
        self._work = asyncio.Event()
        self._num_failures = 0
        self._alone = False
        """Whether calls have one change each, to find one that cannot be sent."""

    def __len__(self) -> int:
        return len(self._published)

    def publish(self, prefix: Prefix, is_live: Callable[[], bool]) -> None:
        """Publishes a prefix until `is_live` returns False or it is withdrawn. It replaces one of the same name."""
        self._published.pop(prefix.request_id, None)
        self._withdrawn.pop(prefix.request_id, None)
        self._published[prefix.request_id] = _Published(prefix, is_live)
        if len(self._published) > _MOST_PUBLISHED:
            self.withdraw(next(iter(self._published)))
        self._work.set()

    def withdraw(self, request_id: str) -> None:
        """Withdraws a prefix. Does nothing if it is not published."""
        if self._published.pop(request_id, None) is not None:
            self._withdrawn[request_id] = None
            self._work.set()

    async def run(self) -> None:
        """Publishes until it is cancelled."""
        while True:
            if not self._published and not self._withdrawn:
                await self._work.wait()
            self._work.clear()
            if await self.step():
                await asyncio.sleep(0)
                continue
            if self._num_failures:
                await asyncio.sleep(doubled_s(self._num_failures, 2 * _SWEEP_EVERY_S, _MOST_RETRY_S))
            else:
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._work.wait(), _SWEEP_EVERY_S)

    async def step(self) -> bool:
        """Withdraws what has ended, and sends what is due. Returns whether there is more to send at once."""
        for request_id in [name for name, each in self._published.items() if not self._is_live(each)]:
            self.withdraw(request_id)
        at = self._clock()
        changes = self._changes(at)
        if not changes.prefixes and not changes.withdrawn and at < self._ask_at:
            return False
        try:
            directory_id = await self._client.publish_prefixes(changes)
        except KVLinkError as error:
            if isinstance(error, ConfigError) and self._leave_out(changes, error):
                return True
            self._note_failure(changes, error)
            return False
        except Exception as error:
            if not self._leave_out(changes, error):
                raise
            return True
        self._alone = False
        self._num_failures = 0
        self._ask_at = at + _ASK_EVERY_S
        self._note_sent(changes, at)
        if directory_id != self._directory_id:
            self._publish_again(changes)
            self._directory_id = directory_id
        return any(each.due <= at for each in self._published.values()) or bool(self._withdrawn)

    def _note_failure(self, changes: PrefixChanges, error: KVLinkError) -> None:
        if not self._num_failures:
            _log.warning(
                "prefixes are not published for now worker=%s prefixes=%d error=%s",
                changes.worker_id,
                len(self._published),
                error,
            )
        self._num_failures += 1

    def _leave_out(self, changes: PrefixChanges, error: Exception) -> bool:
        """Finds the change that cannot be sent, by sending one at a time, and leaves it for half of its time.

        Returns False if the call had no change, so that the error is not of one.
        """
        if not changes.prefixes and not changes.withdrawn:
            return False
        if len(changes.prefixes) + len(changes.withdrawn) > 1:
            self._alone = True
            return True
        self._note_sent(changes, self._clock())
        survived("prefix publisher", error)
        return True

    def _is_live(self, each: _Published) -> bool:
        try:
            return each.is_live()
        except Exception as error:
            survived("prefix publisher", error)
            return False

    def _changes(self, at: float) -> PrefixChanges:
        """Returns what is due, as much as one call may carry. A prefix that is larger than that goes alone."""
        taken: list[Prefix] = []
        num_bytes = num_keys = 0
        for each in self._published.values():
            if each.due > at:
                continue
            size = _most_bytes(each.prefix)
            keys = len(each.prefix.keys) // KEY_BYTES
            fits = num_bytes + size <= _BATCH_BYTES and num_keys + keys <= limits.MAX_PREFIX_KEYS
            if taken and (not fits or self._alone or len(taken) == limits.MAX_PREFIXES):
                break
            taken.append(each.prefix)
            num_bytes, num_keys = num_bytes + size, num_keys + keys
        most = limits.MAX_BATCH_OPS if not self._alone else 0 if taken else 1
        names = list(self._withdrawn)[:most] if num_bytes <= _BATCH_BYTES else []
        return PrefixChanges(*self._worker(), tuple(taken), tuple(names))

    def _note_sent(self, changes: PrefixChanges, at: float) -> None:
        for request_id in changes.withdrawn:
            self._withdrawn.pop(request_id, None)
        for prefix in changes.prefixes:
            published = self._published.get(prefix.request_id)
            if published is not None and published.prefix is prefix:
                published.due = at + prefix.ttl_s / 2

    def _publish_again(self, but: PrefixChanges) -> None:
        sent = {prefix.request_id for prefix in but.prefixes}
        for request_id, published in self._published.items():
            if request_id not in sent:
                published.due = -math.inf


def _most_bytes(prefix: Prefix) -> int:
    return _OVERHEAD + 4 * len(prefix.request_id) + len(prefix.keys) + len(prefix.ticket)
