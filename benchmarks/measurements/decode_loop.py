# SPDX-License-Identifier: Apache-2.0
"""A loop like decoding, beside which blocks are moved: a step is one pass through layers of small matrix products.

On a CPU the weights of a step are larger than most caches, as those of a model are, so that a step needs the memory's
bandwidth. It takes one thread: the products are too small to be divided among several, whose waiting for each other
would be measured instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

import numpy as np

from kvlink.errors import ConfigError

from ..harness.contents import torch_with_gpu

Step = Callable[[], object]

CPU, GPU = COMPUTE = ("cpu", "gpu")
_GPU_SHAPE = (32, 4096, 32)
"""Layers, width, and requests of a batch."""
_CPU_SHAPE = (512, 128, 8)
"""Products, width, and requests of a batch: 32 MiB of weights in 8 layers."""
_CPU_LAYERS = 8


def step_on(compute: str, gpu: int = 0) -> Step:
    """Returns a step on the CPU or on a GPU, which waits for its end. Raises ConfigError."""
    if compute not in COMPUTE:
        raise ConfigError(f"a loop on {compute!r} is not known; write {' or '.join(COMPUTE)}")
    return gpu_step(gpu) if compute == GPU else _cpu_step()


def gpu_step(gpu: int) -> Step:
    """Returns a step on a GPU, which waits for its end. Raises ConfigError without torch or a GPU."""
    torch = torch_with_gpu()
    layers, width, requests = _GPU_SHAPE
    device = f"cuda:{gpu}"
    weights = [
        torch.randn(width, width, device=device, dtype=torch.bfloat16) / width**0.5 for _ in range(layers)
    ]
    start = torch.randn(requests, width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        state = start
        for weight in weights:
            state = state @ weight
        torch.cuda.current_stream(gpu).synchronize()

    return step


def _cpu_step() -> Step:
    products, width, requests = _CPU_SHAPE
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((_CPU_LAYERS, products // _CPU_LAYERS, width, width), np.float32)
    start = rng.standard_normal((requests, width), np.float32)

    def step() -> None:
        state = start
        for layer in weights:
            state = np.tanh((state @ layer).sum(axis=0))

    return step


def times_us(step: Step, steps: int, clock_ns: Callable[[], int] = time.perf_counter_ns) -> list[float]:
    """Returns the time of each step, from the end of the one before it."""
    times, last = [], clock_ns()
    for _ in range(steps):
        step()
        now = clock_ns()
        times.append((now - last) / 1000)
        last = now
    return times


class Loop:
    """Runs steps on a thread of its own from entry, which waits for the first step, to exit, which raises its error."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._running, self._stop = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self.times_us: list[float] = []
        """The time of each step that began after the entry and ended before the exit."""
        self._thread = threading.Thread(target=self._run, name="kvlink-bench-decode")

    def __enter__(self) -> Loop:
        self._thread.start()
        self._running.wait()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _run(self) -> None:
        try:
            self._step()
            self._running.set()
            last = time.perf_counter_ns()
            while not self._stop.is_set():
                self._step()
                now = time.perf_counter_ns()
                if not self._stop.is_set():
                    self.times_us.append((now - last) / 1000)
                last = now
        except BaseException as error:
            self._error = error
        finally:
            self._running.set()
