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
        self._blocks = blocks
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
        """Makes the tensors of the lists, and the one that gets the message, which has a part for each group."""
        count, theirs = torch.tensor([len(there)]), torch.tensor(there)
        groups = [
            (torch.from_numpy(words).view(torch.int64), torch.tensor(rows).long())
            for words, rows in self._blocks.by_group(here)
        ]
        packed = torch.empty(sum(words.shape[1] * len(rows) for words, rows in groups), dtype=torch.int64)
        asked: list[Any] = []

        def start() -> None:
            asked.append(self._group.send([count], _OWNER, _COUNT))
            asked.append(self._group.send([theirs], _OWNER, _IDS))

        def finish() -> None:
            self._group.recv([packed], _OWNER, _BLOCKS).wait()
            at = 0
            for words, rows in groups:
                part = packed[at : at + len(rows) * words.shape[1]]
                words.index_copy_(0, rows, part.view(len(rows), words.shape[1]))
                at += len(part)
            while asked:
                asked.pop().wait()

        return Transfer(start, finish, lambda: None)

    def _serve(self) -> None:
        group, count = (
            _distributed.ProcessGroupGloo(self._store, _OWNER, 2, _WAIT),
            torch.zeros(1, dtype=torch.int64),
        )
        while True:
            group.recv([count], _READER, _COUNT).wait()
            ids = torch.empty(int(count), dtype=torch.int32)
            group.recv([ids], _READER, _IDS).wait()
            parts = [
                torch.from_numpy(words).view(torch.int64).index_select(0, torch.tensor(rows)).view(-1)
                for words, rows in self._blocks.by_group(ids.numpy())
            ]
            group.send([parts[0] if len(parts) == 1 else torch.cat(parts)], _READER, _BLOCKS).wait()


make = Gloo
