# SPDX-License-Identifier: Apache-2.0
"""Keeps the prefixes that one tenant's workers have published, and finds the longest one. Pure: takes the time.

The keys of all copies form a radix tree: a node stands for a run of keys that all copies below it share. A lookup and a
change therefore cost steps for each run and not for each key, which are compared by the kilobyte.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

from kvlink.control.deadlines import Deadlines
from kvlink.control.values import KEY_BYTES, FoundPrefix, Prefix, PrefixQuery

_BYTES_OF_COPY, _BYTES_OF_PART, _BYTES_OF_PLACE = 2_048, 512, 384
"""The most that a copy takes beside its keys, a rank beside its ticket, and a copy's place in a node.

Tests compare the sum with Python's."""
_MOST_SKIPPED = 1_024
"""A lookup skips this many servers that the reader is a rank of, and then finds nothing."""

_Name = tuple[str, str]
"""A request id, and the worker id of a server of one rank. Ranks of a larger server have only the first in common."""
_Servers = tuple[str, ...]
"""The worker ids of the ranks of a server, in their order."""


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
    keys: bytes
    num_ranks: int
    parts: dict[int, _Part] = field(default_factory=dict)
    servers: _Servers = ()
    """Set while the copy is in the tree, which is while it is complete."""

    @property
    def num_bytes(self) -> int:
        tickets = sum(len(part.ticket) + _BYTES_OF_PART for part in self.parts.values())
        return _BYTES_OF_COPY + len(self.keys) + tickets

    def is_of(self, worker_ids: Set[str]) -> bool:
        return any(part.worker_id in worker_ids for part in self.parts.values())

    def may_be_changed_by(self, worker_id: str, rank: int) -> bool:
        """Returns whether a worker may publish this rank. Nobody is told of a prefix that is not complete."""
        of_rank = self.parts.get(rank)
        return of_rank.worker_id == worker_id if of_rank else not self.servers or self.is_of({worker_id})

    def found(self, num_bytes: int) -> tuple[str, FoundPrefix]:
        parts = [self.parts[rank] for rank in range(self.num_ranks)]
        tickets, workers = tuple(part.ticket for part in parts), tuple(part.worker_id for part in parts)
        return workers[0], FoundPrefix(num_bytes // KEY_BYTES, tickets, workers)


@dataclass(slots=True, eq=False)
class _Node:
    """Stands for the bytes `begin` to `end` of the keys of all copies in it. Some of them may go on in a child."""

    begin: int
    end: int
    copies: dict[_Servers, dict[_Copy, None]] = field(default_factory=dict)
    children: dict[bytes, _Node] = field(default_factory=dict)
    num_copies: int = 0

    def add(self, copy: _Copy) -> None:
        self.copies.setdefault(copy.servers, {})[copy] = None
        self.num_copies += 1

    def remove(self, copy: _Copy) -> None:
        copies = self.copies[copy.servers]
        del copies[copy]
        if not copies:
            del self.copies[copy.servers]
        self.num_copies -= 1

    def keys(self) -> bytes:
        """Returns the keys of any of its copies. All have the same up to `end`."""
        return next(iter(next(iter(self.copies.values())))).keys

    def split(self, end: int) -> None:
        """Cuts the run of keys in two. The second half becomes the only child."""
        rest = _Node(end, self.end, {}, self.children, self.num_copies)
        rest.copies = {servers: dict(copies) for servers, copies in self.copies.items()}
        self.children = {_key(self.keys(), end): rest}
        self.end = end

    def merge(self) -> int:
        """Joins the run of keys with that of the only child, if all copies go on there. Returns how many do."""
        child = next(iter(self.children.values()), None)
        if child is None or child.num_copies != self.num_copies:
            return 0
        self.end, self.children = child.end, child.children
        return child.num_copies


class PrefixDirectory:
    """Keeps the prefixes of one tenant. The caller bounds `num_bytes` and `len` with `evict_oldest`."""

    def __init__(self) -> None:
        self._copies: dict[_Name, _Copy] = {}
        """Oldest first. Publishing a prefix again makes it the newest."""
        self._roots: dict[tuple[bytes, int], _Node] = {}
        """By scope and tokens per key. A root has no keys and no copies of its own."""
        self._of_worker: dict[tuple[str, int], dict[_Copy, None]] = {}
        """By worker id and epoch."""
        self._deadlines: Deadlines[_Name] = Deadlines()
        self.num_bytes = self.num_steps = 0
        """`num_steps` counts the nodes that changes went through: what they took of the caller's thread."""
        self.num_published = self.num_evicted = self.num_expired = self.num_lookups = self.num_hits = 0

    def __len__(self) -> int:
        return len(self._copies)

    def publish(self, worker_id: str, epoch: int, prefix: Prefix, now: float) -> None:
        """Adds one rank's ticket of a prefix. It replaces the rank's last one of the same name.

        What others have published stays: a worker replaces its own ticket only, or a prefix that it has a rank of.
        """
        name = (prefix.request_id, worker_id if prefix.num_ranks == 1 else "")
        scope = (prefix.scope, prefix.tokens_per_key)
        copy = self._copies.get(name)
        if copy is not None and not copy.may_be_changed_by(worker_id, prefix.rank):
            return
        if copy is not None and (copy.scope, copy.keys, copy.num_ranks) == (
            scope,
            prefix.keys,
            prefix.num_ranks,
        ):
            self._remove_part(copy, prefix.rank)
        else:
            if copy is not None:
                self._drop(copy)
            copy = _Copy(name, scope, prefix.keys, prefix.num_ranks)
            self.num_bytes += copy.num_bytes
        part = _Part(worker_id, epoch, prefix.ticket, now + prefix.ttl_s)
        copy.parts[prefix.rank] = part
        self.num_bytes += len(part.ticket) + _BYTES_OF_PART
        self._of_worker.setdefault((worker_id, epoch), {})[copy] = None
        self._copies.pop(name, None)
        self._copies[name] = copy
        self._deadlines.set(name, min(part.deadline for part in copy.parts.values()))
        self.num_published += 1
        self.num_steps += 1 + len(copy.parts)
        if len(copy.parts) == copy.num_ranks:
            self._enter(copy)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """Drops the prefix of this name, if the worker has published a rank of it."""
        for name in ((request_id, worker_id), (request_id, "")):
            copy = self._copies.get(name)
            if copy is not None and copy.is_of({worker_id}):
                self._drop(copy)

    def drop_worker(self, worker_id: str, epoch: int, most: int = sys.maxsize) -> bool:
        """Drops at most `most` prefixes of an epoch of a worker that is gone. Returns whether there are more."""
        for copy in list(islice(self._of_worker.get((worker_id, epoch), ()), most)):
            self._drop(copy)
        return (worker_id, epoch) in self._of_worker

    def publishers(self) -> list[tuple[str, int]]:
        """Returns the (worker id, epoch) of all that have published."""
        return list(self._of_worker)

    def expire(self, now: float, most: int = sys.maxsize) -> bool:
        """Drops at most `most` prefixes whose time has passed. Returns whether there may be more."""
        self.num_steps += 1
        for name in self._deadlines.due(now, most):
            self._drop(self._copies[name])
            self.num_expired += 1
        return self._deadlines.next() <= now

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
        matching = list(self._matching((query.scope, query.tokens_per_key), query.keys))
        reader = {query.worker_id}
        for without in (reader.union(query.last), reader) if query.last else (reader,):
            if found := _longest(matching, query.more_than * KEY_BYTES, without, most):
                self.num_hits += 1
                return found
        return []

    def _matching(self, scope: tuple[bytes, int], keys: bytes) -> Iterator[tuple[_Node, int]]:
        """Yields the nodes on the way of `keys`, shortest first, with the number of bytes that they have in common."""
        node, at = self._roots.get(scope), 0
        while node is not None and (node := node.children.get(_key(keys, at))) is not None:
            at = _common(node.keys(), keys, at, min(node.end, len(keys)))
            yield node, at
            if at < node.end:
                return

    def _remove_part(self, copy: _Copy, rank: int) -> None:
        """Removes a rank's part. The copy leaves the tree, because its servers may change."""
        self._leave(copy)
        part = copy.parts.pop(rank, None)
        if part is None:
            return
        self.num_bytes -= len(part.ticket) + _BYTES_OF_PART
        publisher = part.worker_id, part.epoch
        if all((each.worker_id, each.epoch) != publisher for each in copy.parts.values()):
            self._forget(publisher, copy)

    def _drop(self, copy: _Copy) -> None:
        self._leave(copy)
        self.num_steps += 1 + len(copy.parts)
        self.num_bytes -= copy.num_bytes
        del self._copies[copy.name]
        assert (self.num_bytes > 0) == bool(self._copies), "each copy takes some, and nothing else does"
        self._deadlines.discard(copy.name)
        for publisher in {(part.worker_id, part.epoch) for part in copy.parts.values()}:
            self._forget(publisher, copy)

    def _forget(self, publisher: tuple[str, int], copy: _Copy) -> None:
        others = self._of_worker[publisher]
        del others[copy]
        if not others:
            del self._of_worker[publisher]

    def _enter(self, copy: _Copy) -> None:
        copy.servers = tuple(copy.parts[rank].worker_id for rank in range(copy.num_ranks))
        node, at, keys = self._roots.setdefault(copy.scope, _Node(0, 0)), 0, copy.keys
        while at < len(keys):
            child = node.children.get(_key(keys, at))
            if child is None:
                child = node.children[_key(keys, at)] = _Node(at, len(keys))
            else:
                common = _common(child.keys(), keys, at, min(child.end, len(keys)))
                if common < child.end:
                    child.split(common)
                    self.num_bytes += child.num_copies * _BYTES_OF_PLACE
            child.add(copy)
            self.num_bytes += _BYTES_OF_PLACE
            self.num_steps += 1
            node, at = child, child.end

    def _leave(self, copy: _Copy) -> None:
        if not copy.servers:
            return
        root = self._roots[copy.scope]
        way, at = [root], 0
        while at < len(copy.keys):
            way.append(way[-1].children[_key(copy.keys, at)])
            at = way[-1].end
        for parent, node in reversed(list(pairwise(way))):
            node.remove(copy)
            self.num_steps += 1
            self.num_bytes -= _BYTES_OF_PLACE
            if not node.num_copies:
                del parent.children[_key(copy.keys, node.begin)]
            self.num_bytes -= node.merge() * _BYTES_OF_PLACE
        copy.servers = ()
        if not root.children:
            del self._roots[copy.scope]


def _longest(
    matching: Sequence[tuple[_Node, int]], least: int, without: Set[str], most: int
) -> list[tuple[str, FoundPrefix]]:
    """Returns what the longest node has of servers without these workers. They go to the end, behind those that have
    waited longer, as skipped ones do."""
    num_skipped = 0
    for node, length in reversed(matching):
        if length <= least or num_skipped > _MOST_SKIPPED:
            break
        taken: list[_Servers] = []
        skipped: list[_Servers] = []
        for servers in islice(node.copies, most + _MOST_SKIPPED):
            (taken if without.isdisjoint(servers) else skipped).append(servers)
            if len(taken) == most:
                break
        num_skipped += len(skipped)
        for servers in skipped:
            node.copies[servers] = node.copies.pop(servers)
        if taken:
            return [_turn(node, servers).found(length) for servers in taken]
    return []


def _turn(node: _Node, servers: _Servers) -> _Copy:
    """Returns the newest copy of a server, which goes to the end, behind those that have waited longer."""
    copies = node.copies[servers] = node.copies.pop(servers)
    return next(reversed(copies))


def _key(keys: bytes, at: int) -> bytes:
    return keys[at : at + KEY_BYTES]


def _common(one: bytes, other: bytes, low: int, high: int) -> int:
    """Returns up to where both are alike, by keys, given that they are up to `low` and have `high` bytes."""
    while low < high:
        middle = (low + high + KEY_BYTES) // (2 * KEY_BYTES) * KEY_BYTES
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - KEY_BYTES
    return low
