# SPDX-License-Identifier: Apache-2.0
"""Measures how much slower a loop like decoding is while blocks are pulled on the same GPU.

A token of the loop is one step of decode_loop. The time between tokens is measured without pulls, and then beside pulls
that follow each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..harness.statistics import quantiles_us
from .decode_loop import Step, gpu_step, times_us
from .gpu import Shape, opened

SHAPE = Shape(32 << 10, 64, 256)
"""The pulls beside the loop: 4,096 tokens of Llama 3.1 8B."""

_TOKENS, _TOKENS_AN_ITERATION = 500, 10


def decode_rows(
    gpus: Sequence[int], transport: str, iters: int | None, shape: Shape = SHAPE
) -> Iterator[dict[str, Any]]:
    """Yields a row for the loop alone, and one for the loop beside pulls, on the reader's GPU.

    Measures 500 tokens, or fewer if `iters` is below 50.

    Raises ConfigError without torch and CUDA, TransportUnavailable, BenchError and TransferError.
    """
    step = gpu_step(gpus[1])
    with opened(gpus, transport, shape) as bench:
        tokens = min(_TOKENS, (iters or _TOKENS) * _TOKENS_AN_ITERATION)
        yield from compared(step, bench.pull_once, tokens)


def compared(
    step: Step, pull: Step, tokens: int, clock_ns: Callable[[], int] = time.perf_counter_ns
) -> Iterator[dict[str, Any]]:
    """Yields the rows of `decode_rows` for any two functions, of which `pull` runs on a thread of its own."""
    times_us(step, min(tokens, 20), clock_ns)  # warms up
    alone = times_us(step, tokens, clock_ns)
    beside, pulls = times_beside(step, pull, tokens, clock_ns)
    slower = float(np.median(beside)) / float(np.median(alone)) if np.median(alone) else None
    for name, times, count, ratio in (("alone", alone, 0, None), ("beside pulls", beside, pulls, slower)):
        yield {
            "decode": name,
            "tokens": len(times),
            "pulls": count,
            **quantiles_us(times),
            "p50_ratio": ratio,
        }


def times_beside(step: Step, pull: Step, tokens: int, clock_ns: Callable[[], int]) -> tuple[list[float], int]:
    """Returns the times of tokens while pulls follow each other on another thread, and how many pulls ended.

    The first token waits for the end of the first pull. Raises what a pull raises.
    """
    stop, first = threading.Event(), threading.Event()
    ended: list[BaseException | None] = []

    def pull_on() -> None:
        try:
            while not stop.is_set():
                pull()
                ended.append(None)
                first.set()
        except BaseException as error:
            ended.append(error)
        finally:
            first.set()

    thread = threading.Thread(target=pull_on, name="kvlink-bench-pulls")
    thread.start()
    try:
        first.wait()
        times = times_us(step, tokens, clock_ns)
    finally:
        stop.set()
        thread.join()
    if ended[-1] is not None:
        raise ended[-1]
    return times, len(ended)
