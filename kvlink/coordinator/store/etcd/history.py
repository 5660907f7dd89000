# SPDX-License-Identifier: Apache-2.0
"""Detects that etcd was emptied or restored from a snapshot, because its answers contradict earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvlink.v1 import etcd_pb2 as pb


class Mark(NamedTuple):
    """Records what was known when a call began."""

    number: int
    revision: int


class History:
    """Keeps the cluster id and the highest revision. `on_break(why)` is called once for each break."""

    def __init__(self) -> None:
        self.on_break: Callable[[str], None] = lambda why: None
        self._number = 0
        self._cluster_id = 0
        self._revision = 0

    def mark(self) -> Mark:
        """Returns a mark to take before a call whose answer is passed to `note`."""
        return Mark(self._number, self._revision)

    def note(self, header: pb.ResponseHeader, began: Mark) -> None:
        """Checks an answer that a majority agreed on after `began`: its revision must not be below the one then."""
        if began.number != self._number:
            return  # the call began before a break that is already known
        if self._is_other_cluster(header):
            self._break(header, f"cluster id {header.cluster_id:x} instead of {self._cluster_id:x}")
        elif header.revision < began.revision:
            self._break(header, f"revision {header.revision} after {began.revision}")
        else:
            self._cluster_id = header.cluster_id or self._cluster_id
            self._revision = max(self._revision, header.revision)

    def note_watch(self, header: pb.ResponseHeader) -> None:
        """Checks an answer of a watch, whose member may lag behind the others."""
        if self._is_other_cluster(header):
            self._break(header, f"cluster id {header.cluster_id:x} instead of {self._cluster_id:x}")

    def reached(self, revision: int) -> None:
        """Raises the known revision to one that a watch delivered."""
        self._revision = max(self._revision, revision)

    def note_break(self, why: str) -> None:
        """Notes a break that shows in the contents of etcd."""
        self._number += 1
        self._revision = 0
        self.on_break(why)

    def _is_other_cluster(self, header: pb.ResponseHeader) -> bool:
        return 0 not in (header.cluster_id, self._cluster_id) and header.cluster_id != self._cluster_id

    def _break(self, header: pb.ResponseHeader, why: str) -> None:
        self._cluster_id = header.cluster_id or self._cluster_id
        self.note_break(why)
        self._revision = header.revision


def same(events: Iterable[pb.Event], others: Iterable[pb.Event]) -> bool:
    """Returns whether two readings of one revision delivered the same events."""
    return _content(events) == _content(others)


def _content(events: Iterable[pb.Event]) -> set[tuple[int, int, bytes, bytes]]:
    return {(event.kv.mod_revision, event.type, event.kv.key, event.kv.value) for event in events}
