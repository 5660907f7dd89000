# SPDX-License-Identifier: Apache-2.0
"""Queue pairs connected by the kernel's connection manager, as iWARP needs them: the same pulls behind another way to
connect. Over soft-RoCE, as no iWARP driver was to be had: what is iWARP's own (a read's landing in memory that the
network may write, one segment a read, no connect response) has not run anywhere."""

from __future__ import annotations

import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import grpc
import pytest
from softroce.pyverbs_peer.admitted import shown_token
from softroce.pyverbs_peer.cards import connect_request, unpack_card
from softroce.pyverbs_peer.formats import QueuePair, pack_hello
from transports.pairs import Pair
from transports.processes import PeerProcess, RemoteWorker, eventually

from kvlink.errors import KVLinkError, PeerUnreachable
from kvlink.v1 import agent_pb2, agent_pb2_grpc

MANY = range(512)  # 8 MiB

NewPair = Callable[..., Pair]


@pytest.fixture
def port(device: str) -> str:
    """One that the manager finds: rxe0's addresses are on lo."""
    return "rxe1:1" if device == "rxe0" else f"{device}:1"


@pytest.fixture
def new_pair(port: str) -> Iterator[NewPair]:
    """Makes connected pairs over one NIC; `owner_way` is the owner's KVLINK_RDMA_CONNECT."""
    with ExitStack() as opened:

        def make(owner_way: str = "cm", fault: str = "", lanes: int = 4) -> Pair:
            process = PeerProcess(KVLINK_NICS=port, KVLINK_RDMA_CONNECT=owner_way)
            opened.callback(process.close)
            pair = Pair(
                process, "cm", "verbs", fault, num_blocks=1026, nics=port, lanes=lanes, rdma_connect="cm"
            )
            opened.callback(pair.close)
            return pair

        yield make


class Invitation(NamedTuple):
    """Is the owner's answer to a hello."""

    ip: str
    port: int
    secret: bytes


def invite(owner: RemoteWorker) -> Invitation:
    """Says hello as a reader that then may connect, by way of the owner's agent."""
    queue_pair = QueuePair(number=1, psn=0, lid=0, mtu=3, reads_out=1, reads_in=1, gid=bytes(16))
    with grpc.insecure_channel(owner.info["agent"]) as channel:
        stub = agent_pb2_grpc.WorkerAgentStub(channel)
        sealed = stub.GetCard(agent_pb2.GetCardRequest(), timeout=30, metadata=shown_token())
        card, _ = unpack_card(sealed)
        request = connect_request(card, [pack_hello(0, queue_pair)])
        (reply,) = stub.Connect(request, timeout=30, metadata=shown_token()).replies
    magic, ip_bytes, ip, port, secret_bytes, secret = struct.unpack("<4sI16sII16s", reply)
    assert (magic, ip_bytes, secret_bytes) == (b"kvc1", 16, 16)
    assert ip[:12] == bytes(10) + b"\xff\xff"
    return Invitation(".".join(map(str, ip[12:])), port, secret)


def test_pulls_are_byte_exact(new_pair: NewPair) -> None:
    pair = new_pair()
    for _ in range(2):
        pair.pull(pair.offer(MANY), MANY, timeout_s=60)
    pair.works()
    (path,) = pair.reader.peers()
    assert len(path.connection.paths()) == 4


def test_every_hello_gets_a_secret_of_its_own_and_without_it_nobody_gets_in(new_pair: NewPair) -> None:
    pair = new_pair()
    pair.works()
    first, second = invite(pair.owner), invite(pair.owner)
    assert (first.ip, first.port) == (second.ip, second.port)
    assert first.secret != second.secret
    client = ["rping", "-c", "-v", "-C", "1", "-a", first.ip, "-p", str(first.port)]
    refused = subprocess.run(client, capture_output=True, text=True, timeout=60)
    assert "RDMA_CM_EVENT_REJECTED" in refused.stdout + refused.stderr
    pair.works()


def test_a_killed_owner_is_noticed_by_its_hanging_up(new_pair: NewPair) -> None:
    pair = new_pair(fault="delay-data=1s@every:1", lanes=1)
    pull = pair.start(pair.offer(MANY), MANY, timeout_s=60)
    eventually(lambda: pull.stats.num_bytes > 0)
    pair.owner.peer.kill()  # type: ignore[attr-defined]
    with pytest.raises(PeerUnreachable, match="disconnected"):
        pull.wait(60)
    landed = pair.blocks().copy()
    time.sleep(0.3)
    assert (pair.blocks() == landed).all()


def test_a_connection_that_ended_is_made_again(new_pair: NewPair) -> None:
    pair = new_pair()
    for _ in range(3):
        pair.works()
        (path,) = pair.reader.peers()
        path.connection.close()
    pair.works()


def test_both_ends_must_connect_the_same_way(new_pair: NewPair) -> None:
    pair = new_pair(owner_way="direct")
    with pytest.raises(KVLinkError, match="KVLINK_RDMA_CONNECT"):
        pair.start(pair.offer([1]), [2], timeout_s=10).wait(30)
