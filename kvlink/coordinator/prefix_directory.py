# SPDX-License-Identifier: Apache-2.0
"""Keeps the prefixes that one tenant's workers have published, and finds the longest one. Pure: takes the time.

Each key of a prefix is indexed. A key stands for all tokens before its end, so the keys of a prompt that are found are
the first ones, and a binary search finds the last of them.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlink.control.deadlines import Deadlines
from kvlink.control.prefix_values import FoundPrefix, Prefix, PrefixQuery

_BYTES_OF_KEY, _BYTES_OF_COPY, _BYTES_OF_PART = 160, 1_536, 512
"""The most that a key takes, and a prefix and a rank beside keys and tickets. Tests compare the sum with Python's."""
_MOST_SKIPPED = 64
"""A lookup skips this many prefixes of the reader itself before it looks for a shorter one."""

_Name = tuple[str, str]
"""A request id, and the worker id of a server of one rank. Ranks of a larger server have only the first in common."""


class _Part(NamedTuple):
    worker_id: str
    epoch: int
    ticket: bytes
    deadline: float


@dataclass(slots=True, eq=False)
class _Copy:
    """A prefix in the cache of one server. `parts` has what its ranks have published."""

    name: _Name
    scope: tuple[bytes, int]
    keys: array[int]
    num_ranks: int
    parts: dict[int, _Part] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.parts) == self.num_ranks

    @property
    def num_bytes(self) -> int:
        tickets = sum(len(part.ticket) + _BYTES_OF_PART for part in self.parts.values())
        return _BYTES_OF_COPY + len(self.keys) * _BYTES_OF_KEY + tickets

    def is_of(self, worker_ids: Set[str]) -> bool:
        return any(part.worker_id in worker_ids for part in self.parts.values())

    def may_be_changed_by(self, worker_id: str, rank: int) -> bool:
        """Returns whether a worker may publish this rank. Nobody is told of a prefix that is not complete."""
        of_rank = self.parts.get(rank)
        return of_rank.worker_id == worker_id if of_rank else not self.complete or self.is_of({worker_id})

    def found(self, num_keys: int) -> tuple[str, FoundPrefix]:
        parts = [self.parts[rank] for rank in range(self.num_ranks)]
        tickets, workers = tuple(part.ticket for part in parts), tuple(part.worker_id for part in parts)
        return workers[0], FoundPrefix(num_keys, tickets, workers)


_Index = dict[int, _Copy | dict[_Copy, None]]
"""Maps a key to the only copy that has it, or to all of them."""


class PrefixDirectory:
    """Keeps the prefixes of one tenant. The caller bounds `num_bytes` and `len` with `evict_oldest`."""

    def __init__(self) -> None:
        self._copies: dict[_Name, _Copy] = {}
        """Oldest first. Publishing a prefix again makes it the newest."""
        self._indexes: dict[tuple[bytes, int], _Index] = {}
        """By scope and tokens per key."""
        self._of_worker: dict[str, dict[_Copy, None]] = {}
        self._deadlines: Deadlines[_Name] = Deadlines()
        self.num_bytes = 0
        self.num_published = self.num_evicted = self.num_expired = self.num_lookups = self.num_hits = 0

    def __len__(self) -> int:
        return len(self._copies)

    def publish(self, worker_id: str, epoch: int, prefix: Prefix, now: float) -> None:
        """Adds one rank's ticket of a prefix. It replaces the rank's last one of the same name.

        What others have published stays: a worker replaces its own ticket only, or a prefix that it has a rank of.
        """
        name = (prefix.request_id, worker_id if prefix.num_ranks == 1 else "")
        scope, keys = (prefix.scope, prefix.tokens_per_key), array("Q", prefix.keys)
        copy = self._copies.get(name)
        if copy is not None and not copy.may_be_changed_by(worker_id, prefix.rank):
            return
        if copy is not None and (copy.scope, copy.keys, copy.num_ranks) == (scope, keys, prefix.num_ranks):
            self._remove_part(copy, prefix.rank)
        else:
            if copy is not None:
                self._drop(copy)
            copy = _Copy(name, scope, keys, prefix.num_ranks)
            self.num_bytes += copy.num_bytes
        part = _Part(worker_id, epoch, prefix.ticket, now + prefix.ttl_s)
        copy.parts[prefix.rank] = part
        self.num_bytes += len(part.ticket) + _BYTES_OF_PART
        self._of_worker.setdefault(worker_id, {})[copy] = None
        self._copies.pop(name, None)
        self._copies[name] = copy
        self._deadlines.set(name, min(part.deadline for part in copy.parts.values()))
        self.num_published += 1
        if copy.complete:
            self._enter(copy)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """Drops the prefix of this name, if the worker has published a rank of it."""
        for name in ((request_id, worker_id), (request_id, "")):
            copy = self._copies.get(name)
            if copy is not None and copy.is_of({worker_id}):
                self._drop(copy)

    def drop_worker(self, worker_id: str, epoch: int) -> None:
        """Drops what an epoch of a worker has published, because it is gone."""
        self._drop_of(worker_id, lambda part: part.epoch == epoch)

    def keep_only(self, joined: set[tuple[str, int]]) -> None:
        """Drops the prefixes of all workers but these, given as (worker id, epoch)."""
        for worker_id in list(self._of_worker):
            self._drop_of(worker_id, lambda part: (part.worker_id, part.epoch) not in joined)

    def expire(self, now: float) -> None:
        """Drops the prefixes whose time has passed."""
        for name in self._deadlines.due(now):
            self._drop(self._copies[name])
            self.num_expired += 1

    def evict_oldest(self) -> None:
        """Drops the prefix that was published the longest ago. REQUIRES that there is one."""
        self._drop(next(iter(self._copies.values())))
        self.num_evicted += 1

    def find(self, query: PrefixQuery, most: int) -> list[tuple[str, FoundPrefix]]:
        """Returns at most `most` servers with the longest prefix, and the worker id of the first rank of each.

        Servers that have the same prefix take turns to be the first. Without the workers that are asked last, if
        another one has a prefix.
        """
        self.num_lookups += 1
        keys = array("Q", query.keys)
        index = self._indexes.get((query.scope, query.tokens_per_key), {})
        low, high = min(query.more_than, len(keys)), len(keys)
        while low < high:
            middle = (low + high + 1) // 2
            if keys[middle - 1] in index:
                low = middle
            else:
                high = middle - 1
        reader = {query.worker_id}
        for without in (reader.union(query.last), reader) if query.last else (reader,):
            for length in range(low, query.more_than, -1):
                if found := _take(index[keys[length - 1]], without, most):
                    self.num_hits += 1
                    return [copy.found(length) for copy in found]
        return []

    def _drop_of(self, worker_id: str, is_gone: Callable[[_Part], bool]) -> None:
        for copy in list(self._of_worker.get(worker_id, ())):
            if any(part.worker_id == worker_id and is_gone(part) for part in copy.parts.values()):
                self._drop(copy)

    def _remove_part(self, copy: _Copy, rank: int) -> None:
        part = copy.parts.pop(rank, None)
        if part is None:
            return
        self.num_bytes -= len(part.ticket) + _BYTES_OF_PART
        if not copy.is_of({part.worker_id}):
            others = self._of_worker[part.worker_id]
            del others[copy]
            if not others:
                del self._of_worker[part.worker_id]

    def _drop(self, copy: _Copy) -> None:
        if copy.complete:
            self._leave(copy)
        self.num_bytes -= copy.num_bytes
        del self._copies[copy.name]
        self._deadlines.discard(copy.name)
        for worker_id in {part.worker_id for part in copy.parts.values()}:
            others = self._of_worker[worker_id]
            del others[copy]
            if not others:
                del self._of_worker[worker_id]

    def _enter(self, copy: _Copy) -> None:
        index = self._indexes.setdefault(copy.scope, {})
        for key in copy.keys:
            found = index.setdefault(key, copy)
            if isinstance(found, dict):
                found[copy] = None
            elif found is not copy:
                index[key] = {found: None, copy: None}

    def _leave(self, copy: _Copy) -> None:
        index = self._indexes[copy.scope]
        for key in copy.keys:
            found = index.get(key)
            if found is copy:
                del index[key]
            elif isinstance(found, dict):
                found.pop(copy, None)
                if len(found) == 1:
                    index[key] = next(iter(found))
        if not index:
            del self._indexes[copy.scope]


def _take(found: _Copy | dict[_Copy, None], without: Set[str], most: int) -> list[_Copy]:
    """Returns copies of other workers. They go to the end, behind those that have waited longer, as skipped ones do."""
    if isinstance(found, _Copy):
        return [] if found.is_of(without) else [found]
    taken: list[_Copy] = []
    skipped: list[_Copy] = []
    for copy in itertools.islice(found, most + _MOST_SKIPPED):
        (skipped if copy.is_of(without) else taken).append(copy)
        if len(taken) == most:
            break
    for copy in (*skipped, *taken):
        found[copy] = found.pop(copy)
    return taken
