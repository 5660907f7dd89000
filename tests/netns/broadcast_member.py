# SPDX-License-Identifier: Apache-2.0
"""One worker of a broadcast, which obeys lines of JSON. It is started on a host of a Lan."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from typing import Any

import numpy as np

import kvlink

LAYOUT = kvlink.dense(kvlink.Geometry(num_layers=2, total_heads=8, row_bytes=256, num_blocks=256))
BLOCKS = list(range(128))
"""16 MiB."""


class Member:
    """Has a method for each command."""

    def __init__(self, name: str) -> None:
        self.worker = kvlink.Worker(kvlink.BlockPool.allocate(LAYOUT), name, transports="tcp")
        self.relayed: Any = None

    def fill(self, seed: int) -> str:
        memory = self.worker.pool.numpy()
        memory[:] = np.random.default_rng(seed).integers(256, size=memory.shape, dtype=np.uint8)
        return self.digest()

    def digest(self) -> str:
        planes = self.worker.pool.numpy().reshape(4, LAYOUT.num_blocks, -1)
        return hashlib.sha256(planes[:, BLOCKS].tobytes()).hexdigest()

    def offer(self, request: str, readers: int) -> list[str]:
        ticket = self.worker.offer(request, BLOCKS, readers=readers, ttl_s=60.0)
        return [each.to_text() for each in self.worker.split(ticket)]

    def connect(self, ticket: str) -> None:
        self.worker.connect(kvlink.Ticket.from_text(ticket))

    def relay(self, ticket: str, readers: int, fallback: str | None = None, **how: Any) -> list[str]:
        self.relayed = self.worker.relay(ticket, BLOCKS, readers=readers, fallback=fallback, **how)
        offered = self.relayed.ticket
        return [] if offered is None else [each.to_text() for each in self.worker.split(offered)]

    def pull(self, ticket: str) -> None:
        self.relayed = self.worker.pull(ticket, BLOCKS)

    def wait(self) -> list[Any]:
        """Returns when it ended by the clock of the host, and why sources were given up."""
        self.relayed.wait()
        return [time.monotonic(), [type(error).__name__ for error in getattr(self.relayed, "failed", ())]]

    def ended(self) -> list[str]:
        return [event.how.value for event in self.worker.events()]


def main() -> None:
    member = Member(sys.argv[1])
    for line in sys.stdin:
        arguments = json.loads(line)
        try:
            answer = {"ok": getattr(member, arguments.pop("do"))(**arguments)}
        except kvlink.KVLinkError as error:
            answer = {"error": [type(error).__name__, str(error)]}
        print(json.dumps(answer), flush=True)
    member.worker.close()


if __name__ == "__main__":
    main()
