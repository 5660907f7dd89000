# SPDX-License-Identifier: Apache-2.0
"""Senders and receivers as SGLang's schedulers use them: what the router does with rooms is not in their hands."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_stand_in as sglang
from sglang_stand_in import KVPoll, KVTransferError
from test_sglang_handoff import Server, send
from transports.processes import eventually

from kvlink.integrations.sglang.rooms import LiveRooms

ROOM = 77  # of test_sglang_handoff
PREFILL_1, PREFILL_2 = "10.0.0.1:8998", "10.0.0.2:8998"


class Manager(sglang.CommonKVManager):
    """The parts of KVLinkManager that senders and receivers use, without sockets."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.outgoing, self.incoming, self.live_rooms = server.outgoing, server.incoming, LiveRooms()
        self.rows: dict[int, Any] = {}
        self.aux = SimpleNamespace(write=self.rows.__setitem__)
        self.failed: list[int] = []
        self.remember_failed = self.failed.append

    def collect(self) -> None:
        pass


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    sglang.install(monkeypatch)
    from kvlink.integrations.sglang import backend

    return backend


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    servers = [Server("prefill"), Server("prefill"), Server("decode")]
    yield servers
    for server in servers:
        server.close()


def receiver(backend: ModuleType, manager: Manager, address: str) -> Any:
    made = backend.KVLinkReceiver(mgr=manager, bootstrap_addr=address, bootstrap_room=ROOM)
    made.init(0)
    return made


def fails(request: Any) -> str:
    assert request.poll() == KVPoll.Failed
    with pytest.raises(KVTransferError) as raised:
        request.failure_exception()
    return str(raised.value)


def test_one_room_at_two_prefill_servers(backend: ModuleType, servers: list[Server]) -> None:
    """The later receiver fails at once, and nothing that SGLang then does to it touches the first."""
    prefill, _, decode = servers
    manager = Manager(decode)
    first = receiver(backend, manager, PREFILL_1)
    first.send_metadata(np.array([0, 1]), 3, [np.array([0])])
    later = receiver(backend, manager, PREFILL_2)
    later.send_metadata(np.array([8, 9]), 4, [np.array([1])])
    assert "another one for each request" in fails(later)
    later.abort()
    later.clear()
    assert manager.addr_to_rooms_tracker == {PREFILL_1: {ROOM}, PREFILL_2: set()}
    assert first.poll() == KVPoll.WaitingForInput
    want = decode.want.__class__(
        ROOM, manager.incoming.generation(ROOM), "127.0.0.1", 1, 4, 0, 1, 1, 0, False
    )
    [chunk] = send(prefill, [want], [10, 11])
    manager.incoming.arrived(chunk)
    eventually(lambda: first.poll() == KVPoll.Success)
    assert manager.rows == {3: (b"first token",)}
    assert all(
        (ours[[0, 1]] == theirs[[10, 11]]).all() for ours, theirs in zip(decode.kv, prefill.kv, strict=True)
    )


def test_the_room_is_free_once_its_request_has_ended(backend: ModuleType, servers: list[Server]) -> None:
    manager = Manager(servers[2])
    first = receiver(backend, manager, PREFILL_1)
    first.send_metadata(np.array([0]), 3, [np.array([0])])
    first.abort()
    assert fails(first)
    again = receiver(backend, manager, PREFILL_1)
    again.send_metadata(np.array([1]), 3, [np.array([0])])
    assert again.poll() == KVPoll.WaitingForInput


def test_a_receiver_that_went_without_a_word_leaves_its_room(
    backend: ModuleType, servers: list[Server]
) -> None:
    manager = Manager(servers[2])
    receiver(backend, manager, PREFILL_1).send_metadata(np.array([0]), 3, [np.array([0])])
    again = receiver(backend, manager, PREFILL_2)
    again.send_metadata(np.array([1]), 3, [np.array([0])])
    assert again.poll() == KVPoll.WaitingForInput


def test_the_waiting_timeout_fires_beside_a_refused_request(
    backend: ModuleType, servers: list[Server]
) -> None:
    manager = Manager(servers[2])
    first = receiver(backend, manager, PREFILL_1)
    first.send_metadata(np.array([0]), 3, [np.array([0])])
    fails(receiver(backend, manager, PREFILL_2))
    manager.waiting_timeout = 0.0
    assert "timed out" in fails(first)


def test_one_room_for_two_requests_of_a_prefill_server(backend: ModuleType, servers: list[Server]) -> None:
    prefill = servers[0]
    manager = Manager(prefill)
    first, later = (
        backend.KVLinkSender(mgr=manager, bootstrap_addr=PREFILL_1, bootstrap_room=ROOM) for _ in range(2)
    )
    send(prefill, [servers[2].want], [10])
    assert "another one for each request" in fails(later)
    later.abort()
    later.clear()
    assert manager.failed == []
    assert not prefill.outgoing.delivered(ROOM)
    assert set(prefill.outgoing._room_of.values()) == {ROOM}
    assert first.poll() == KVPoll.Bootstrapping
    first.clear()
    assert not prefill.outgoing._room_of
    assert backend.KVLinkSender(manager, PREFILL_1, ROOM).poll() == KVPoll.Bootstrapping


def test_a_prefill_server_that_does_not_fit_fails_its_own_requests(backend: ModuleType) -> None:
    """SGLang's error would end the scheduler, and with it the decode server."""
    manager = backend.KVLinkManager.__new__(backend.KVLinkManager)
    sglang.CommonKVManager.__init__(manager)
    manager.live_rooms, manager.misfits = LiveRooms(), {PREFILL_2}
    fits, misfit = (
        backend.KVLinkReceiver(mgr=manager, bootstrap_addr=address, bootstrap_room=room)
        for address, room in ((PREFILL_1, ROOM), (PREFILL_2, ROOM + 1))
    )
    manager.incoming = SimpleNamespace(drop=lambda room: None)
    assert manager.try_ensure_parallel_info(PREFILL_1) is True
    assert manager.try_ensure_parallel_info(PREFILL_2) is False
    assert fits.poll() == KVPoll.Bootstrapping
    assert f"{PREFILL_2} does not fit this decode server: Page size mismatch" in fails(misfit)
