# SPDX-License-Identifier: Apache-2.0
"""Publishes the prefixes in this server's cache in the coordinators' directories, and finds those of peers.

It runs in the scheduler's process, on kvlink's control thread. The scheduler itself never waits.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from kvlink.control import CoordinatorClient
from kvlink.control.prefix_publisher import PrefixPublisher
from kvlink.control.values import KEY_BYTES, FoundPrefix, Prefix, PrefixQuery, WorkerEpoch
from kvlink.errors import KVLinkError
from kvlink.runtime.background import ControlThread

from ..wire.handoff import KEY, Handoff, Owner, RankInfo

_FIND_S = 0.2
"""A request waits no longer for the directory."""
_CLOSE_S = 2.0


class PeerPrefixes:
    """The prefixes that servers share. Safe from any thread.

    coordinator: host:port, or several with commas; each has a directory of its own.
    most: how many prefixes have a lease at once; the lease of a further one ends the oldest.
    """

    def __init__(self, coordinator: str, most: int) -> None:
        self._coordinator = coordinator
        self._most = most
        self._control = ControlThread.shared()
        self._owner: Owner | None = None
        self.secret = ""
        """That of the worker in whose name it publishes."""
        self._live: dict[str, None] = {}
        self._asking: CoordinatorClient | None = None
        self._publishers: list[tuple[CoordinatorClient, PrefixPublisher, Future[None]]] = []

    def publish(self, handoff: Handoff, scope: bytes) -> str:
        """Publishes a soft handoff until its time is over or `withdraw`. Returns one that ended for it, or "".

        scope: the 16 bytes of RankInfo.
        """
        assert handoff.digests is not None
        digests, self._owner = handoff.digests, handoff.owners[0]
        keys = b"".join(digests[index][:KEY_BYTES] for index in range(len(digests)))
        ticket = json.dumps({KEY: handoff.to_params()}).encode()
        span = handoff.num_tokens // len(digests)
        prefix = Prefix(handoff.request_id, handoff.ttl_s, 0, 1, scope, span, keys, ticket)
        self._live[handoff.request_id] = None
        self._later(self._publish, prefix, time.monotonic() + handoff.ttl_s)
        if len(self._live) <= self._most:
            return ""
        oldest = next(iter(self._live))
        self.withdraw(oldest)
        return oldest

    def withdraw(self, request_id: str) -> None:
        """Withdraws a prefix. Does nothing if it is not published."""
        if request_id in self._live:
            del self._live[request_id]
            self._later(self._withdraw, request_id)

    def withdraw_all(self) -> None:
        """Withdraws all prefixes."""
        for request_id in list(self._live):
            self.withdraw(request_id)

    def find(
        self,
        digests: Sequence[bytes],
        span: int,
        own_tokens: int,
        own: RankInfo,
        last: tuple[str, ...],
    ) -> Future[list[FoundPrefix]]:
        """Asks for a server that has more than `own_tokens` tokens of a prompt. `own` is a worker of this one.

        The workers in `last` are named only if no other has a prefix.
        """
        keys = b"".join(digest[:KEY_BYTES] for digest in digests)
        query = PrefixQuery(own.scope, span, keys, own_tokens // span, 1, own.owner.worker_id, last)
        return self._control.submit(self._find(query))

    def close(self) -> None:
        """Closes the connections to the coordinators. Idempotent."""
        with contextlib.suppress(KVLinkError):
            self._control.run(self._close(), _CLOSE_S)

    # The following methods run on the control thread.

    def _later(self, call: Callable[..., None], *args: object) -> None:
        self._control.on_loop("prefix of a server", call, *args)

    def _publish(self, prefix: Prefix, ends: float) -> None:
        if not self._publishers:
            for address in self._coordinator.split(","):
                client = CoordinatorClient(address)
                publisher = PrefixPublisher(client, self._publishing)
                running = self._control.keep_running("server prefix publisher", publisher.run)
                self._publishers.append((client, publisher, running))
        for client, publisher, _ in self._publishers:
            client.act_as(self.secret)
            publisher.publish(prefix, lambda: time.monotonic() < ends)

    def _publishing(self) -> WorkerEpoch:
        assert self._owner is not None
        return WorkerEpoch(self._owner.worker_id, self._owner.epoch)

    def _withdraw(self, request_id: str) -> None:
        for _, publisher, _ in self._publishers:
            publisher.withdraw(request_id)

    async def _find(self, query: PrefixQuery) -> list[FoundPrefix]:
        if self._asking is None:
            self._asking = CoordinatorClient(self._coordinator)
        return await self._asking.find_prefix(query, _FIND_S)

    async def _close(self) -> None:
        publishers, self._publishers = self._publishers, []
        for client, _, running in publishers:
            running.cancel()
            await client.close()
        if self._asking is not None:
            asking, self._asking = self._asking, None
            await asking.close()
