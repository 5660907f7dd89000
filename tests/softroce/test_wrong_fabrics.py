# SPDX-License-Identifier: Apache-2.0
"""Fabrics that are wrong in ordinary ways: jumbo frames off in a switch, addresses that do not resolve, a rail that
carries nothing, a NIC that pods share. Each test prints its counts (`pytest -s`)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from softroce import links
from softroce.pyverbs_peer.formats import unpack_address
from transports.pairs import Pair
from transports.processes import PeerProcess, RemoteWorker, eventually

NewPair = Callable[..., Pair]

pytestmark = pytest.mark.usefixtures("guest_links")

MANY = range(64)
_RUNS = 10
_PULLS = 30
_LEAST_S = 0.3
"""A pull of the emulated guest may take so long whoever else reads."""
_LONG_QUEUE: dict[str, Any] = {"rdma_timeout": 19, "rdma_silence_s": 30}
"""The queue of a slow link holds seconds. NICs that resend earlier end the connection; the next lacks the rail."""


@pytest.fixture
def new_pair() -> Iterator[NewPair]:
    """Makes pairs that may use verbs and tcp, which no fault reaches, as it is on lo. Both ends get RDMA options."""
    with ExitStack() as opened:

        def make(
            owner_nics: str, reader_nics: str, *, works: bool = True, num_blocks: int = 130, **config: Any
        ) -> Pair:
            of_owner = {f"KVLINK_{name.upper()}": str(config[name]) for name in config if "rdma" in name}
            process = PeerProcess(KVLINK_NICS=owner_nics, **of_owner)
            opened.callback(process.close)
            pair = Pair(process, "wrong", "verbs,tcp", num_blocks=num_blocks, nics=reader_nics, **config)
            opened.callback(pair.close)
            if works:
                pair.works()
            return pair

        yield make


def path_of(pair: Pair) -> Any:
    """The path of one pull, whose bytes were compared."""
    return pair.pull(pair.offer(MANY), MANY, timeout_s=60).explain()[0]


@pytest.mark.parametrize(
    ("most_bytes", "transport", "packets"), [(1400, "verbs", "in packets of 1024 bytes"), (600, "tcp", "")]
)
def test_a_switch_that_drops_large_packets(
    new_pair: NewPair, most_bytes: int, transport: str, packets: str
) -> None:
    with links.dropping("rxe1", most_bytes):
        pair = new_pair("rxe1:1", "rxe3:1", works=False, lanes=2)
        paths = [path_of(pair) for _ in range(8)]
    assert {path.transport for path in paths} == {transport}
    print(f"{len(paths)} of {len(paths)} pulls over {transport}; {paths[-1]}")
    assert all(packets in nic for nic in paths[-1].nics)
    assert transport == "verbs" or "not those of a payload" in str(paths[0].refused)


def test_large_packets_that_get_lost_later(new_pair: NewPair) -> None:
    pair = new_pair("rxe1:1", "rxe3:1", lanes=2)
    assert path_of(pair).transport == "verbs"
    with links.dropping("rxe1", 1400):
        path = path_of(pair)  # it restarts
    assert path.restarted
    assert path.transport in ("verbs", "tcp")


def slowest_s(pair: Pair, reader: Any) -> float:
    slowest = 0.0
    for _ in range(_PULLS):
        began = time.monotonic()
        pair.pull(pair.offer([3]), [4], reader, timeout_s=30)
        slowest = max(slowest, time.monotonic() - began)
    return slowest


def test_a_reader_whose_address_does_not_resolve_keeps_nobody_waiting(new_pair: NewPair) -> None:
    pair = new_pair("rxe1:1", "rxe2:1")
    other = pair.another_reader("other", transports="tcp")
    bad_process = PeerProcess(KVLINK_NICS="rxe3:1")
    ratios = []
    try:
        for run in range(_RUNS):
            alone = slowest_s(pair, other)
            with links.unresolved("rxe3"):
                bad = RemoteWorker(bad_process, f"bad-{run}", pair.spec, transports="verbs,tcp", lanes=4)
                bad.do("start_pull", ticket=pair.offer([1]).to_text(), into=[2], timeout_s=60)
                beside = slowest_s(pair, other)
                bad.do("finish_pull")
                bad.close()
            ratios.append(beside / max(alone, _LEAST_S))
    finally:
        bad_process.close()
        other.close()
    print(
        "slowest pull of the others, times that without the bad reader:", [f"{each:.2f}" for each in ratios]
    )
    assert max(ratios) <= 1.5


def test_a_rail_that_carries_nothing_costs_its_share_alone(new_pair: NewPair) -> None:
    with links.impaired("rxe2", "netem", "loss", "100%"):
        pair = new_pair("rxe1:1,rxe2:1", "rxe3:1,rxe4:1", works=False, lanes=4)
        took = []
        for _ in range(60):
            began = time.monotonic()
            path = path_of(pair)
            took.append(time.monotonic() - began)
            assert (path.transport, path.lanes) == ("verbs", 2), "the healthy rail keeps its lanes"
            time.sleep(0.3)
    print(f"first pull {took[0]:.2f} s, slowest of the other {len(took) - 1} {max(took[1:]):.2f} s")
    assert max(took[1:]) < 2.0
    eventually(lambda: path_of(pair).lanes == 4, 120)


def test_a_rail_far_slower_than_its_equals_is_set_aside_and_used_again(new_pair: NewPair) -> None:
    apart, many = range(0, 1024, 2), range(512)  # 8 MiB: enough to measure both rails
    pair = new_pair("rxe1:1,rxe2:1", "rxe3:1,rxe4:1", lanes=4, num_blocks=1026, **_LONG_QUEUE)

    def pull() -> tuple[float, str]:
        began = time.monotonic()
        path = pair.pull(pair.offer(apart), many, timeout_s=60).explain()[0]
        assert (path.transport, len(path.nics), path.restarted) == ("verbs", 2, ""), str(path)
        return time.monotonic() - began, str(path)

    def times_set_aside() -> int:
        return sum(link.counts.rails_set_aside for link in pair.reader.stats().links)

    pull()
    with links.impaired("rxe2", "netem", "rate", "6mbit", "limit", "4000"):
        slow = [pull()[0] for _ in range(3)]
        rest = [pull() for _ in range(5)]
        assert all("rxe4:1->rxe2:1 50%, set aside: " in path for _, path in rest)
        print(f"seconds before {slow} and after {[round(took, 2) for took, _ in rest]}; {rest[-1][1]}")
        assert max(took for took, _ in rest) < min(slow) / 2
        assert times_set_aside() == 1
    eventually(lambda: "set aside" not in pull()[1], 120)
    assert times_set_aside() == 1


def test_rails_that_do_not_reach_each_other_are_not_joined(new_pair: NewPair) -> None:
    with links.rails_apart({"rxe2": "10.0.2.2", "rxe4": "10.0.2.4"}):
        pair = new_pair("rxe1:1,rxe2:1", "rxe4:1", works=False, lanes=4)
        began = time.monotonic()
        path = path_of(pair)
        print(f"first pull {time.monotonic() - began:.2f} s; {path}")
        assert (path.transport, path.nics, path.lanes) == ("verbs", ("rxe4:1->rxe2:1",), 4)


_ADDRESS = """
from kvlink import BlockPool, Geometry, Worker, WorkerConfig, dense
layout = dense(Geometry(num_layers=1, total_heads=1, row_bytes=64, num_blocks=8))
with Worker(BlockPool.allocate(layout), "pod", config=WorkerConfig(transports="verbs", nics="rxe9:1")) as worker:
    print(worker.card.transports[0].address.hex(), worker.card.transports[0].refused)
"""


def test_a_pod_takes_its_own_address_of_a_shared_nic() -> None:
    addresses = ["10.56.0.11", "10.56.0.12", "10.56.0.13"]
    with links.pods("rxe9", *addresses) as pods:
        for pod, address in zip(pods, addresses, strict=True):
            command = ["ip", "netns", "exec", pod, sys.executable, "-c", _ADDRESS]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr
            (port,) = unpack_address(bytes.fromhex(done.stdout.split()[0]))
            print(pod, address, port.gid.hex())
            assert port.gid[12:] == bytes(map(int, address.split(".")))
