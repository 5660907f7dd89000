# SPDX-License-Identifier: Apache-2.0
"""Reads how long vLLM's steps spend in a connector, which the server wrote down call by call. Needs no vLLM.

A record has 24 bytes: which of CALLS, when it began, and how long it took, in nanoseconds.
"""

from __future__ import annotations

import struct
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
_RECORD = struct.Struct("<QQQ")
_FORWARD_NS = 300_000  # the smallest model computes for longer than that


class Step(NamedTuple):
    """Microseconds: of what starts loads, of what asks how they are, of all calls."""

    start_us: float
    poll_us: float
    all_us: float
    computes: bool
    """The model ran between the first two calls. Else the engine had nothing to do but to ask."""


class CallTimes:
    """The writing end; one call a record, so that what was killed leaves whole ones."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def took(self, call: str, began_ns: int, ended_ns: int) -> None:
        self._file.write(_RECORD.pack(CALLS.index(call), began_ns, ended_ns - began_ns))


def steps(path: Path, start: int = 0) -> list[Step]:
    """Those that began and ended after the file had `start` bytes."""
    found: list[dict[str, tuple[int, int]]] = []
    data = path.read_bytes()[start:]
    for number, began_ns, took_ns in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
        if number == 0:
            found.append({})
        if found:
            found[-1][CALLS[number]] = (began_ns, took_ns)
    return [_step(one) for one in found if CALLS[-1] in one]


def _step(calls: dict[str, tuple[int, int]]) -> Step:
    bind_ns, took_ns = calls[STARTS[0]]
    return Step(
        sum(calls[call][1] for call in STARTS) / 1e3,
        sum(calls[call][1] for call in POLLS) / 1e3,
        sum(took_ns for _, took_ns in calls.values()) / 1e3,
        calls[STARTS[1]][0] - (bind_ns + took_ns) > _FORWARD_NS,
    )
