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
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import IO, Any

import numpy as np

from . import Adapter, Transfer
from .blocks import Blocks, Ids

Answer = dict[str, Any]
Bursts = Sequence[Sequence[Sequence[int]]]
"""The blocks of each request of several bursts."""


class End:
    """The reader or the owner of the blocks. Transfers begin at either, depending on the peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._bursts: list[list[Transfer]] = []

    def open(self, groups: Sequence[Sequence[int]], seed: int, options: dict[str, Any]) -> Answer:
        """Fills and registers the memory."""
        self._blocks = Blocks(groups, seed)
        module = importlib.import_module(f".{self._peer}", __package__)
        self._adapter: Adapter = module.make(self._blocks, options)
        return {"card": self._adapter.card(), "version": self._adapter.version}

    def connect(self, card: str) -> Answer:
        """Connects to the other end, from where transfers begin."""
        self._adapter.connect(card)
        return {}

    def poison(self, ids: Bursts) -> Answer:
        """Overwrites the reader's blocks that will be transferred."""
        for each in chain.from_iterable(ids):
            self._blocks.poison(np.array(each, np.int32))
        return {}

    def prepare(self, there: Bursts, here: Bursts) -> Answer:
        """Prepares the next bursts where they begin, as far as possible before their start."""
        self._bursts = [
            [self._adapter.prepare(*pair) for pair in _pairs(theirs, ours)]
            for theirs, ours in zip(there, here, strict=True)
        ]
        return {}

    def move(self, other_pid: int) -> Answer:
        """Runs the prepared bursts. Times are in µs; CPU time is in ns of both ends, without the first burst."""
        took_us: list[float] = []
        first, *others = self._bursts
        _run(first)
        other = (~other_pid << 3) | 2  # the clock of all its threads
        cpu = time.process_time_ns() + time.clock_gettime_ns(other)
        for burst in others:
            start = time.perf_counter_ns()
            _run(burst)
            took_us.append((time.perf_counter_ns() - start) / 1000)
        cpu = time.process_time_ns() + time.clock_gettime_ns(other) - cpu
        for transfer in chain.from_iterable(self._bursts):
            transfer.release()
        self._bursts = []
        return {"us": took_us, "cpu_ns": cpu}

    def check(self, there: Bursts, here: Bursts) -> Answer:
        """Returns how many of the reader's bursts did not bring every byte."""
        wrong = (
            not all(self._blocks.equal(mine, other) for other, mine in _pairs(theirs, ours))
            for theirs, ours in zip(there, here, strict=True)
        )
        return {"wrong": sum(wrong)}


def _pairs(there: Sequence[Sequence[int]], here: Sequence[Sequence[int]]) -> Iterator[tuple[Ids, Ids]]:
    for theirs, ours in zip(there, here, strict=True):
        yield np.array(theirs, np.int32), np.array(ours, np.int32)


def _run(burst: Sequence[Transfer]) -> None:
    for transfer in burst:
        transfer.start()
    for transfer in burst:
        transfer.finish()


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
