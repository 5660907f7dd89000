# SPDX-License-Identifier: Apache-2.0
"""Implements the roles of `kvlink demo`: servers of a transformer in numpy, whose layers may be split over stages.

One process computes all stages of a server, and every stage has a worker and a pool with its own layers. Prefill offers
a request at each of its workers, and each worker of decode pulls its layers from the stages that have them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvlink.config import WorkerConfig
from kvlink.demo.model import HEAD_DIM, NUM_HEADS, NUM_LAYERS, Array, Cache, Transformer
from kvlink.demo.processes import Reply
from kvlink.layout import Geometry, Pipeline, Share, dense, num_seats
from kvlink.transfer.pool import BlockPool
from kvlink.worker import Worker

BLOCK_TOKENS, NUM_BLOCKS = 16, 256
# Large, so that a block that was not pulled makes all later tokens wrong; finite, as masked values must stay 0.
POISON = 1e4
NUM_NEW_TOKENS = 32
"""The number of tokens generated per prompt."""
_LEASE_S, _PULL_S = 60.0, 20.0

_PAGE = """\
A language model reads a prompt once and writes its answer one token at a time. Reading is bound by
arithmetic: every token of the prompt meets every weight, and thousands of them do so together. Writing is
bound by memory: each new token reads all the tokens before it, and all the weights, to add one word to the
answer. A server that does both on one device lets each job disturb the other. So the two jobs are split:
one group of workers reads prompts, another writes answers, and the keys and values of every layer and token
move from one to the other. For a model of seventy billion parameters and a prompt of a few thousand tokens,
they are more than a gigabyte. They are also paged: the tokens of one request are in blocks of sixteen, which
are scattered over the whole pool, in another order on either side. And the first group reuses its blocks for
the next request as soon as it believes that the transfer has ended. A byte that is copied after that belongs
to another conversation, and nothing but the answer shows it. So this demo compares every token before it
reports any µs.
"""

PROMPTS: dict[str, str] = {
    "less than a block": "Once upon a",
    "exactly one block": "Sixteen letters.",
    "one token over": "Seventeen letters",
    "some blocks and a bit": _PAGE[:203],
    "a page": _PAGE,
}
"""Prompts by name. They cover a single partial block, a full last block, and a last block of one token."""


@dataclass(frozen=True, slots=True)
class Options:
    """How both servers and the single-process run compute."""

    patience: float = 1.0
    """Multiplies every deadline."""
    engine: str = "numpy"
    """A small transformer in "numpy", or continuous batching of Hugging Face "transformers"."""
    device: str = "cpu"
    """The device of the models, as torch names it."""
    stages: tuple[int, int] = (1, 1)
    """The stages of prefill's and of decode's pipeline, with a worker for each."""

    def worker_config(self) -> WorkerConfig:
        """Returns the options of the demo's workers. Raises ConfigError if the environment's are not valid."""
        config = WorkerConfig.from_env()
        return replace(config, lease_s=_LEASE_S * self.patience, timeout_s=_PULL_S * self.patience)


def tokenize(text: str) -> list[int]:
    """Returns the UTF-8 bytes as token ids (0…255), so that lengths in bytes are lengths in tokens."""
    return list(text.encode())


def digest(arrays: Iterable[NDArray[Any]]) -> str:
    """Returns a digest that is equal on both sides exactly if every token's bytes are, whatever the block ids."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def until_none(count: Callable[[], Reply], timeout_s: float) -> Reply:
    """Calls `count` until all of its numbers are 0, or the time has passed. Returns what it returned last."""
    deadline = time.monotonic() + timeout_s
    while any((left := count()).values()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return left


class _Server:
    """The stages of one server. Every stage has the same block ids."""

    name: str

    def __init__(self, transport: str, coordinator: str, options: Options = Options()) -> None:
        self.model = Transformer()
        self.options, self.stages = options, options.stages
        size = self.stages[self.name == "decode"]
        with ExitStack() as opened:
            self.workers = [
                opened.enter_context(
                    Worker(
                        BlockPool.allocate(dense(self._geometry(stage, size))),
                        f"{self.name}-{transport}" + (f"-stage-{stage}" if size > 1 else ""),
                        coordinator=coordinator,
                        transports=transport,
                        config=options.worker_config(),
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
            num_blocks=NUM_BLOCKS,
            block_tokens=BLOCK_TOKENS,
            dtype="float32",
            pipeline=Pipeline.even(stage, size, NUM_LAYERS),
        )

    def layers(self) -> list[Array]:
        """Returns the blocks of each layer of the model, [2, blocks, tokens, heads, head_dim], without a copy."""
        shape = (-1, 2, NUM_BLOCKS, BLOCK_TOKENS, NUM_HEADS, HEAD_DIM)
        return [
            layer for worker in self.workers for layer in worker.pool.numpy().view(np.float32).reshape(shape)
        ]

    def rows(self, blocks: Sequence[int], num_tokens: int) -> list[Array]:
        """Returns a copy of a request's rows in each layer, [2, tokens, heads, head_dim]."""
        shape = (2, -1, NUM_HEADS, HEAD_DIM)
        return [layer[:, list(blocks)].reshape(shape)[:, :num_tokens] for layer in self.layers()]

    def close(self) -> None:
        """Closes the workers."""
        self._opened.close()


class Prefill(_Server):
    """The prefill server of one transport."""

    name = "prefill"

    def __init__(self, transport: str, coordinator: str, options: Options = Options()) -> None:
        super().__init__(transport, coordinator, options)
        self._free = list(range(NUM_BLOCKS))
        self._held: dict[str, list[int]] = {}
        self._ended: Counter[str] = Counter()
        self._num_offered = 0
        self._prompts: dict[str, tuple[Cache, int]] = {}

    def prefill(self, request_id: str, prompt: str) -> Reply:
        """Returns what the router carries to decode, and a digest of the prompt's blocks."""
        tokens = tokenize(prompt)
        if prompt not in self._prompts:  # the timed pulls offer the same one again and again
            computed: Cache = []
            self._prompts[prompt] = computed, self.model.forward(tokens, computed)
        cache, next_token = self._prompts[prompt]
        blocks = self._allocate(-(-len(tokens) // BLOCK_TOKENS))
        for rows, layer in zip(cache, self.layers(), strict=True):
            for index, block in enumerate(blocks):
                of = slice(index * BLOCK_TOKENS, (index + 1) * BLOCK_TOKENS)
                for kind in (0, 1):
                    layer[kind, block, : len(rows[kind][of])] = rows[kind][of]
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
        return {"handoff": json.dumps(handoff), "digest": digest(self.rows(blocks, len(tokens)))}

    def _allocate(self, count: int) -> list[int]:
        """Takes blocks out of order, so that neither end is contiguous. Waits for readers if there are too few."""
        self._collect()
        while len(self._free) < count:
            next(self.workers[0].watch_events_blocking(self.options.worker_config().lease_s), None)
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

    def decode(self, handoff: str, num_tokens: int) -> Reply:
        """Pulls at every stage and generates. "us" is the time of the slowest pull, until its blocks are settled."""
        received = json.loads(handoff)
        prompt = received["prompt"]
        blocks = list(range(-(-len(prompt) // BLOCK_TOKENS)))
        for layer in self.layers():
            layer[...] = POISON
        pulls = [worker.pull(received["tickets"], blocks) for worker in self.workers]
        for pull in pulls:
            pull.wait()
        tokens = self._generate(blocks, prompt, received["token"], num_tokens)
        paths = [path for pull in pulls for path in pull.explain()]
        split = "" if self.stages == (1, 1) else f", in {self.stages[0]} and {self.stages[1]} stage(s)"
        return {
            "engine": "a small transformer in numpy" + split,
            "tokens": tokens,
            "digest": digest(self.rows(blocks, len(prompt))),
            "us": max(pull.stats.total_us for pull in pulls),
            "bytes": sum(pull.stats.num_bytes for pull in pulls),
            "path": ", ".join(sorted({path.transport for path in paths})),
            "explanation": "; ".join(map(str, paths)),
        }

    def _generate(self, blocks: list[int], prompt: list[int], token: int, num_tokens: int) -> list[int]:
        cache: Cache = [(keys, values) for keys, values in self.rows(blocks, len(prompt))]
        return self.model.generate(token, cache, num_tokens)


class Reference:
    """The reference: no worker, no handoff, and a cache that never leaves its process."""

    def __init__(self, options: Options = Options()) -> None:
        self.model = Transformer()

    def tokens(self) -> dict[str, list[int]]:
        """Returns the tokens of all prompts by name, which takes seconds."""
        caches: dict[str, Cache] = {name: [] for name in PROMPTS}
        first = {name: self.model.forward(tokenize(text), caches[name]) for name, text in PROMPTS.items()}
        return {name: self.model.generate(first[name], caches[name], NUM_NEW_TOKENS) for name in PROMPTS}
