# SPDX-License-Identifier: Apache-2.0
"""Makes requests arrive at given times, whether or not the previous one is done: an open loop.

A closed loop sends the next request when the last is served, so that slow service delays the requests and hides itself
(coordinated omission). Here a request's time counts from its intended arrival and includes the wait for a free slot.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from statistics import median
from typing import NamedTuple

import numpy as np

from kvlink.errors import ConfigError, KVLinkError

from .traces import Request, requests_of

LATE_US = 1000.0
"""A request that begins more than this after its intended arrival has started late.

No slot was free then, or the machine was too busy.
"""

_GROWN = 2
_LEAD_S = 0.05  # until the first arrival, so that all threads wait for it


class Served(NamedTuple):
    """The times in µs from the intended arrival until the request began, and until it ended or failed with `error`."""

    late_us: float
    took_us: float
    error: KVLinkError | None = None


class Arrivals(NamedTuple):
    """The arrival of each request, in seconds."""

    name: str
    at_s: Sequence[float]

    @classmethod
    def random(
        cls, num: int, per_s: float, burstiness: float = 1.0, burst: int = 1, seed: int = 0
    ) -> Arrivals:
        """Returns arrivals with independent pauses, of `burst` requests at once.

        `burstiness` is the shape of their gamma distribution, as in `vllm bench serve`: 1 is Poisson, less is burstier.
        """
        at_s = gamma_times(-(-num // burst), per_s / burst, seed, burstiness)
        kind = "Poisson" if burstiness == 1 else f"gamma {burstiness:g}"
        return cls(
            f"{kind}, {per_s:g}/s" + (f", bursts of {burst}" if burst > 1 else ""),
            [at_s[number // burst] for number in range(num)],
        )

    @classmethod
    def of_trace(cls, requests: Sequence[Request], speed: float) -> Arrivals:
        """Returns the trace's own times, sped up by `speed`."""
        return cls(f"trace × {speed:g}", [request.at_s / speed for request in requests])


def workload(
    tokens: int,
    trace: str,
    requests: int,
    rate: float | None,
    speed: float | None,
    burstiness: float = 1.0,
    burst: int = 1,
) -> tuple[int | list[int], Arrivals | None]:
    """Returns the prompt lengths of the requests for these options, and their arrivals. Raises ConfigError."""
    if rate and speed:
        raise ConfigError("give either --rate or --speed: arrivals are at a rate or at the trace's times")
    if speed and not trace:
        raise ConfigError("--speed needs --trace, whose times it speeds up")
    if (burstiness != 1 or burst > 1) and not rate:
        raise ConfigError("--burstiness and --burst need --rate, whose arrivals they group")
    found = requests_of(trace, requests) if trace else []
    lengths = [each.prompt_tokens for each in found]
    if speed:
        return lengths, Arrivals.of_trace(found, speed)
    if rate:
        lengths = lengths or [tokens] * requests
        return lengths, Arrivals.random(len(lengths), rate, burstiness, burst)
    return lengths or tokens, None


def gamma_times(num: int, per_s: float, seed: int, shape: float = 1.0) -> list[float]:
    """Returns the times of `num` arrivals in seconds; the first one follows a pause like the others."""
    rng = np.random.default_rng(seed)
    pauses = rng.exponential(1 / per_s, num) if shape == 1 else rng.gamma(shape, 1 / (per_s * shape), num)
    return [float(at_s) for at_s in np.cumsum(pauses)]


def is_unstable(served: Sequence[Served]) -> bool:
    """Returns whether the queue grew throughout: then times are those of the number of requests, not of the rate.

    The median of the last third of the requests took longer than that of the first third, by more than twice as
    long as the quickest tenth takes.
    """
    third = len(served) // 3
    if not third:
        return False
    took = [each.took_us for each in served]
    quick = sorted(took)[len(took) // 10]
    return median(took[-third:]) - median(took[:third]) > max(LATE_US, _GROWN * quick)


def open_loop(
    at_s: Sequence[float], serve: Callable[[int, int], None], slots: int, start_ns: int | None = None
) -> list[Served]:
    """Calls serve(slot, index) for each arrival, in order, on one thread per slot.

    `at_s` rises, and counts from `start_ns` of the monotonic clock (soon, by default). KVLinkErrors of `serve` become
    part of the result, others are raised.
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
