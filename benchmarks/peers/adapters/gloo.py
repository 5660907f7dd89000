# SPDX-License-Identifier: Apache-2.0
"""Adapts torch.distributed's gloo, which sends and receives: the owner packs the blocks that it is asked for.

The time of a transfer has the question, the owner's gather, the message, and the reader's scatter.
"""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from . import Transfer
from .blocks import Blocks, Ids

_HOST, _WAIT = "127.0.0.1", timedelta(minutes=30)
_OWNER, _READER = 0, 1
_COUNT, _IDS, _BLOCKS = 1, 2, 3
"""Tags of messages."""

_distributed: Any = torch.distributed


class Gloo:
    """One end of a group of two. The owner answers on a thread of its own."""

    def __init__(self, blocks: Blocks, options: dict[str, Any]) -> None:
        self.version = torch.__version__
        self._rows = torch.from_numpy(blocks.as_bytes()).view(torch.int64).view(blocks.num_blocks, -1)
        self._store = _distributed.TCPStore(_HOST, 0, 2, True, _WAIT, wait_for_workers=False)
        self._asked = threading.Thread(target=self._serve, name="bench-owner", daemon=True)
        self._asked.start()

    def card(self) -> str:
        """Returns the port of the store by which both ends meet."""
        return json.dumps(self._store.port)

    def connect(self, card: str) -> None:
        """Joins the other end's group; this one's own never meets."""
        store = _distributed.TCPStore(_HOST, json.loads(card), 2, False, _WAIT)
        self._group = _distributed.ProcessGroupGloo(store, _READER, 2, _WAIT)

    def prepare(self, there: Ids, here: Ids) -> Transfer:
        """Makes the tensors of the lists, and the one that gets the message."""
        count, theirs, ours = torch.tensor([len(there)]), torch.tensor(there), torch.tensor(here).long()
        packed = torch.empty((len(there), self._rows.shape[1]), dtype=torch.int64)

        def run() -> None:
            asked = [self._group.send([count], _OWNER, _COUNT), self._group.send([theirs], _OWNER, _IDS)]
            self._group.recv([packed], _OWNER, _BLOCKS).wait()
            self._rows.index_copy_(0, ours, packed)
            for each in asked:
                each.wait()

        return Transfer(run, lambda: None)

    def _serve(self) -> None:
        group, count = (
            _distributed.ProcessGroupGloo(self._store, _OWNER, 2, _WAIT),
            torch.zeros(1, dtype=torch.int64),
        )
        while True:
            group.recv([count], _READER, _COUNT).wait()
            ids = torch.empty(int(count), dtype=torch.int32)
            group.recv([ids], _READER, _IDS).wait()
            group.send([self._rows.index_select(0, ids)], _READER, _BLOCKS).wait()


make = Gloo
