# SPDX-License-Identifier: Apache-2.0
"""Runs a few processes, each with a `Crowd`, and calls them together."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from ..harness.processes import BenchError
from ..measurements.control import in_processes, one_from_each
from .crowd import Crowd


class Crowds:
    """Calls methods of every Crowd. Raises BenchError if one failed."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def each(self, do: str, *arguments: object) -> list[Any]:
        """Sends the same arguments to all. Returns each one's answer."""
        return self._ask([(do, arguments)] * len(self._pipes))

    def shared_out(self, do: str, count: int) -> list[Any]:
        """Sends each one its part of `count`."""
        parts = len(self._pipes)
        return self._ask([(do, ((count + index) // parts,)) for index in range(parts)])

    def _ask(self, calls: list[tuple[str, tuple[object, ...]]]) -> list[Any]:
        try:
            for pipe, call in zip(self._pipes, calls, strict=True):
                pipe.send(call)
            answers = one_from_each(self._pipes)
        except (EOFError, OSError):
            raise BenchError("a load process ended; see its messages above") from None
        for _, error in answers:
            if error:
                raise BenchError(f"a load process could not {calls[0][0]}: {error}")
        return [answer for answer, _ in answers]


@contextmanager
def crowds(address: str, processes: int) -> Iterator[Crowds]:
    """Runs `processes` load processes."""
    with in_processes(_run, processes, address) as pipes:
        yield Crowds(pipes)


def _run(pipe: Connection, index: int, address: str) -> None:
    logging.getLogger("kvlink").setLevel(
        logging.CRITICAL
    )  # otherwise a thousand workers log that they lost the coordinator

    async def serve() -> None:
        crowd = Crowd(address, index)
        while (call := await asyncio.to_thread(pipe.recv)) is not None:
            do, arguments = call
            pipe.send(await _answer(crowd, do, arguments))
        os._exit(0)  # a thousand farewells would take longer than the measurement

    asyncio.run(serve())


async def _answer(crowd: Crowd, do: str, arguments: tuple[object, ...]) -> tuple[Any, str]:
    try:
        return await getattr(crowd, do)(*arguments), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {error}"
