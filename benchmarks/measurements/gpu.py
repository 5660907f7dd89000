# SPDX-License-Identifier: Apache-2.0
"""Measures a pull between two processes with pools on GPUs, in turns with copies of the driver.

The limit is one device-to-device copy of as many bytes, within the reader's GPU. Another row is one driver copy per
block, like a connector without a kernel does. The time of kvlink is what a Python caller sees, as in pull.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvlink import BlockPool, Ticket, Worker, _bench, _core
from kvlink.errors import ConfigError
from kvlink.hardware.kernels import kernel_for
from kvlink.layout import dense

from ..harness.block_draws import pieces_of
from ..harness.contents import Ids, filled, torch_with_gpu
from ..harness.owner import flat
from ..harness.processes import BenchError, OwnerSide, owner_process
from ..harness.results import verified
from ..harness.statistics import quantiles_us


class Shape(NamedTuple):
    """The shape of a pull: `blocks` blocks of `planes` planes are pieces of `piece_bytes`, anywhere in the pool."""

    piece_bytes: int
    planes: int
    blocks: int


SHAPES = (Shape(32 << 10, 64, 256), Shape(4 << 10, 160, 256), Shape(16 << 10, 1, 1))
"""The rows that the performance bars refer to: 4,096 tokens of Llama 3.1 8B, of 70B at TP 8, and one block."""

_ITERS, _SMALL_ITERS = 50, 1000
_SMALL_BYTES = 1 << 20
_CHECK_EVERY = 10
_MOST_COPIES_EACH = 5
_BOUNCED_BYTES, _BOUNCED_PIECES, _BOUNCE_ROUNDS = 256 << 20, (256, 4 << 10, 32 << 10), 10
_SEED = 20_251_122


def rows(
    gpus: Sequence[int], transport: str, iters: int | None, shapes: Sequence[Shape] = SHAPES
) -> Iterator[dict[str, Any]]:
    """Yields one row per shape. `gpus` are the owner's and the reader's, by CUDA's numbers.

    Raises ConfigError without torch and CUDA, TransportUnavailable, BenchError and TransferError.
    """
    for shape in shapes:
        with opened(gpus, transport, shape) as bench:
            small = shape.piece_bytes * shape.planes * shape.blocks <= _SMALL_BYTES
            yield bench.row(iters or (_SMALL_ITERS if small else _ITERS))


def bounce_rows(gpu: int, rounds: int | None) -> Iterator[dict[str, Any]]:
    """Measures slots of the bounce buffer, gathered from and scattered to random places of the GPU's memory.

    A few are in flight at a time, as with tcp. They are compared with copies of the same pinned memory as a whole.
    Raises TransportUnavailable.
    """
    memory, kernel = _core.CudaMemory(_BOUNCED_BYTES, gpu), kernel_for(gpu)
    for direction, to_device in (("to the GPU", True), ("from the GPU", False)):
        for piece_bytes in _BOUNCED_PIECES:
            times = [
                _bench.time_bounce(memory, piece_bytes, to_device, kernel)
                for _ in range(min(rounds or _BOUNCE_ROUNDS, _BOUNCE_ROUNDS))
            ]
            ours, plain = (
                _BOUNCED_BYTES / 2**30 / (float(np.median(ns)) / 1e9) for ns in zip(*times, strict=True)
            )
            yield {
                "bounce": direction,
                "piece_bytes": piece_bytes,
                "gib_per_s": ours,
                "limit": "copies of pinned memory",
                "limit_gib_per_s": plain,
                "of_limit": ours / plain,
            }


def pair_of(text: str) -> tuple[int, int]:
    """Parses "0,1", the owner's GPU and the reader's. Raises ConfigError."""
    numbers = [int(number) if number.strip().isdecimal() else -1 for number in text.split(",")]
    if len(numbers) != 2 or min(numbers) < 0:
        raise ConfigError(f"--gpus {text!r} is not known; write two of CUDA's numbers, as in 0,1")
    return numbers[0], numbers[1]


class _Bench:
    """Pulls random blocks of the owner's pool into random blocks of the reader's."""

    def __init__(self, owner: OwnerSide, worker: Worker, wanted: BlockPool, shape: Shape) -> None:
        self._owner, self._worker, self._wanted, self._shape = owner, worker, wanted, shape
        self._rng = np.random.default_rng(_SEED)
        self._requests = map("gpu-{}".format, count())
        self._transport = ""

    def row(self, iters: int) -> dict[str, Any]:
        """Alternates between kvlink and the driver, pull by pull. Every tenth pull is compared byte by byte."""
        piece_bytes, planes, blocks = self._shape
        num_bytes = piece_bytes * planes * blocks
        self._pull(compare=True)
        ours, flat, each = [], [], []
        torch_with_gpu().cuda.synchronize(self._worker.pool.gpu)
        for turn in range(iters):
            ours.append(self._pull(compare=turn % _CHECK_EVERY == 0 or turn == iters - 1))
            flat.append(self._copy(np.array([0]), num_bytes))
            if turn < _MOST_COPIES_EACH:  # ten thousands of calls take a tenth of a second
                each.append(self._copy(self._scattered(planes * blocks), piece_bytes))
        limit_us = float(np.median(flat))
        p50 = float(np.median(ours))
        return {
            "transport": self._transport,
            "gpu": torch_with_gpu().cuda.get_device_name(self._worker.pool.gpu),
            "driver": _driver(),
            "piece_bytes": piece_bytes,
            "pieces": planes * blocks,
            "planes": planes,
            "bytes": num_bytes,
            "iters": iters,
            **quantiles_us(ours),
            "gib_per_s": num_bytes / 2**30 / (p50 / 1e6),
            "limit": "one device-to-device copy",
            "limit_gib_per_s": num_bytes / 2**30 / (limit_us / 1e6),
            "of_limit": limit_us / p50,
            "copy_a_piece_us": float(np.median(each)),
            "cpu_us": self._cpu_us(min(iters, 20)),
            **verified(0, 1 + -(-iters // _CHECK_EVERY), iters),
        }

    def pull_once(self) -> None:
        """Pulls once, without a comparison."""
        self._pull(compare=False)

    def _draw(self, num_blocks: int) -> Ids:
        return self._rng.permutation(num_blocks)[: self._shape.blocks].astype(np.uint32)

    def _offered(self) -> tuple[Ids, Ids, Ticket]:
        num_blocks = self._worker.pool.layout.num_blocks
        owner_ids, ids = self._draw(num_blocks), self._draw(num_blocks)
        requests = {next(self._requests): owner_ids.tolist()}
        (text,) = self._owner.call("offer", requests=requests, num_tokens=None, publish=False)["tickets"]
        return owner_ids, ids, Ticket.from_text(text)

    def _pull(self, *, compare: bool) -> float:
        owner_ids, ids, ticket = self._offered()
        here = self._blocks_of(self._worker.pool)
        if compare:
            here[:, ids.astype(np.int64)] = 0xA5
            torch_with_gpu().cuda.synchronize(self._worker.pool.gpu)
        start = time.perf_counter_ns()
        pull = self._worker.pull(ticket, into=ids)
        pull.wait()
        took_us = (time.perf_counter_ns() - start) / 1000
        self._transport = pull.explain()[0].transport
        if compare:
            there = self._blocks_of(self._wanted)[:, owner_ids.astype(np.int64)]
            if not torch_with_gpu().equal(here[:, ids.astype(np.int64)], there):
                raise BenchError("the pulled bytes differ from the owner's")
        return took_us

    def _scattered(self, num_pieces: int) -> Ids:
        """Returns the numbers of pieces, of which no two neighbours follow each other."""
        return np.concatenate([np.arange(num_pieces)[1::2], np.arange(num_pieces)[::2]])

    def _copy(self, blocks: Any, size: int) -> float:
        """Copies from the pool's first half to its second by the driver, and returns the time."""
        region = self._worker.pool.regions[0]
        half = region.num_bytes // 2
        return (
            _bench.baseline_cuda_copies(
                pieces_of(blocks, blocks, size, region.address, region.address + half)
            )
            / 1000
        )

    def _cpu_us(self, pulls: int) -> float:
        """Returns the CPU time of both processes per pull, with plan, post, wait and settle."""
        spent = 0
        for _ in range(pulls):
            _, ids, ticket = self._offered()
            start = time.process_time_ns() + self._owner.cpu_ns()
            self._worker.pull(ticket, into=ids).wait()
            spent += time.process_time_ns() + self._owner.cpu_ns() - start
        return spent / 1000 / pulls

    def _blocks_of(self, pool: BlockPool) -> Any:
        piece_bytes, planes, _ = self._shape
        num_blocks = pool.layout.num_blocks
        return pool.torch()[: planes * num_blocks * piece_bytes].view(planes, num_blocks, piece_bytes)


@contextmanager
def opened(gpus: Sequence[int], transport: str, shape: Shape) -> Iterator[_Bench]:
    """Opens an owner and a reader with pools of a shape."""
    owner_gpu, reader_gpu = gpus
    geometry = flat(shape.piece_bytes, max(4 * shape.blocks, 1024), shape.planes)
    layout = dense(geometry)
    wanted = filled(layout, reader_gpu, _SEED)
    with (
        owner_process(geometry, _SEED, transport, gpu=owner_gpu) as owner,
        Worker(BlockPool.allocate(layout, gpu=reader_gpu), "bench-reader", transports=transport) as worker,
    ):
        yield _Bench(owner, worker, wanted, shape)


def _driver() -> str:
    try:
        return driver_version(Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return "unknown"


def driver_version(text: str) -> str:
    """Returns the first number with dots in what the kernel module says of itself, or "unknown"."""
    found = re.search(r"Kernel Module\b.*?\s(\d+\.[\d.]+)", text)
    return found[1] if found else "unknown"
