# SPDX-License-Identifier: Apache-2.0
"""Serves one end: `python -m adapters PEER`, from the folder above, answers JSON lines on stdin until it ends.

With the path of a socket after PEER, it connects there instead, and first says its process and its rank. The library is
then loaded at once, because that waits for the other end.

{"do": NAME, "arguments": {…}} calls a method of End. The answer is one line, with "error" if the call failed.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import IO, Any

import numpy as np

from . import Adapter, Transfer
from .blocks import Blocks, Ids

Answer = dict[str, Any]


class End:
    """The reader or the owner of the blocks. Transfers begin at either, depending on the peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._lists: list[tuple[Ids, Ids]] = []
        self._transfers: list[Transfer] = []

    def open(self, block_bytes: int, num_blocks: int, seed: int, options: dict[str, Any]) -> Answer:
        """Fills and registers the memory."""
        self._blocks = Blocks(block_bytes, num_blocks, seed)
        module = importlib.import_module(f".{self._peer}", __package__)
        self._adapter: Adapter = module.make(self._blocks, options)
        return {"card": self._adapter.card(), "version": self._adapter.version}

    def connect(self, card: str) -> Answer:
        """Connects to the other end, from where transfers begin."""
        self._adapter.connect(card)
        return {}

    def poison(self, ids: Sequence[Sequence[int]]) -> Answer:
        """Overwrites the reader's blocks that will be transferred."""
        for each in ids:
            self._blocks.poison(np.array(each, np.int32))
        return {}

    def prepare(self, there: Sequence[Sequence[int]], here: Sequence[Sequence[int]]) -> Answer:
        """Prepares the next transfers where they begin, as far as possible before their start."""
        self._transfers = [
            self._adapter.prepare(np.array(theirs, np.int32), np.array(ours, np.int32))
            for theirs, ours in zip(there, here, strict=True)
        ]
        return {}

    def move(self, other_pid: int) -> Answer:
        """Runs the prepared transfers. Times are in µs; CPU time is in ns of both ends, without the first transfer."""
        took_us: list[float] = []
        first, *others = self._transfers
        first.run()
        other = (~other_pid << 3) | 2  # the clock of all its threads
        cpu = time.process_time_ns() + time.clock_gettime_ns(other)
        for transfer in others:
            start = time.perf_counter_ns()
            transfer.run()
            took_us.append((time.perf_counter_ns() - start) / 1000)
        cpu = time.process_time_ns() + time.clock_gettime_ns(other) - cpu
        for transfer in self._transfers:
            transfer.release()
        self._transfers = []
        return {"us": took_us, "cpu_ns": cpu}

    def check(self, there: Sequence[Sequence[int]], here: Sequence[Sequence[int]]) -> Answer:
        """Returns how many of the reader's transfers did not bring every byte."""
        return {
            "wrong": sum(
                not self._blocks.equal(np.array(ours, np.int32), np.array(theirs, np.int32))
                for theirs, ours in zip(there, here, strict=True)
            )
        }


def serve(peer: str, path: str = "") -> None:
    """Serves requests. Output of the peer goes to stderr, because stdout is for answers."""
    questions, answers = _dialled(peer, path) if path else (sys.stdin, os.fdopen(os.dup(1), "w"))
    os.dup2(2, 1)
    end = End(peer)
    for line in questions:
        message = json.loads(line)
        try:
            answer = getattr(end, message["do"])(**message["arguments"])
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def _dialled(peer: str, path: str) -> tuple[IO[str], IO[str]]:
    importlib.import_module(f".{peer}", __package__)
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    questions, answers = connection.makefile("r"), connection.makefile("w")
    print(
        json.dumps({"pid": os.getpid(), "rank": int(os.environ["OMPI_COMM_WORLD_RANK"])}),
        file=answers,
        flush=True,
    )
    return questions, answers


if __name__ == "__main__":
    serve(*sys.argv[1:])
    os._exit(0)  # NIXL's wheel crashes in its libraries' clean-up at a normal exit
