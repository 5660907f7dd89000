# SPDX-License-Identifier: Apache-2.0
"""Measures the control plane: latency of a cold claim, and handoffs per second through one coordinator core.

A handoff here is one offer and one claim of it by another process. Settling is a one-sided write and not the
coordinator's work. All processes share this host, so their monotonic clocks are the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from kvlink.control import Claim, CoordinatorClient, Offer
from kvlink.coordinator import Coordinator
from kvlink.coordinator.coordinator import tune_gc
from kvlink.layout import KVLayout, Plane
from kvlink.types import HostIdentity, WorkerCard

from ..harness.statistics import quantiles_us

_SPAWN = multiprocessing.get_context("spawn")
_TICKET_BYTES = 1_100  # the ticket of 4,096 tokens in blocks of 16
_LATENCY_ROUNDS = 1_000
_UNARY_HANDOFFS = 8_000
_UNARY_IN_FLIGHT = 16  # per process
_STREAM_HANDOFFS = 120_000
_STREAM_IN_FLIGHT = 1_024  # per process, in two halves that overlap
_TTL_S = 60.0

Row = dict[str, Any]
Load = Callable[[CoordinatorClient, int, int, int], Awaitable[None]]
Loader = Callable[..., None]


def rows(workers: int = 2) -> Iterator[Row]:
    """Measures with `workers` load processes: at least 2, because no process claims its own offers."""
    workers = max(2, workers)
    with _serving(_coordinator) as (address, pid):
        yield {"what": "claim of a published offer", **_latency(address, _claim_published, "known")}
        yield {"what": "offer to a waiting claim", **_latency(address, _offer_to_waiting, "awaited")}
        count = _UNARY_HANDOFFS // workers
        row = throughput([pid], workers, count, loader, [address], unary, workers, count)
        yield {"what": "unary handoffs", **row, "verified": True}
        count = _STREAM_HANDOFFS // workers
        row = throughput([pid], workers, count, loader, [address], stream, workers, count)
        yield {"what": "batched stream handoffs", **row, "verified": True}
    with _serving(_serve_empty) as (address, pid):
        count = _UNARY_HANDOFFS // workers
        row = throughput([pid], workers, count, _empty_loader, address, _UNARY_IN_FLIGHT, count)
        yield {"what": "limit: as unary, of a gRPC service that does nothing", **row}


# Each load process offers its own requests and claims those of the next one.


async def unary(client: CoordinatorClient, me: int, other: int, count: int, run: str = "unary") -> None:
    """Makes one call per request. `run` distinguishes the requests of one run from another's."""

    async def lane(first: int) -> None:
        for number in range(first, count, _UNARY_IN_FLIGHT):
            await client.offer(_offer(me, number, run))
            _verify(await client.claim(_request(other, number, run), _TTL_S), other, number, run)

    await asyncio.gather(*map(lane, range(_UNARY_IN_FLIGHT)))


async def stream(client: CoordinatorClient, me: int, other: int, count: int) -> None:
    """Sends many requests per message."""
    async with client.handoffs() as handoffs:

        async def half(first: int) -> None:
            size = _STREAM_IN_FLIGHT // 2
            for start in range(first * size, count, 2 * size):
                numbers = range(start, min(start + size, count))
                offers = [handoffs.offer(_offer(me, number)) for number in numbers]
                claims = [handoffs.claim(Claim(_request(other, number), _TTL_S)) for number in numbers]
                for number, claim in zip(numbers, claims, strict=True):
                    _verify(await claim, other, number)
                for offer in offers:
                    await offer

        await asyncio.gather(half(0), half(1))


def _request(worker: int, number: int, run: str = "") -> str:
    return f"cmpl-{worker}-{run}{number:0{32 - len(run)}d}"


def _offer(worker: int, number: int, run: str = "") -> Offer:
    request_id = _request(worker, number, run)
    return Offer(request_id, f"worker-{worker}", 1, _TTL_S, 0, 1, 1, request_id.encode().ljust(_TICKET_BYTES))


def _verify(tickets: list[bytes], worker: int, number: int, run: str = "") -> None:
    if tickets != [_offer(worker, number, run).ticket]:
        raise AssertionError(f"request {number} of worker {worker} returned the tickets of another")


def throughput(
    coordinators: Sequence[int],
    workers: int,
    count: int,
    target: Loader,
    *args: object,
    etcd: Sequence[int] = (),
) -> Row:
    """Lets `target` make `count` handoffs in each of `workers` processes, and measures the throughput.

    `coordinators` and `etcd` are the process ids of those whose CPU time counts.
    """
    with in_processes(target, workers, *args) as pipes:
        one_from_each(pipes)
        before_s = [sum(map(cpu_s, pids)) for pids in (coordinators, etcd)]
        for pipe in pipes:
            pipe.send("go")
        spans = one_from_each(pipes)
        busy_s, etcd_s = (
            sum(map(cpu_s, pids)) - spent for pids, spent in zip((coordinators, etcd), before_s, strict=True)
        )
    elapsed_s, handoffs = max(end for _, end in spans) - min(start for start, _ in spans), count * workers
    return {
        "workers": workers,
        "handoffs": handoffs,
        "handoffs_per_s": round(handoffs / elapsed_s),
        "coordinator_cpu_us": round(busy_s / handoffs * 1e6, 2),
        "handoffs_per_coordinator_cpu_s": round(handoffs / busy_s),
        "coordinator_busy": round(busy_s / elapsed_s, 2),
    } | (
        {"etcd_cpu_us": round(etcd_s / handoffs * 1e6), "etcd_busy": round(etcd_s / elapsed_s, 2)}
        if etcd
        else {}
    )


def loader(
    pipe: Connection, index: int, addresses: Sequence[str], load: Load, workers: int, count: int
) -> None:
    """Runs load process `index` of `workers`: joins at the start, loads on request, and answers when done."""

    async def run() -> None:
        async with CoordinatorClient(addresses[index % len(addresses)], timeout_s=30.0) as client:
            await client.join(card(index))
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            start = time.monotonic()
            await load(client, index, (index + 1) % workers, count)
            pipe.send((start, time.monotonic()))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


# A gRPC service that does nothing, which is the limit for unary calls to any service in Python.

_SERVICE, _CALL = "kvlink.Empty", "Call"
_REQUEST = bytes(_TICKET_BYTES)


async def _serve_empty() -> str:
    """Listens on loopback until the event loop ends. Returns "host:port"."""

    async def answer(blob: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> bytes:
        return blob

    server = grpc.aio.server()
    handlers: dict[str, Any] = {_CALL: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _kept.append(server)
    return f"127.0.0.1:{port}"


def _empty_loader(pipe: Connection, index: int, address: str, in_flight: int, count: int) -> None:
    """Runs a load process that makes two consecutive calls per handoff, with `in_flight` handoffs at a time."""

    async def run() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = channel.unary_unary(f"/{_SERVICE}/{_CALL}")

            async def lane(first: int) -> None:
                for _ in range(first, count, in_flight):
                    await call(_REQUEST)
                    await call(_REQUEST)

            await call(_REQUEST)
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            start = time.monotonic()
            await asyncio.gather(*map(lane, range(in_flight)))
            pipe.send((start, time.monotonic()))
            await asyncio.to_thread(pipe.recv)

    asyncio.run(run())


_kept: list[grpc.aio.Server] = []  # a server without a reference is stopped


# Latency: one process offers, another one claims.


def _latency(address: str, prefill: _Prefill, run: str) -> Row:
    with in_processes(_claimer, 1, address, run) as (claimer,):
        claimer.recv()
        taken_s = asyncio.run(_offer_each(address, prefill, claimer, run))
    return {
        "workers": 2,
        "rounds": len(taken_s),
        **quantiles_us([1e6 * each for each in taken_s]),
        "verified": True,
    }


async def _offer_each(address: str, prefill: _Prefill, claimer: Connection, run: str) -> list[float]:
    async with CoordinatorClient(address) as client:
        await client.join(card(0))
        taken_s = [await prefill(client, claimer, number, run) for number in range(-50, _LATENCY_ROUNDS)]
    return taken_s[50:]


_Prefill = Callable[[CoordinatorClient, Connection, int, str], Awaitable[float]]


async def _claim_published(client: CoordinatorClient, claimer: Connection, number: int, run: str) -> float:
    await client.offer(_offer(0, number, run))
    claimer.send(number)
    asked, got = claimer.recv()
    return float(got - asked)


async def _offer_to_waiting(client: CoordinatorClient, claimer: Connection, number: int, run: str) -> float:
    claimer.send(number)
    while not (await client.status()).waiting_claims:
        await asyncio.sleep(0)
    published = time.monotonic()
    await client.offer(_offer(0, number, run))
    _, got = claimer.recv()
    return float(got - published)


def _claimer(pipe: Connection, _: int, address: str, run: str) -> None:
    async def serve() -> None:
        async with CoordinatorClient(address) as client:
            pipe.send("ready")
            while (number := await asyncio.to_thread(pipe.recv)) is not None:
                asked = time.monotonic()
                tickets = await client.claim(_request(0, number, run), 10.0)
                got = time.monotonic()
                _verify(tickets, 0, number, run)
                pipe.send((asked, got))

    asyncio.run(serve())


# Processes.


async def _coordinator() -> str:
    tune_gc()
    return await Coordinator(lease_s=600.0).start()


@contextmanager
def _serving(service: Callable[[], Awaitable[str]]) -> Iterator[tuple[str, int]]:
    """Yields a service's address and process id. It has a core of its own if there are two."""
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(target=_serve, args=(theirs, service), daemon=True)
    process.start()
    try:
        yield ours.recv(), process.pid or 0
    finally:
        process.terminate()
        process.join()


def _serve(pipe: Connection, service: Callable[[], Awaitable[str]]) -> None:
    core = max(os.sched_getaffinity(0))
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), {core})

    async def run() -> None:
        pipe.send(await service())
        await asyncio.Event().wait()

    asyncio.run(run())


@contextmanager
def in_processes(target: Callable[..., None], count: int, *args: object) -> Iterator[list[Connection]]:
    """Runs children off the coordinator's core where possible. They end when they receive None or are killed."""
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    for index in range(count):
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_off_core, args=(target, theirs, index, *args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield pipes
    finally:
        for pipe in pipes:
            with suppress(OSError):  # it may have died
                pipe.send(None)
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def _off_core(target: Callable[..., None], *args: object) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores - {max(cores)} or cores)
    target(*args)


def one_from_each(pipes: list[Connection]) -> list[Any]:
    """Returns the next message of each process."""
    return [pipe.recv() for pipe in pipes]


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process, by the clock of clock_getcpuclockid on Linux."""
    return time.clock_gettime((~pid << 3) | 2)


def card(index: int) -> WorkerCard:
    """Returns the card of load process `index`."""
    layout = KVLayout(
        model="bench",
        dtype="bfloat16",
        block_tokens=16,
        total_heads=8,
        first_head=0,
        num_heads=8,
        row_bytes=256,
        block_stride=32 << 10,
        token_stride=2 << 10,
        head_stride=256,
        num_blocks=1,
        planes=(Plane(0, 0, 0),),
    )
    host = HostIdentity("bench", 0, 0, os.getpid(), os.getuid())
    return WorkerCard(f"worker-{index}", 1, bytes(16), "127.0.0.1:1", host, (layout,), (32 << 10,), ())
