# SPDX-License-Identifier: Apache-2.0
"""The transport `cuda` between two processes on one host, by the real driver, with kvlink's kernel and without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from test_cuda_pools import BLOCKS, by_heads, converted, cuda_pool, equal

from kvlink import BlockPool, Ticket, Worker, WorkerConfig
from kvlink.errors import StaleBlocks, TransferError
from kvlink.transfer import engine

ALL = range(BLOCKS)
CONFIG = {"transports": "cuda"}


class PoolOwner:
    """Runs pool_owner.py."""

    def __init__(self, kind: str, seed: int, **env: str) -> None:
        import os

        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("pool_owner.py")), kind, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        assert self._hear() == "ready"

    def tell(self, command: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self._hear()

    def offer(self, name: str) -> Ticket:
        return Ticket.from_text(self.tell(f"offer {name}"))

    def _hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        with self.process:  # waits, and closes the pipes
            self.process.kill()


@pytest.fixture
def start_owner() -> Iterator[Callable[..., PoolOwner]]:
    """Starts owners, which end with the test."""
    started: list[PoolOwner] = []

    def start(kind: str, seed: int, **env: str) -> PoolOwner:
        started.append(PoolOwner(kind, seed, **env))
        return started[-1]

    yield start
    for pool_owner in started:
        pool_owner.close()


def filled(seed: int) -> BlockPool:
    from pool_owner import fill, pool_of

    pool = pool_of("torch")
    fill(pool, seed)
    return pool


MEMORY = [
    pytest.param("torch", {}, id="cudaMalloc"),
    pytest.param("torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, id="expandable segments"),
    pytest.param("kvlink", {}, id="kvlink"),
]


@pytest.mark.parametrize("image", ["kernel", "no kernel"])
@pytest.mark.parametrize(("kind", "env"), MEMORY)
def test_every_byte_arrives(
    start_owner: Callable[..., PoolOwner],
    kind: str,
    env: dict[str, str],
    image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch

    if image == "no kernel":
        monkeypatch.setattr(engine, "kernel_for", lambda gpu: None)
    pool_owner, wanted, pool = start_owner(kind, 5, **env), filled(5), cuda_pool(6)
    with Worker(pool, "reader", config=WorkerConfig.from_env(**CONFIG)) as reader:
        for count in range(3):  # cold, then warm
            pool.torch().fill_(count)
            pull = reader.pull(pool_owner.offer(f"r{count}"), ALL, after=torch.cuda.current_stream())
            pull.wait(60)
            assert equal(pool, wanted)
        (path,) = pull.explain()
        assert (path.transport, path.bounces_at) == ("cuda", ())


@pytest.mark.parametrize("staging", ["never", "always"])
def test_another_layout_is_converted_on_the_way(start_owner: Callable[..., PoolOwner], staging: str) -> None:
    pool_owner, wanted, pool = start_owner("kvlink", 5), filled(5), by_heads()
    with Worker(pool, "reader", config=WorkerConfig.from_env(staging=staging, **CONFIG)) as reader:
        pull = reader.pull(pool_owner.offer("r"), ALL)
        pull.wait(60)
        assert converted(wanted, pool)
        assert pull.explain()[0].staged == (staging == "always")


def test_scattered_blocks_land_where_they_belong(start_owner: Callable[..., PoolOwner]) -> None:
    import torch

    pool_owner, wanted, pool = start_owner("kvlink", 5), filled(5), cuda_pool(6)
    before = [pool.torch(n).clone() for n in range(len(pool.regions))]
    into = [*range(BLOCKS)][::-1]
    with Worker(pool, "reader", config=WorkerConfig.from_env(**CONFIG)) as reader:
        tokens = (16, 16 * (BLOCKS // 2))  # neither the first block nor the second half
        reader.pull(pool_owner.offer("r"), into, tokens=tokens).wait(60)
    moved = list(range(1, BLOCKS // 2))
    places = [into[block] for block in moved]
    rest = sorted(set(range(BLOCKS)) - set(places))
    for n in range(len(pool.regions)):
        here, there, old = (
            t.view(2, BLOCKS, -1) for t in (pool.torch(n), wanted.torch(n), before[n])
        )  # K, V
        assert torch.equal(here[:, places], there[:, moved])
        assert torch.equal(here[:, rest], old[:, rest])


def test_blocks_that_were_released_are_never_used(start_owner: Callable[..., PoolOwner]) -> None:
    pool_owner = start_owner("kvlink", 5)
    with Worker(cuda_pool(6), "reader", config=WorkerConfig.from_env(**CONFIG)) as reader:
        for count in range(20):
            ticket = pool_owner.offer(f"r{count}")
            pool_owner.tell(f"abort r{count}")
            pool_owner.tell(f"fill {count}")
            with pytest.raises(StaleBlocks):
                reader.pull(ticket, ALL).wait(60)


@pytest.mark.parametrize(("kind", "env"), MEMORY)
def test_an_owner_that_is_killed_is_an_error_and_the_gpu_goes_on(
    start_owner: Callable[..., PoolOwner], kind: str, env: dict[str, str]
) -> None:
    import torch

    pool_owner, pool = start_owner(kind, 5, **env), cuda_pool(6)
    with Worker(pool, "reader", config=WorkerConfig.from_env(**CONFIG)) as reader:
        reader.pull(pool_owner.offer("warm"), ALL).wait(60)
        ticket = pool_owner.offer("r")
        pulls = [reader.pull(ticket, ALL, settle=False) for _ in range(50)]
        pool_owner.close()
        failed = 0
        for pull in pulls:
            try:
                pull.wait(30)
            except TransferError:
                failed += 1
        with pytest.raises(TransferError):
            reader.pull(ticket, ALL, timeout_s=5).wait(10)
    print(f"{failed} of {len(pulls)} pulls were too late")
    assert int(torch.ones(1000, device="cuda").sum()) == 1000
