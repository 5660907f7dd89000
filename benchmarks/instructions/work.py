# SPDX-License-Identifier: Apache-2.0
"""Does one piece of the data plane's work: `python work.py CORE CASE ROUNDS` does it ROUNDS times on fixed inputs.

It runs under valgrind, so all cases but one import the extension modules by their path and nothing else of kvlink.
"""

from __future__ import annotations

import gc
import sys
from array import array
from collections.abc import Callable
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from random import Random
from typing import Any

_LAYERS, _BLOCKS, _POOL_BLOCKS = 80, 256, 512  # one rank of Llama 3.1 70B at TP 8, 4,096 tokens
_TOKENS, _ROW_BYTES = 16, 256
_BLOCK_BYTES = _TOKENS * _ROW_BYTES
_PLANES = 2 * _LAYERS
_SLOTS, _TTL_S = 64, 3600.0
_LINE_BYTES, _NEVER_LONG_US, _SETTLED = 64, 1e9, 5


def load(path: str, name: str = "kvlink._core") -> Any:
    """Loads an extension module without the package around it."""
    loader = ExtensionFileLoader(name, path)
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


def bench_module(core: Any) -> Any:
    """Returns the module with `post_ns`: `_bench` beside `core` or above it, or `core` itself of an older commit."""
    if hasattr(core, "post_ns"):
        return core
    path = Path(core.__file__)
    name = path.name.replace("_core", "_bench")
    beside = next(each / name for each in path.parents[:2] if (each / name).exists())
    return sys.modules.get("kvlink._bench") or load(str(beside), "kvlink._bench")


def planning(core: Any) -> tuple[Callable[[Any], Any], Any]:
    """Fills a new plan with random blocks, or refills a given one."""
    pool_bytes = _PLANES * _POOL_BLOCKS * _BLOCK_BYTES
    planes = [(0, plane // 2, plane * _POOL_BLOCKS * _BLOCK_BYTES) for plane in range(_PLANES)]
    layout = core.Layout(
        _POOL_BLOCKS, _TOKENS, 0, 1, _ROW_BYTES, _BLOCK_BYTES, _ROW_BYTES, _ROW_BYTES, planes
    )
    planner = core.Planner(layout, layout, [(1 << 40, pool_bytes)], [pool_bytes], [0])
    owner, reader = (array("I", Random(seed).sample(range(_POOL_BLOCKS), _BLOCKS)) for seed in (1, 2))
    tokens = (0, _BLOCKS * _TOKENS)
    return lambda plan: planner.plan(owner, reader, tokens, into=plan), planner.plan(owner, reader, tokens)


def plan(core: Any, rounds: int) -> None:
    """Plans 40,960 descriptors in each round."""
    fill, made = planning(core)
    for _ in range(rounds - 1):
        fill(made)


def post(core: Any, rounds: int) -> None:
    """Checks, chains and posts the same descriptors as RDMA reads, without a NIC."""
    _, made = planning(core)
    bench_module(core).post_ns(made, rounds)


def settle(core: Any, rounds: int) -> None:
    """Grants a lease, settles it, and processes its end."""
    engine = core.Engine(1, ["loopback"], "127.0.0.1", 0, "", _SLOTS, 1, 0, 1, [])
    engine.add_pool_region(core.HostMemory(1 << 12))
    engine.start()
    for lease in range(1, rounds + 1):
        [(slot, _, settle_nonce)] = engine.grant(lease, 1, 0, _TTL_S)
        engine.settle_local(slot, settle_nonce)
        [_] = engine.take_ended()
    engine.close()


def sweep(core: Any, rounds: int) -> None:
    """Sweeps a table with many leases out that nobody touches."""
    bench_module(core).sweep_ns(32_768, 32_000, rounds)


def pull(core: Any, rounds: int) -> None:
    """Pulls one small block from another engine of this process, validates it and settles it."""
    layout = core.Layout(
        _POOL_BLOCKS, 1, 0, 1, _LINE_BYTES, _LINE_BYTES, _LINE_BYTES, _LINE_BYTES, [(0, 0, 0)]
    )
    memory = [core.HostMemory(_POOL_BLOCKS * _LINE_BYTES) for _ in range(2)]
    owner, reader = (
        core.Engine(1, ["loopback"], "127.0.0.1", 0, "", _SLOTS, 1, _NEVER_LONG_US, 1, []) for _ in memory
    )
    for engine, pool in zip((owner, reader), memory, strict=True):
        engine.add_pool_region(pool)
        engine.start()
    ((_, address, pool_keys, lease_keys, _, _),) = owner.access()
    connection = reader.open("loopback", address, core.PathStats("loopback"))
    number, replies, _, _ = owner.accept("loopback", connection.hellos(), True, 0)
    regions = connection.establish(number, replies, pool_keys, lease_keys, 1, _TTL_S)
    here, num_bytes = memory[1], _POOL_BLOCKS * _LINE_BYTES
    planner = core.Planner(layout, layout, [(here.address, num_bytes)], [num_bytes], regions)
    blocks = array("I", [7])
    for lease in range(1, rounds + 1):
        [seat] = owner.grant(lease, 1, 1, _TTL_S)
        pulled = connection.pull(planner, blocks, blocks, (0, 1), (0, 1), seat, 0, _TTL_S)
        if pulled.state != _SETTLED:
            raise RuntimeError("the pull did not run on this thread")
        while not owner.take_ended():
            pass
    connection.close()
    reader.close()
    owner.close()


def worker_pull(core: Any, rounds: int) -> None:
    """Pulls one small block as a program does: `Worker.pull(...).wait()`."""
    from kvlink import BlockPool, Worker, WorkerConfig  # with the core that is loaded already
    from kvlink.layout import Geometry, dense

    layout = dense(
        Geometry(num_layers=1, total_heads=1, row_bytes=_LINE_BYTES, num_blocks=_POOL_BLOCKS, block_tokens=1)
    )
    # Unsigned tickets: a reader that checks signatures checks the file of keys once a second.
    config = WorkerConfig(
        transports="loopback", inline_us=100_000, lease_slots=4 * rounds, ticket_keys="none"
    )
    gc.disable()
    with (
        Worker(BlockPool.allocate(layout), "owner", config=config) as owner,
        Worker(BlockPool.allocate(layout), "reader", config=config) as reader,
    ):
        tickets = iter([owner.offer(str(lease), [7], ttl_s=_TTL_S) for lease in range(2 * rounds + 1)])
        into = array("I", [7])
        reader.pull(next(tickets), into).wait()

        def once() -> None:
            reader.pull(next(tickets), into).wait()

        for _ in range(rounds):  # until the interpreter has specialised what is called
            once()
        bench_module(core).call_rounds(once, rounds)


CASES = {work.__name__: work for work in (plan, post, settle, sweep, pull, worker_pull)}

if __name__ == "__main__":
    CASES[sys.argv[2]](load(sys.argv[1]), int(sys.argv[3]))
