# SPDX-License-Identifier: Apache-2.0
"""Implements the roles of `kvlink demo`: servers of a transformer in numpy, whose layers may be split over stages.

One process computes all stages of a server, and every stage has a worker and a pool with its own layers. Prefill offers
a request at each of its workers, and each worker of decode pulls its layers from the stages that have them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np

from kvlink.config import WorkerConfig
from kvlink.demo.messages import Reply, until_none
from kvlink.demo.model import HEAD_DIM, NUM_HEADS, NUM_LAYERS, Array, Cache, Transformer
from kvlink.demo.text import NUM_NEW_TOKENS, PROMPTS, Expected, tokenize
from kvlink.layout import Geometry, Pipeline, Share, dense, num_seats
from kvlink.transfer.pool import BlockPool
from kvlink.worker import Worker

BLOCK_TOKENS = 16
_NUM_BLOCKS = 256
_LEASE_S, _PULL_S = 60.0, 20.0
_POISON = (
    1e4  # a block that was not pulled makes all later tokens wrong; finite, as masked values must stay 0
)


class _Server:
    """The stages of one server. Every stage has the same block ids."""

    name: str

    def __init__(
        self,
        transport: str,
        coordinator: str,
        patience: float = 1.0,
        stages: Sequence[int] = (1, 1),
    ) -> None:
        """`stages` are the numbers of stages of prefill and of decode."""
        self.model = Transformer()
        self.stages, self.patience = tuple(stages), patience
        config = replace(WorkerConfig.from_env(), lease_s=_LEASE_S * patience, timeout_s=_PULL_S * patience)
        size = self.stages[self.name == "decode"]
        with ExitStack() as opened:
            self.workers = [
                opened.enter_context(
                    Worker(
                        BlockPool.allocate(dense(self._geometry(stage, size))),
                        f"{self.name}-{transport}" + (f"-stage-{stage}" if size > 1 else ""),
                        coordinator=coordinator,
                        transports=transport,
                        config=config,
                    )
                )
                for stage in range(size)
            ]
            self._opened = opened.pop_all()

    @staticmethod
    def _geometry(stage: int, size: int) -> Geometry:
        return Geometry(
            num_layers=NUM_LAYERS,
            total_heads=NUM_HEADS,
            row_bytes=4 * HEAD_DIM,
            num_blocks=_NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            dtype="float32",
            pipeline=Pipeline.even(stage, size, NUM_LAYERS),
        )

    def layers(self) -> list[Array]:
        """Returns the blocks of each layer of the model, [2, blocks, tokens, heads, head_dim], without a copy."""
        shape = (-1, 2, _NUM_BLOCKS, BLOCK_TOKENS, NUM_HEADS, HEAD_DIM)
        return [
            layer for worker in self.workers for layer in worker.pool.numpy().view(np.float32).reshape(shape)
        ]

    def rows(self, blocks: Sequence[int], num_tokens: int) -> list[Array]:
        """Returns a copy of a request's rows in each layer, [2, tokens, heads, head_dim]."""
        shape = (2, -1, NUM_HEADS, HEAD_DIM)
        return [layer[:, list(blocks)].reshape(shape)[:, :num_tokens] for layer in self.layers()]

    def digest(self, blocks: Sequence[int], num_tokens: int) -> str:
        """Returns a digest that is equal on both sides exactly if every token's bytes are, whatever the block ids."""
        found = hashlib.blake2b(digest_size=16)
        for rows in self.rows(blocks, num_tokens):
            found.update(np.ascontiguousarray(rows).data)
        return found.hexdigest()

    def close(self) -> None:
        """Implements Role."""
        self._opened.close()


class Prefill(_Server):
    """The prefill server of one transport."""

    name = "prefill"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._free = list(range(_NUM_BLOCKS))
        self._held: dict[str, list[int]] = {}
        self._ended: Counter[str] = Counter()
        self._num_offered = 0
        self._prompts: dict[tuple[int, ...], tuple[Cache, int]] = {}

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Implements Role."""
        return {"prefill": self.prefill, "ended": self.ended}

    def prefill(self, request_id: str, prompt: str) -> Reply:
        """Returns what the router carries to decode, and a digest of the prompt's blocks."""
        tokens = tokenize(prompt)
        cache, next_token = self._computed(tokens)
        blocks = self._allocate(-(-len(tokens) // BLOCK_TOKENS))
        for (keys, values), layer in zip(cache, self.layers(), strict=True):
            for index, block in enumerate(blocks):
                of = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
                layer[0, block, : len(keys[of])] = keys[of]
                layer[1, block, : len(keys[of])] = values[of]
        self._held[request_id] = blocks
        reader = Share(NUM_HEADS, pipeline=Pipeline.even(0, self.stages[1], NUM_LAYERS))
        tickets = [
            worker.offer(
                request_id, blocks, num_tokens=len(tokens), readers=num_seats(worker.pool.layout, reader)
            ).to_text()
            for worker in self.workers
        ]
        self._num_offered += 1
        handoff = {"tickets": tickets, "prompt": tokens, "token": next_token}
        return {"handoff": json.dumps(handoff), "digest": self.digest(blocks, len(tokens))}

    def _computed(self, prompt: list[int]) -> tuple[Cache, int]:
        """Computes a prompt once: the timed pulls offer the same one again and again."""
        key = tuple(prompt)
        if key not in self._prompts:
            cache: Cache = []
            self._prompts[key] = cache, self.model.forward(prompt, cache)
        return self._prompts[key]

    def _allocate(self, count: int) -> list[int]:
        """Takes blocks out of order, so that neither end is contiguous. Waits for readers if there are too few."""
        self._collect()
        while len(self._free) < count:
            next(self.workers[0].watch_events_blocking(_LEASE_S * self.patience), None)
            self._collect()
        taken = self._free[::-2][:count] if len(self._free) >= 2 * count else self._free[:count]
        self._free = [block for block in self._free if block not in taken]
        return taken

    def _collect(self) -> None:
        """Takes back the blocks of requests that have ended at every stage."""
        for worker in self.workers:
            for event in worker.events():
                self._ended[event.request_id] += 1
                if self._ended[event.request_id] == len(self.workers):
                    self._free += self._held.pop(event.request_id)

    def ended(self, timeout_s: float) -> Reply:
        """Waits for all offers to end, and counts those that did not end as expected."""
        return until_none(self._left, timeout_s)

    def _left(self) -> Reply:
        self._collect()
        settled = sum(worker.lease_counts().settled for worker in self.workers)
        return {"unsettled": self._num_offered * len(self.workers) - settled, "held": len(self._held)}


class Decode(_Server):
    """The decode server of one transport."""

    name = "decode"

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Implements Role."""
        return {"decode": self.decode}

    def decode(self, handoff: str, num_tokens: int) -> Reply:
        """Pulls at every stage and generates. "us" is the time of the slowest pull, until its blocks are settled."""
        received = json.loads(handoff)
        prompt = received["prompt"]
        blocks = list(range(-(-len(prompt) // BLOCK_TOKENS)))
        for layer in self.layers():
            layer[...] = _POISON
        pulls = [worker.pull(received["tickets"], blocks) for worker in self.workers]
        for pull in pulls:
            pull.wait()
        tokens = self._generate(blocks, prompt, received["token"], num_tokens)
        paths = [path for pull in pulls for path in pull.explain()]
        return {
            "engine": "a small transformer in numpy" + self._split(),
            "tokens": tokens,
            "digest": self.digest(blocks, len(prompt)),
            "us": max(pull.stats.total_us for pull in pulls),
            "bytes": sum(pull.stats.num_bytes for pull in pulls),
            "path": ", ".join(sorted({path.transport for path in paths})),
            "explanation": "; ".join(map(str, paths)),
        }

    def _split(self) -> str:
        return "" if self.stages == (1, 1) else f", in {self.stages[0]} and {self.stages[1]} stage(s)"

    def _generate(self, blocks: list[int], prompt: list[int], token: int, num_tokens: int) -> list[int]:
        cache: Cache = [(keys, values) for keys, values in self.rows(blocks, len(prompt))]
        tokens = [token]
        while len(tokens) < num_tokens:
            tokens.append(self.model.forward(tokens[-1:], cache))
        return tokens


class Reference:
    """The reference: no worker, no handoff, and a cache that never leaves its process."""

    def __init__(self, patience: float = 1.0) -> None:
        self.model = Transformer()

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Implements Role."""
        return {"tokens": self.tokens}

    def tokens(self) -> Expected:
        """Returns the tokens of all prompts, which takes seconds."""
        return {name: self._continued(tokenize(text)) for name, text in PROMPTS.items()}

    def _continued(self, prompt: list[int]) -> list[int]:
        cache: Cache = []
        tokens = [self.model.forward(prompt, cache)]
        while len(tokens) < NUM_NEW_TOKENS:
            tokens.append(self.model.forward(tokens[-1:], cache))
        return tokens

    def close(self) -> None:
        """Implements Role."""
