# SPDX-License-Identifier: Apache-2.0
"""The loops of the integrations that their own modules start, with stand-ins for the engines."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
from loops.loops_of_vllm import handoff
from loops.rows import FailingOnce, Unexpected, failing, scene
from waiting import eventually

from kvlink.integrations.lmcache.reads import Reads
from kvlink.integrations.vllm.decode import remote_leases
from kvlink.integrations.vllm.decode.remote_leases import RemoteLeases

_INTEGRATIONS = str(Path(__file__).parents[1] / "integrations")


@scene("vllm-leases")
def leases_at_other_servers() -> None:
    released: list[str] = []

    class Agents:
        def __getitem__(self, address: str) -> Agents:
            return self

        async def settle(self, order: Any) -> None:
            released.append(order.worker_id)

        async def close(self) -> None:
            pass

    with failing(RemoteLeases, "_release"):
        leases = RemoteLeases()
        leases._agents = cast(Any, Agents())
        leases.release(handoff("a"), [0])
        leases.release(handoff("b"), [0])
        eventually(lambda: released == ["prefill"])
        leases.close()
    ticks = FailingOnce()
    with mock.patch.object(RemoteLeases, "tick", ticks), mock.patch.object(remote_leases, "_TICK_S", 0.001):
        leases = RemoteLeases()
        eventually(lambda: len(ticks.calls) >= 2)
        leases.close()


@scene("lmcache-ask")
def asks_of_lmcache() -> None:
    none: Any = None
    reads, job = Reads(none, none, none, none, 1.0), FailingOnce()
    for _ in range(2):
        reads._put(job)
    eventually(lambda: len(job.calls) == 1)
    reads.close()


class _Socket:
    """Stands for a socket of ZMQ on which messages arrive all the time."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def setsockopt(self, *_: object) -> None:
        pass

    def bind(self, address: str) -> None:
        pass

    def poll(self, most_ms: int) -> bool:
        return True

    def recv_multipart(self) -> list[bytes]:
        return [b"sender", b"", b"message"]

    def send_multipart(self, frames: list[bytes], flags: int = 0) -> None:
        self.sent.append(frames)

    def close(self) -> None:
        pass


@scene("lmcache-answer")
def answers_of_lmcache() -> None:
    class Reply:
        def answer(self, message: bytes) -> bytes:
            return b"answer"

    socket, idle = _Socket(), FailingOnce()
    zmq: Any = mock.MagicMock(ZMQError=OSError)
    parts = {"zmq": zmq, "zmq.utils": zmq.utils, "zmq.utils.monitor": zmq.utils.monitor}
    with mock.patch.dict(sys.modules, parts):
        sys.modules.pop("kvlink.integrations.lmcache.sockets", None)
        from kvlink.integrations.lmcache.sockets import Answering

        context = SimpleNamespace(socket=lambda kind: socket)
        answering = Answering(cast(Any, context), "127.0.0.1:1", None, cast(Any, Reply()), idle)
        eventually(lambda: len(idle.calls) > 1 and len(socket.sent) > 1)
        answering.close()


@scene("transformers leases")
def leases_of_transformers() -> None:
    rounds = itertools.count()

    async def events(worker: Any) -> AsyncIterator[Any]:
        if next(rounds) == 0:
            raise Unexpected
        again.set()
        return
        yield

    again = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_INTEGRATIONS)
        from stepped_batching import Stepped

        from kvlink import Worker

        patch.setattr(Worker, "watch_events", events)
        stepped = Stepped("a", page_size=4, num_blocks=24)
        eventually(again.is_set)
        stepped.close()


@scene("sglang-listener")
def a_listener_of_sglang() -> None:
    handled, looked = FailingOnce(), FailingOnce()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_INTEGRATIONS)
        from sglang_servers import make_backend

        make_backend(patch)
        from kvlink.integrations.sglang.listener import Listener

        socket = SimpleNamespace(poll=lambda ms: True, closed=False)
        listener = Listener(socket, lambda: [b"tag"], {b"tag": handled}, looked)
        for _ in range(2):
            assert listener.step()
    assert (len(handled.calls), len(looked.calls)) == (1, 1)


@scene("sglang-announcements")
def announcements_of_sglang() -> None:
    announced = FailingOnce()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(_INTEGRATIONS)
        import sglang_servers

        from kvlink.runtime.supervised import start_thread

        backend = sglang_servers.make_backend(patch)
        from kvlink.integrations.sglang import manager

        def start(name: str, run: Any) -> None:
            if name == "sglang-announcements":
                start_thread(name, run)

        patch.setattr(manager, "start_thread", start)
        patch.setattr(backend.KVLinkManager, "_announce", announced)
        prefill = sglang_servers.Scheduler(backend, sglang_servers.DisaggregationMode.PREFILL)
        for _ in range(2):
            prefill.manager._deliveries.put(None)
        eventually(lambda: len(announced.calls) == 1)
