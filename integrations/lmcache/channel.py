# SPDX-License-Identifier: Apache-2.0
"""Implements LMCache's classes for a transfer channel, with the ZMQ sockets on which readers ask for leases."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import ExitStack
from typing import Any

import zmq
from lmcache.v1.distributed.internal_api import L1MemoryDesc
from lmcache.v1.distributed.transfer_channel.abstract import (
    TransferChannelClient,
    TransferChannelContext,
    TransferChannelServer,
)
from lmcache.v1.distributed.transfer_channel.api import TransferChannelAddress, TransferChannelReadResult

from kvlink import Worker, WorkerConfig
from kvlink.addresses import joined, split_address
from kvlink.config import sources
from kvlink.control.security.tickets import ticket_keys
from kvlink.errors import PeerUnreachable

from .grants import Grants
from .pages import Object, Pages
from .reads import Peer, Reads

_log = logging.getLogger("kvlink.lmcache")

_GREETING_S = 10.0
_LOOK_MS = 100
_TIMEOUT_S = 20.0
"""Less than LMCache's --p2p-load-timeout, 30 s, after which it gives the memory of a read to others."""


class _Asking:
    """Sends asks to one owner, one after the other, on one thread."""

    def __init__(self, context: zmq.Context[Any], url: str) -> None:
        self._context = context
        self._url = url
        self._socket: zmq.Socket[Any] | None = None

    def __call__(self, message: bytes, timeout_s: float) -> bytes:
        if self._socket is None:
            self._socket = self._context.socket(zmq.REQ)
            self._socket.setsockopt(zmq.LINGER, 0)
            self._socket.connect(_endpoint(self._url))
        try:
            self._socket.send(message)
            if self._socket.poll(int(timeout_s * 1000)):
                return bytes(self._socket.recv())
        except zmq.ZMQError as error:
            self.close()
            raise PeerUnreachable(f"LMCache's server at {self._url} cannot be asked: {error}") from None
        self.close()  # its late answer is nobody's
        raise PeerUnreachable(
            f"LMCache's server at {self._url} did not answer within {timeout_s:.1f} s; check its "
            "--p2p-advertise-url, and that it runs with --p2p-transfer-engine kvlink"
        )

    def close(self) -> None:
        """Closes the socket. The next ask opens another one."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class KVLinkTransferChannelServer(TransferChannelServer):  # type: ignore[misc]
    """Answers the asks of readers on a thread of its own."""

    def __init__(self, listen_url: str, grants: Grants, context: zmq.Context[Any]) -> None:
        self._grants = grants
        self._closing = threading.Event()
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(_endpoint(listen_url))
        except zmq.ZMQError as error:
            self._socket.close()
            raise PeerUnreachable(f"cannot listen at {listen_url} (--p2p-listen-url): {error}") from None
        self._thread = threading.Thread(target=self._serve, name="kvlink-lmcache-answer", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._socket:
            while not self._closing.is_set():
                if self._socket.poll(_LOOK_MS):
                    self._socket.send(self._grants.answer(self._socket.recv()))

    def close(self) -> None:
        """Stops answering. Idempotent."""
        self._closing.set()
        self._thread.join()


class KVLinkTransferChannelClient(TransferChannelClient):  # type: ignore[misc]
    """Reads from the memory of one peer."""

    def __init__(self, url: str, reads: Reads, asking: _Asking) -> None:
        self._reads = reads
        self._asking = asking
        try:
            reads.greet(_GREETING_S)
        except BaseException:
            self.close()
            raise

    def submit_read(
        self, local_addresses: list[TransferChannelAddress], remote_addresses: list[TransferChannelAddress]
    ) -> int:
        """Starts a read of whole objects. Never waits for the peer. Raises ConfigError."""
        return self._reads.submit(_objects(remote_addresses), _objects(local_addresses))

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        """Returns which objects have arrived and were valid until then. A refused or failed read is logged."""
        arrived = self._reads.query(task_id)
        return TransferChannelReadResult(finished=arrived is not None, succeeded_mask=arrived or [])

    def close(self) -> None:
        """Ends all reads. On return no more bytes arrive. Idempotent."""
        self._reads.close(self._asking.close)


class KVLinkTransferChannelContext(TransferChannelContext):  # type: ignore[misc]
    """One server's memory, its kvlink worker, its readers and the peers that it reads from. Thread-safe."""

    def __init__(self, l1_memory_desc: L1MemoryDesc, listen_url: str, advertise_url: str) -> None:
        self._pages = Pages(l1_memory_desc.align_bytes, l1_memory_desc.size)
        self._advertised = advertise_url
        self._lock = threading.Lock()
        self._clients: dict[str, KVLinkTransferChannelClient] = {}
        config = _config(listen_url, advertise_url)
        self._timeout_s = config.timeout_s
        self._keys = ticket_keys(config.ticket_keys)
        with ExitStack() as opened:
            self._zmq: zmq.Context[Any] = opened.enter_context(zmq.Context())
            pool = self._pages.pool(l1_memory_desc.ptr)
            self._worker = opened.enter_context(Worker(pool, f"lmcache@{advertise_url}", config=config))
            grants = Grants(self._worker, self._pages, self._keys)
            self._server = KVLinkTransferChannelServer(listen_url, grants, self._zmq)
            opened.callback(self._server.close)
            opened.callback(self._close_clients)
            self._opened = opened.pop_all()
        ways = ", ".join(each.name for each in self._worker.card.transports if not each.refused)
        _log.info(
            "kvlink worker %s at %s exports %r by %s", advertise_url, self._worker.card.agent, pool, ways
        )

    def get_transfer_channel_server(self) -> TransferChannelServer:
        """Returns the server, which is there from the start."""
        return self._server

    def get_transfer_channel_client(self, peer_advertise_url: str) -> TransferChannelClient:
        """Returns the client of a peer, a new one after the peer's first answer. Raises KVLinkError."""
        with self._lock:
            if (client := self._clients.get(peer_advertise_url)) is not None:
                return client
        asking = _Asking(self._zmq, peer_advertise_url)
        peer = Peer(self._advertised, peer_advertise_url, asking)
        reads = Reads(self._worker, self._pages, peer, self._keys, self._timeout_s)
        made = KVLinkTransferChannelClient(peer_advertise_url, reads, asking)
        with self._lock:
            client = self._clients.setdefault(peer_advertise_url, made)
        if client is not made:
            made.close()
        return client

    def remove_transfer_channel_client(self, peer_advertise_url: str) -> None:
        """Closes the client of a peer, if there is one."""
        with self._lock:
            client = self._clients.pop(peer_advertise_url, None)
        if client is not None:
            client.close()

    def get_transfer_channel_address(
        self, lmcache_addresses: list[tuple[int, int]]
    ) -> list[TransferChannelAddress]:
        """Returns the addresses of objects in this server's memory. Raises ConfigError for one that is not in it."""
        return [TransferChannelAddress(*self._pages.check(each)) for each in lmcache_addresses]

    def get_num_connected_clients(self) -> int:
        """Returns the number of peers that this server reads from."""
        with self._lock:
            return len(self._clients)

    def close(self) -> None:
        """Ends reads in both directions. On return nothing accesses LMCache's memory. Idempotent."""
        self._opened.close()

    def _close_clients(self) -> None:
        for url in list(self._clients):
            self.remove_transfer_channel_client(url)


def _config(listen_url: str, advertise_url: str) -> WorkerConfig:
    """Returns the options of the worker. Unless KVLINK_HOST is set, its hosts are those of LMCache's two addresses."""
    defaults: dict[str, Any] = {"timeout_s": _TIMEOUT_S}
    if sources(os.environ)["host"] == "default":
        listen, advertised = (split_address(_plain(url))[0] for url in (listen_url, advertise_url))
        defaults |= {"host": listen, "advertise": advertised if advertised != listen else ""}
    return WorkerConfig.from_env(defaults=defaults)


def create_context(
    l1_memory_desc: L1MemoryDesc, listen_url: str, advertise_url: str, **_: Any
) -> KVLinkTransferChannelContext:
    """Is LMCache's factory. Arguments of other channels, such as `backends`, mean nothing here."""
    return KVLinkTransferChannelContext(l1_memory_desc, listen_url, advertise_url)


def _plain(url: str) -> str:
    return url.split("://", 1)[-1]


def _endpoint(url: str) -> str:
    return "tcp://" + joined(*split_address(_plain(url)))


def _objects(addresses: list[TransferChannelAddress]) -> list[Object]:
    return [(each.offset, each.size) for each in addresses]
