# SPDX-License-Identifier: Apache-2.0
"""Where kvlink's Workers, in a process of their own, meet peers on pyverbs, in this one."""

from __future__ import annotations

import itertools
from contextlib import ExitStack
from typing import Any

import numpy as np
from softroce.pyverbs_peer.cards import card_layout
from softroce.pyverbs_peer.formats import Ticket
from softroce.pyverbs_peer.nic import Nic, get_device_list
from softroce.pyverbs_peer.owner import Owner
from softroce.pyverbs_peer.reader import Reader
from transports.pools import PoolSpec, random_contents, rows
from transports.processes import PeerProcess, RemoteWorker

SEED = 2026
TIMEOUT_S = 60.0

_numbers = itertools.count(1)


def rdma_devices(named: str) -> list[str]:
    """All that this machine has, or the one of KVLINK_TEST_RDMA."""
    names = [device.name.decode() for device in get_device_list()]
    return [named.split(":")[0]] if named else sorted(names)


class Meeting:
    """Whoever is made here ends with it. Pools hold what SEED means."""

    def __init__(self, process: PeerProcess, devices: list[str]) -> None:
        self.kvlink_device = devices[-2 if len(devices) > 1 else -1]
        self.pyverbs_device = devices[-1]
        self._process = process
        self._open = ExitStack()
        self._nics: dict[tuple[tuple[str, int], ...], Nic] = {}

    def worker(self, spec: PoolSpec, nics: str = "") -> RemoteWorker:
        """kvlink's. It believes the owners on pyverbs, which sign no tickets and prove nothing."""
        config = {"transports": "verbs", "nics": nics or self.kvlink_device, "timeout_s": TIMEOUT_S}
        config |= {"ticket_keys": "none", "insecure": True}
        worker = RemoteWorker(self._process, f"kvlink-{next(_numbers)}", spec, **config)
        self._open.callback(worker.close)
        worker.do("fill", seed=SEED)
        return worker

    def reader(self, owner: RemoteWorker, port: int = 0, **nic: int) -> Reader:
        """On pyverbs. `port` is the owner's."""
        reader = Reader(self._nic(**nic), owner.info["agent"], port)
        self._open.callback(reader.close)
        return reader

    def owner(
        self, spec: PoolSpec, slice_bytes: int = 1 << 20, wrong_keys: bool = False, **nic: int
    ) -> Owner:
        """On pyverbs."""
        contents = random_contents(spec.layout(), SEED)[0]
        name = f"pyverbs-{next(_numbers)}"
        owner = Owner(self._nic(**nic), name, card_layout(spec.layout()), contents, slice_bytes, wrong_keys)
        self._open.callback(owner.close)
        return owner

    def close(self) -> None:
        self._open.close()
        for nic in self._nics.values():
            nic.close()

    def _nic(self, **nic: int) -> Nic:
        key = tuple(sorted(nic.items()))
        if key not in self._nics:
            self._nics[key] = Nic(self.pyverbs_device, **nic)
        return self._nics[key]


def offer(owner: RemoteWorker, blocks: list[int], **options: Any) -> Ticket:
    """As pyverbs' peer reads it."""
    return Ticket.unpack(owner.offer(blocks, **{"ttl_s": 2 * TIMEOUT_S, **options}).to_text())


def expected(spec: PoolSpec, ticket: Ticket) -> np.ndarray:
    """Returns what `Reader.blocks` must return."""
    layout, contents = spec.layout(), random_contents(spec.layout(), SEED)
    tokens, heads = range(ticket.num_tokens), range(layout.num_heads)
    return np.stack(
        [contents[p.region][rows(layout, p, ticket.block_ids, tokens, heads)] for p in layout.planes]
    )
