# SPDX-License-Identifier: Apache-2.0
"""What vLLM's steps spend in a connector: written down call by call in the server, read here. Needs no vLLM.

A record has 8 bytes: which of CALLS, and the nanoseconds that it took of the thread that steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE_SETTING = "CALL_TIMES"
STARTS = ("bind_connector_metadata", "start_load_kv")
"""kvlink starts loads in the first of them, NIXL in the second."""
POLLS = ("get_transfer_results",)
CALLS = (
    *STARTS,
    "wait_for_save",
    *POLLS,
    "get_block_ids_with_load_errors",
    "get_kv_connector_stats",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
"""In the worker, each once in a step, the first of them first."""
_RECORD = struct.Struct("<BxxxI")


class Step(NamedTuple):
    """Microseconds: of what starts loads, of what asks how they are, of all calls."""

    start_us: float
    poll_us: float
    all_us: float


class CallTimes:
    """The writing end; one call a record, so that what was killed leaves whole ones."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def took(self, call: str, ns: int) -> None:
        self._file.write(_RECORD.pack(CALLS.index(call), min(ns, 2**32 - 1)))


def steps(path: Path, start: int = 0) -> list[Step]:
    """Those that began and ended after the file had `start` bytes."""
    found: list[dict[str, int]] = []
    for call, ns in _records(path, start):
        if call == CALLS[0]:
            found.append({})
        if found:
            found[-1][call] = found[-1].get(call, 0) + ns
    return [_step(one) for one in found if CALLS[-1] in one]


def _records(path: Path, start: int) -> Iterator[tuple[str, int]]:
    data = path.read_bytes()[start:]
    for number, ns in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
        yield CALLS[number], ns


def _step(taken: dict[str, int]) -> Step:
    return Step(
        sum(taken.get(call, 0) for call in STARTS) / 1e3,
        sum(taken.get(call, 0) for call in POLLS) / 1e3,
        sum(taken.values()) / 1e3,
    )
