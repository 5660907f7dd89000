# SPDX-License-Identifier: Apache-2.0
"""Implements LMCache's classes for a transfer channel.

Nothing that LMCache calls for a read raises: an exception would end LMCache's whole request, so a failure is reported
for its object.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
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
from lmcache.v1.multiprocess.config import P2PConfig

from kvlink import Worker, WorkerConfig
from kvlink.config import sources
from kvlink.config.addresses import split_address
from kvlink.control.security.tickets import TicketKeys, ticket_keys

from .grants import Grants
from .l1 import L1Memory, manager_of, name_of_key
from .pages import Object, Pages, Wanted
from .places import Places
from .reads import MARGIN_S, Peer, Reads, read_timeout_s
from .sockets import Answering, Asking, plain

_log = logging.getLogger("kvlink.lmcache")

_GREETING_S = 10.0
_NOWHERE = TransferChannelAddress(-1, 0)
"""The address of an object that is not there, as LMCache has it."""


class KVLinkTransferChannelServer(TransferChannelServer):  # type: ignore[misc]
    """Answers the asks of readers on a thread of its own."""

    def __init__(
        self, listen_url: str, grants: Grants, context: zmq.Context[Any], keys: TicketKeys | None
    ) -> None:
        self._answering = Answering(context, listen_url, keys, grants, grants.collect)

    def close(self) -> None:
        """Stops answering. Idempotent."""
        self._answering.close()


class KVLinkTransferChannelClient(TransferChannelClient):  # type: ignore[misc]
    """Reads from the memory of one peer."""

    def __init__(self, url: str, reads: Reads, asking: Asking) -> None:
        self._url = url
        self._reads = reads
        self._asking = asking
        try:
            reads.greet(_GREETING_S)
        except BaseException:
            self.close()
            raise

    def expect_load_timeout(self, load_timeout_s: float) -> None:
        """Shortens the reads of this client, so that each ends before LMCache gives up on it after this time."""
        longest_s = max(load_timeout_s - MARGIN_S, load_timeout_s / 2)
        if longest_s < self._reads.timeout_s:
            _log.warning(
                "reads of %s end after %g s and not %g, because LMCache gives up on them after %g",
                self._url,
                longest_s,
                self._reads.timeout_s,
                load_timeout_s,
            )
            self._reads.timeout_s = longest_s

    def submit_read(
        self, local_addresses: list[TransferChannelAddress], remote_addresses: list[TransferChannelAddress]
    ) -> int:
        """Starts a read of whole objects. Never waits for the peer, and raises nothing."""
        try:
            return self._reads.begin(_wanted(remote_addresses), _objects(local_addresses))
        except Exception as error:
            self._reads.guard.caught("start of a read", self._url, error)
            return self._reads.begin([], [(0, 0)] * len(local_addresses))

    def query_read_status(self, task_id: int) -> TransferChannelReadResult:
        """Returns which objects have arrived and were valid until then. A refused or failed read is logged."""
        try:
            arrived = self._reads.query(task_id)
        except Exception as error:
            self._reads.guard.caught("result of a read", self._url, error)
            arrived = []
        return TransferChannelReadResult(finished=arrived is not None, succeeded_mask=arrived or [])

    def close(self) -> None:
        """Ends all reads. On return no more bytes arrive. Idempotent."""
        self._asking.stop()
        self._reads.close()
        self._asking.close()


class KVLinkTransferChannelContext(TransferChannelContext):  # type: ignore[misc]
    """One server's memory, its kvlink worker, its readers and the peers that it reads from. Thread-safe.

    p2p: LMCache's settings of this process, if they are known. Without them, its defaults are taken for granted, and
    memory without an L1Manager is allowed.
    """

    def __init__(
        self, l1_memory_desc: L1MemoryDesc, listen_url: str, advertise_url: str, p2p: P2PConfig | None = None
    ) -> None:
        self._pages = Pages(l1_memory_desc.align_bytes, l1_memory_desc.size)
        self._places = Places(self._pages)
        self._advertised = advertise_url
        self._lock = threading.Lock()
        self._clients: dict[str, KVLinkTransferChannelClient] = {}
        config = _config(listen_url, advertise_url, p2p or P2PConfig())
        self._timeout_s = config.timeout_s
        self._keys = ticket_keys(config)
        with ExitStack() as opened:
            self._zmq: zmq.Context[Any] = opened.enter_context(zmq.Context())
            pool = self._pages.pool(l1_memory_desc.ptr)
            manager = manager_of(l1_memory_desc, is_required=p2p is not None)
            l1 = None if manager is None else L1Memory(manager, self._places)
            if l1 is not None:
                opened.callback(l1.close)
            self._worker = opened.enter_context(Worker(pool, f"lmcache@{advertise_url}", config=config))
            grants = Grants(self._worker, self._pages, self._places, l1)
            self._server = KVLinkTransferChannelServer(listen_url, grants, self._zmq, self._keys)
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
        asking = Asking(self._zmq, peer_advertise_url, self._keys)
        peer = Peer(self._advertised, peer_advertise_url, asking)
        reads = Reads(self._worker, self._pages, self._places, peer, self._timeout_s)
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
        """Returns the addresses of objects in this server's memory, an invalid one for what is no object in it."""
        return [
            _NOWHERE if self._pages.problem(offset, size) else TransferChannelAddress(offset, size)
            for offset, size in lmcache_addresses
        ]

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


def _config(listen_url: str, advertise_url: str, p2p: P2PConfig) -> WorkerConfig:
    """Returns the options of the worker. Unless KVLINK_HOST is set, its hosts are those of LMCache's two addresses.

    Raises ConfigError if a read could take longer than LMCache waits for it.
    """
    defaults: dict[str, Any] = {"timeout_s": check_times(p2p)}
    if sources(os.environ)["host"] == "default":
        listen, advertised = (split_address(plain(url))[0] for url in (listen_url, advertise_url))
        defaults |= {"host": listen, "advertise": advertised if advertised != listen else ""}
    return WorkerConfig.from_env(defaults=defaults)


def check_times(p2p: P2PConfig) -> float:
    """Returns the time of a read. Raises ConfigError if LMCache would give up on it earlier."""
    is_set = sources(os.environ)["timeout_s"] != "default"
    return read_timeout_s(p2p.load_timeout, WorkerConfig.from_env().timeout_s if is_set else None)


def create_context(
    l1_memory_desc: L1MemoryDesc,
    listen_url: str,
    advertise_url: str,
    p2p: P2PConfig | None = None,
    **_: Any,
) -> KVLinkTransferChannelContext:
    """Is LMCache's factory. Arguments of other channels, such as `backends`, mean nothing here."""
    return KVLinkTransferChannelContext(l1_memory_desc, listen_url, advertise_url, p2p)


def _objects(addresses: Sequence[TransferChannelAddress]) -> list[Object]:
    return [(each.offset, each.size) for each in addresses]


def _wanted(addresses: Sequence[TransferChannelAddress]) -> list[Wanted]:
    return [Wanted(each.offset, each.size, name_of_key(getattr(each, "key", None))) for each in addresses]
