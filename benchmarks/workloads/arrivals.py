# SPDX-License-Identifier: Apache-2.0
"""Requests that come when they come, whether or not the one before is done: an open loop.

A closed loop asks for the next request when the last is served, so that what is slow delays the questions and hides
itself (coordinated omission). Here a request's time counts from when it was meant to come: that it had to wait for a
free slot is part of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

import numpy as np

from kvlink.errors import ConfigError, KVLinkError

from .traces import Request, requests_of

LATE_US = 1000.0
"""A request that begins more than this after it was meant to has started late: no slot was free, or
the machine too busy to begin it."""

_LEAD_S = 0.05  # until the first arrival, for all threads to wait for it


class Served(NamedTuple):
    """In µs: from the intended arrival until it began, and until it was done or failed with `error`."""

    late_us: float
    took_us: float
    error: KVLinkError | None = None


class Arrivals(NamedTuple):
    """When each of some requests comes, in seconds."""

    name: str
    at_s: Sequence[float]

    @classmethod
    def poisson(cls, num: int, per_s: float, seed: int = 0) -> Arrivals:
        """Independent of each other."""
        return cls(f"Poisson, {per_s:g}/s", poisson_times(num, per_s, seed))

    @classmethod
    def of_trace(cls, requests: Sequence[Request], speed: float) -> Arrivals:
        """The trace's own times, `speed` times as fast."""
        return cls(f"trace × {speed:g}", [request.at_s / speed for request in requests])


def workload(
    tokens: int, trace: str, requests: int, rate: float | None, speed: float | None
) -> tuple[int | list[int], Arrivals | None]:
    """Prompt lengths of the requests that the options ask for, and their arrivals. Raises ConfigError."""
    if rate and speed:
        raise ConfigError("arrivals are either at --rate or at the trace's times, --speed times as fast")
    if speed and not trace:
        raise ConfigError("--speed is of a trace's own times: give --trace, too")
    found = requests_of(trace, requests) if trace else []
    lengths = [each.prompt_tokens for each in found]
    if speed:
        return lengths, Arrivals.of_trace(found, speed)
    if rate:
        lengths = lengths or [tokens] * requests
        return lengths, Arrivals.poisson(len(lengths), rate)
    return lengths or tokens, None


def poisson_times(num: int, per_s: float, seed: int) -> list[float]:
    """Seconds of `num` arrivals, the first after a pause like the others."""
    pauses = np.random.default_rng(seed).exponential(1 / per_s, num)
    return [float(at_s) for at_s in np.cumsum(pauses)]


def open_loop(
    at_s: Sequence[float], serve: Callable[[int, int], None], slots: int, start_ns: int | None = None
) -> list[Served]:
    """Calls serve(slot, index) for each arrival, in order, on as many threads as there are slots.

    at_s: rising, after `start_ns` of the monotonic clock (soon, when not given). KVLinkErrors of `serve` are part of
    the result, others are raised.
    """
    start_ns = time.monotonic_ns() + int(_LEAD_S * 1e9) if start_ns is None else start_ns
    served: list[Served | None] = [None] * len(at_s)
    indices, lock = count(), threading.Lock()

    def work(slot: int) -> None:
        while True:
            with lock:
                index = next(indices)
            if index >= len(at_s):
                return
            served[index] = _serve(start_ns + int(at_s[index] * 1e9), serve, slot, index)

    with ThreadPoolExecutor(slots) as threads:
        for done in [threads.submit(work, slot) for slot in range(slots)]:
            done.result()
    return [each for each in served if each is not None]


def _serve(due_ns: int, serve: Callable[[int, int], None], slot: int, index: int) -> Served:
    time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
    began_ns, failed = time.monotonic_ns(), None
    try:
        serve(slot, index)
    except KVLinkError as error:
        failed = error
    return Served((began_ns - due_ns) / 1e3, (time.monotonic_ns() - due_ns) / 1e3, failed)
