# SPDX-License-Identifier: Apache-2.0
"""Notices that etcd was emptied, or restored from a snapshot: its answers do not continue the earlier ones. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvlink.v1 import etcd_pb2 as pb


class Mark(NamedTuple):
    """What was known when a call began."""

    number: int
    revision: int


class History:
    """Remembers the cluster id and the highest revision. `on_break(why)` is called once for each break."""

    def __init__(self) -> None:
        self.on_break: Callable[[str], None] = lambda why: None
        self._number = 0
        self._cluster_id = 0
        self._revision = 0

    def mark(self) -> Mark:
        """Call it before a call whose answer is passed to `note`."""
        return Mark(self._number, self._revision)

    def note(self, header: pb.ResponseHeader, began: Mark) -> None:
        """Checks an answer that a majority agreed on after `began`: its revision is not below what was known then."""
        if began.number != self._number:
            return  # the call began under a history that is known to be over
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
        """Raises what is known to a revision that a watch brought."""
        self._revision = max(self._revision, revision)

    def other(self, why: str) -> None:
        """Takes note of a break that shows in what etcd holds."""
        self._number += 1
        self._revision = 0
        self.on_break(why)

    def _is_other_cluster(self, header: pb.ResponseHeader) -> bool:
        return 0 not in (header.cluster_id, self._cluster_id) and header.cluster_id != self._cluster_id

    def _break(self, header: pb.ResponseHeader, why: str) -> None:
        self._cluster_id = header.cluster_id or self._cluster_id
        self.other(why)
        self._revision = header.revision


def same(events: Iterable[pb.Event], others: Iterable[pb.Event]) -> bool:
    """Whether two readings of one revision brought the same."""
    return _content(events) == _content(others)


def _content(events: Iterable[pb.Event]) -> set[tuple[int, int, bytes, bytes]]:
    return {(event.kv.mod_revision, event.type, event.kv.key, event.kv.value) for event in events}
