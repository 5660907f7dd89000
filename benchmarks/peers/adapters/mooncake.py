# SPDX-License-Identifier: Apache-2.0
"""Adapts Mooncake's transfer engine over TCP, with its own peer-to-peer handshake."""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

from mooncake.engine import TransferEngine

from . import Transfer
from .blocks import Blocks, Ids

_HOST = "127.0.0.1"


class Mooncake:
    """One engine. The option `push` writes from the owner, as Mooncake's vLLM connector does; the default reads."""

    def __init__(self, blocks: Blocks, options: dict[str, Any]) -> None:
        self.version = version("mooncake-transfer-engine-non-cuda")
        self._blocks = blocks
        self._engine = TransferEngine()
        _succeed("initialize", self._engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", ""))
        _succeed("register_memory", self._engine.register_memory(blocks.address, blocks.num_bytes))
        engine = self._engine
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
        """Prepares one batch_transfer_sync call, which is timed; its lists are made before."""
        size, session = self._blocks.block_bytes, self._other["session"]
        mine = [self._blocks.address + int(block) * size for block in here]
        theirs = [self._other["address"] + int(block) * size for block in there]
        sizes = [size] * len(mine)
        return Transfer(
            lambda: _succeed("the transfer", self._call(session, mine, theirs, sizes)), lambda: None
        )


def _succeed(what: str, answer: int) -> None:
    if answer != 0:
        raise RuntimeError(f"{what} failed with status {answer}")


make = Mooncake
