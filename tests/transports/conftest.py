# SPDX-License-Identifier: Apache-2.0
"""One suite over every transport that this machine has."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from making import making
from transports.gpus import LEAST, SOURCES, Holdable, Open
from transports.pairs import Pair
from transports.pools import OWN_GPU, USUAL, PoolSpec
from transports.processes import LocalPeer, Peer, PeerProcess, RemoteWorker, usage

from kvlink import Worker, WorkerConfig, _core

_names = itertools.count(1)


NAMED = os.environ.get("KVLINK_TEST_TRANSPORTS", "").split()
"""The suite runs over these, which may be used only where they are named, instead of all others."""


def _here() -> list[tuple[str, str, str]]:
    """Name, why this machine cannot use it, and the fix."""
    named = [(name, *_core.probe(name)) for name in NAMED]
    return named or [(name, why_not, fix) for name, _, _, why_not, fix in _core.transports()]


def _params(only_other_processes: bool = False) -> list[Any]:
    return [
        pytest.param(name, marks=[pytest.mark.skip(reason=f"{name}: {why_not}. {fix}")] if why_not else [])
        for name, why_not, fix in _here()
        if (name == "cuda") == (USUAL == OWN_GPU) and not (only_other_processes and name == "loopback")
    ]


@pytest.fixture(params=_params())
def transport(request: pytest.FixtureRequest) -> str:
    """The name of a transport; loopback's peer is this process."""
    name: str = request.param
    return name


@pytest.fixture(params=_params(only_other_processes=True))
def distant(request: pytest.FixtureRequest) -> str:
    """The name of a transport between processes."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def _shared_peers() -> Iterator[dict[bool, Peer]]:
    """By whether they are this process. Both have opened by now what libraries, CUDA among them, open once and keep."""
    peers: dict[bool, Peer] = {True: LocalPeer(), False: PeerProcess()}
    for peer in peers.values():
        for _ in range(2):
            owner = RemoteWorker(peer, "warm-up", PoolSpec())
            owner.do("fill", seed=0)
            with Worker(PoolSpec().make(), "warm-up-reader") as reader:
                reader.pool.numpy()[0] = 1
                reader.pull(owner.offer([0]), [0]).wait()
            owner.close()
    yield peers
    for peer in peers.values():
        peer.close()


@pytest.fixture
def peer(request: pytest.FixtureRequest, _shared_peers: dict[bool, Peer]) -> Peer:
    """Where the owners of this test's transport live; not to be harmed, other tests use it too."""
    names = request.fixturenames
    return _shared_peers["transport" in names and request.getfixturevalue("transport") == "loopback"]


@pytest.fixture
def new_process() -> Iterator[Callable[..., PeerProcess]]:
    """Makes processes that may be killed, stopped and restarted."""
    with making(PeerProcess) as start:
        yield start


@pytest.fixture
def new_owner(peer: Peer) -> Iterator[Callable[..., RemoteWorker]]:
    """Makes owners at `peer` that end with the test."""
    with making(lambda pool, **config: RemoteWorker(peer, f"owner-{next(_names)}", pool, **config)) as make:
        yield make


@pytest.fixture
def new_reader() -> Iterator[Callable[..., Worker]]:
    """Makes readers in this process that end with the test."""

    def open_reader(pool: PoolSpec, **config: Any) -> Worker:
        return Worker(pool.make(), f"reader-{next(_names)}", config=WorkerConfig.from_env(**config))

    with making(open_reader) as make:
        yield make


@pytest.fixture
def new_pair(peer: Peer) -> Iterator[Callable[..., Pair]]:
    """Makes pairs that end with the test; their owner lives at `peer` unless said otherwise."""

    def open_pair(transport: str, at: Peer | None = None, **options: Any) -> Pair:
        return Pair(at or peer, f"pair-{next(_names)}", transport, **options)

    with making(open_pair) as make:
        yield make


@pytest.fixture
def quick_turns() -> Iterator[None]:
    """Loopback's owner and readers share an interpreter: none may keep it for milliseconds."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(20e-6)
    yield
    sys.setswitchinterval(before)


@pytest.fixture(autouse=True)
def nothing_leaks(_shared_peers: dict[bool, Peer]) -> Iterator[None]:
    """Every test releases its descriptors and threads: in this process, and in the shared peer."""
    peers = _shared_peers.values()
    before = [usage(peer.pid) for peer in peers]
    yield
    deadline = time.monotonic() + 10
    while leaked := [
        more for peer, had in zip(peers, before, strict=True) if (more := usage(peer.pid) - had)
    ]:
        assert time.monotonic() < deadline, f"left open: {leaked}"
        for peer in peers:
            peer.call("collect")  # a Worker and its parts refer to each other
        time.sleep(0.01)


@pytest.fixture(scope="module")
def cuda_driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a libcuda.so.1, without a GPU."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler for tests/fake_cuda: apt-get install g++")
    folder = tmp_path_factory.mktemp("fake_cuda")
    options = ["-std=c++20", "-O2", "-shared", "-fPIC", "-pthread", "-o", str(folder / "libcuda.so.1")]
    subprocess.run([compiler, *options, *map(str, SOURCES)], check=True)
    return str(folder)


@pytest.fixture(scope="module")
def gpu_ends(cuda_driver: str) -> Iterator[tuple[PeerProcess, PeerProcess]]:
    """An owner's process and a reader's, both with the GPU. Nobody harms them."""
    started = PeerProcess(LD_LIBRARY_PATH=cuda_driver), PeerProcess(LD_LIBRARY_PATH=cuda_driver)
    yield started
    for process in started:
        process.close()


@pytest.fixture
def opened(gpu_ends: tuple[PeerProcess, PeerProcess]) -> Iterator[Open]:
    """Makes an owner with contents and a reader, in whose memory they are given; they end with the test."""
    workers: list[RemoteWorker] = []

    def make(
        spec: PoolSpec, owner: str, reader: str, other: PoolSpec | None = None, **config: object
    ) -> tuple[RemoteWorker, RemoteWorker]:
        """`other` is the reader's spec where it differs."""
        ends = (("owner", spec, owner), ("reader", other or spec, reader))
        for process, (name, its, memory) in zip(gpu_ends, ends, strict=True):
            pool = replace(its, memory=memory)
            workers.append(RemoteWorker(process, name, pool, bounce_bytes=LEAST, **config))
        workers[0].do("fill", seed=3)
        return workers[0], workers[1]

    yield make
    for worker in workers:
        worker.close()


@pytest.fixture
def holdable(new_process: Callable[..., PeerProcess], cuda_driver: str, tmp_path: Path) -> Holdable:
    """Makes an owner in a process that may be killed, and a reader whose GPU begins nothing while the file is there."""

    def make(spec: PoolSpec, **config: object) -> tuple[PeerProcess, RemoteWorker, RemoteWorker, Path]:
        held = tmp_path / "held"
        process = new_process(LD_LIBRARY_PATH=cuda_driver)
        reader = new_process(LD_LIBRARY_PATH=cuda_driver, FAKE_CUDA_HELD=str(held))
        victim = RemoteWorker(process, "victim", spec, bounce_bytes=LEAST, **config)
        return process, victim, RemoteWorker(reader, "taker", spec, bounce_bytes=LEAST, **config), held

    return make
