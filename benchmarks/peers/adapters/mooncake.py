# SPDX-License-Identifier: Apache-2.0
"""Adapts Mooncake's transfer engine over TCP, with its own peer-to-peer handshake."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from mooncake.engine import TransferEngine

from . import Transfer
from .blocks import Blocks, Ids

_HOST = "127.0.0.1"
_MOST_THREADS = 10  # the default of Mooncake's vLLM connector (num_workers)


class Mooncake:
    """One engine. The option `push` writes from the owner, as Mooncake's vLLM connector does; the default reads."""

    def __init__(self, blocks: Blocks, options: dict[str, Any]) -> None:
        self.version = version("mooncake-transfer-engine-non-cuda")
        self._blocks = blocks
        self._engine = TransferEngine()
        _succeed("initialize", self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""))
        _succeed("register_memory", self._engine.register_memory(blocks.address, blocks.num_bytes))
        engine, requests = self._engine, int(options.get("requests", 1))
        self._threads = ThreadPoolExecutor(min(requests, _MOST_THREADS)) if requests > 1 else None
        self._call = (
            engine.batch_transfer_sync_write if options.get("push") else engine.batch_transfer_sync_read
        )

    def card(self) -> str:
        """Returns the engine's address, and the address of the blocks."""
        session = f"{_HOST}:{self._engine.get_rpc_port()}"
        return json.dumps({"session": session, "address": self._blocks.address})

    def connect(self, card: str) -> None:
        """Stores the card. The engine connects with the first transfer."""
        self._other = json.loads(card)

    def prepare(self, there: Ids, here: Ids) -> Transfer:
        """Prepares one batch_transfer_sync call, which is timed; its lists are made before.

        Of several at once, each has a thread, as in Mooncake's vLLM connector.
        """
        starts, sizes = self._blocks.starts(), self._blocks.sizes()[here].tolist()
        mine = (self._blocks.address + starts[here]).tolist()
        theirs = (self._other["address"] + starts[there]).tolist()
        started: list[Future[int]] = []

        def call() -> int:
            return int(self._call(self._other["session"], mine, theirs, sizes))

        def finish() -> None:
            _succeed("the transfer", started.pop().result() if started else call())

        def start() -> None:
            if self._threads is not None:
                started.append(self._threads.submit(call))

        return Transfer(start, finish, lambda: None)


def _succeed(what: str, answer: int) -> None:
    if answer != 0:
        raise RuntimeError(f"{what} failed with status {answer}")


make = Mooncake
