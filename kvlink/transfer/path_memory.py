# SPDX-License-Identifier: Apache-2.0
"""Remembers which transports failed their work towards an owner, and when to try a better path again."""

from __future__ import annotations

from dataclasses import dataclass

_FIRST_S, _LONGEST_S = 10.0, 300.0
_MOST_PATHS = 4096
_ENOUGH = 2
"""The number of connections in a row whose payload failed, after which a path that has worked is not used."""


@dataclass(slots=True)
class _Record:
    failed: int = 0
    """Connections in a row that broke under a pull and had carried none."""
    worked: bool = False
    not_before: float = 0.0
    pause_s: float = _FIRST_S


class PathMemory:
    """The paths of one reader by owner and transport. Times refer to `time.monotonic()`. Used by the control loop."""

    def __init__(self) -> None:
        self.num_given_up = 0
        """How often a path was given up for the next transport."""
        self._records: dict[tuple[str, str], _Record] = {}

    def ended(self, worker_id: str, transport: str, valid: int, failed: int, now: float) -> None:
        """Records how many pulls over a connection that broke were valid, and how many failed by it."""
        record = self._record(worker_id, transport)
        if valid:
            record.failed, record.worked, record.pause_s = 0, True, _FIRST_S
            return
        if not failed:
            return
        record.failed += 1
        if record.failed >= (_ENOUGH if record.worked else 1):
            self.num_given_up += 1
            record.not_before = now + record.pause_s
            record.pause_s = min(2 * record.pause_s, _LONGEST_S)

    def given_up(self, worker_id: str, transport: str, now: float) -> str:
        """Returns why a path is not to be used now, or ""."""
        record = self._records.get((worker_id, transport))
        if record is None or record.not_before <= now:
            return ""
        return (
            f"its probe passes and its last {record.failed} connection(s) failed without one whole pull; "
            f"tried again in {record.not_before - now:.0f} s"
        )

    def _record(self, worker_id: str, transport: str) -> _Record:
        record = self._records.pop((worker_id, transport), None) or _Record()
        self._records[worker_id, transport] = record  # the latest comes last
        if len(self._records) > _MOST_PATHS:
            del self._records[next(iter(self._records))]
        return record


def pause_s(num_tries: int) -> float:
    """Returns how long to wait before the next look for a better path: 10 s, then twice as long up to 5 minutes."""
    return min(_FIRST_S * 2.0 ** min(num_tries, 10), _LONGEST_S)
