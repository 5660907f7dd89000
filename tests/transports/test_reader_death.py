# SPDX-License-Identifier: Apache-2.0
"""Readers that die: the owner gets its blocks and its descriptors back, and others do not notice."""

from __future__ import annotations

import time
from collections.abc import Callable

from transports.pairs import Pair
from transports.processes import Peer, PeerProcess, RemoteWorker, eventually, usage

NewPair = Callable[..., Pair]
NewProcess = Callable[..., PeerProcess]

MANY = range(1024)


def slow_reader(
    process: PeerProcess, name: str, transport: str, pair: Pair, delay: str = "50ms"
) -> RemoteWorker:
    """Its first pull is not slow."""
    fault = {"transports": f"fault+{transport}", "fault": f"delay-data={delay}@2..99", "lanes": 1}
    reader = RemoteWorker(process, name, pair.spec, **fault)
    reader.do("pull", ticket=pair.offer([1]).to_text(), into=[2], timeout_s=20)
    return reader


def test_a_reader_killed_in_the_middle_of_a_pull(
    distant: str, peer: Peer, new_process: NewProcess, new_pair: NewPair
) -> None:
    pair = new_pair(distant, num_blocks=1026)
    pair.works()
    peer.call("collect")
    before = usage(peer.pid)
    for number in range(3):
        process = new_process()
        reader = slow_reader(process, f"doomed-{number}", distant, pair, delay="20s")
        ticket = pair.offer(MANY, ttl_s=0.5)
        reader.do("start_pull", ticket=ticket.to_text(), into=list(MANY), timeout_s=60)
        time.sleep(0.02)
        process.kill()
        assert pair.owner.fate_of(ticket.request_id) == "expired"
        pair.works()
    eventually(lambda: usage(peer.pid) <= before)


def test_a_reader_killed_while_idle(
    distant: str, peer: Peer, new_process: NewProcess, new_pair: NewPair
) -> None:
    pair = new_pair(distant)
    pair.works()
    peer.call("collect")
    before = usage(peer.pid)
    process = new_process()
    for number in range(3):
        slow_reader(process, f"doomed-{number}", distant, pair)
    assert (
        usage(peer.pid) > before or distant == "cma"
    )  # which keeps nothing open at the owner but the agent's call
    process.kill()
    eventually(lambda: usage(peer.pid) <= before)
    pair.works()


def test_a_reader_that_is_stopped_holds_up_nobody(
    distant: str, new_process: NewProcess, new_pair: NewPair
) -> None:
    pair = new_pair(distant, num_blocks=1026)
    pair.works()
    process = new_process()
    reader = slow_reader(process, "sleeper", distant, pair)
    ticket = pair.offer(MANY)
    reader.do("start_pull", ticket=ticket.to_text(), into=list(MANY), timeout_s=60)
    process.stop()
    for _ in range(10):
        pair.works()
    process.go_on()
    assert reader.do("finish_pull")["bytes"] == len(MANY) * (16 << 10)
    assert reader.do("differing", into=list(MANY), seed=20_25, blocks=list(MANY)) == 0
    assert pair.owner.fate_of(ticket.request_id) == "settled"
    reader.close()
