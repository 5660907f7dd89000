# SPDX-License-Identifier: Apache-2.0
"""The decode side: pulls a request's blocks into blocks of its own and goes on with the text."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from kvlink import Pull, Ticket
from kvlink.demo.messages import Reply
from kvlink.demo.model import TinyLlama, cache_of
from kvlink.demo.paging import blocks_for
from kvlink.demo.station import Station
from kvlink.demo.text import tokenize

_TIMEOUT_S = 20.0


class DecodeRole:
    """One transport's decode worker."""

    def __init__(self, transport: str, coordinator: str, patience: float = 1.0) -> None:
        self._timeout_s = _TIMEOUT_S * patience
        self._model = TinyLlama()
        self._station = Station("decode", transport, coordinator)

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """See Role."""
        return {"decode": self.decode, "measure": self.measure}

    def decode(
        self, request_id: str, ticket: str | None, prompt: str, first_token: int, num_tokens: int
    ) -> Reply:
        """Pulls the prompt's blocks and generates. Without a ticket's text the request is claimed by id.

        The pulled cache covers the whole prompt, so no token of it is computed again.
        """
        with self._poisoned_blocks(prompt) as (block_ids, num_prompt_tokens):
            pull = self._pull(request_id, ticket, block_ids)
            paths = pull.explain()
            cache = cache_of(self._station.planes.read(block_ids, num_prompt_tokens))
            digest = self._station.planes.digest(block_ids, num_prompt_tokens)
            return {
                "digest": digest,
                "tokens": self._model.decode(cache, first_token, num_tokens),
                "path": ", ".join(path.transport for path in paths),
                "explanation": "; ".join(map(str, paths)),
            }

    def measure(self, request_id: str, ticket: str | None, prompt: str) -> Reply:
        """One pull without decoding: microseconds from the call to validated and settled blocks."""
        with self._poisoned_blocks(prompt) as (block_ids, num_prompt_tokens):
            start_ns = time.perf_counter_ns()
            pull = self._pull(request_id, ticket, block_ids)
            took_ns = time.perf_counter_ns() - start_ns
            digest = self._station.planes.digest(block_ids, num_prompt_tokens)
            return {"us": took_ns / 1000, "bytes": pull.stats.num_bytes, "digest": digest}

    def close(self) -> None:
        """See Role."""
        self._station.close()

    def _pull(self, request_id: str, ticket: str | None, block_ids: list[int]) -> Pull:
        source = Ticket.from_text(ticket) if ticket else request_id
        pull = self._station.worker.pull(source, into=block_ids, timeout_s=self._timeout_s)
        pull.wait()
        return pull

    @contextmanager
    def _poisoned_blocks(self, prompt: str) -> Iterator[tuple[list[int], int]]:
        num_tokens = len(tokenize(prompt))
        block_ids = self._station.blocks.allocate(blocks_for(num_tokens))
        self._station.planes.poison(block_ids)
        try:
            yield block_ids, num_tokens
        finally:
            self._station.blocks.free(block_ids)


make = DecodeRole
