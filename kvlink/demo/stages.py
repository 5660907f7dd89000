# SPDX-License-Identifier: Apache-2.0
"""Implements the roles of `kvlink demo --pp`: servers whose layers are split over stages, with a worker for each stage.

One process computes all stages of a server, and every stage has a pool with its own layers. Prefill offers a request at
each of its workers, and each worker of decode pulls the layers of its stage from the stages that have them.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from transformers import DynamicCache, __version__

from kvlink.config import WorkerConfig
from kvlink.demo.messages import Reply, until_none
from kvlink.demo.model import tiny_llama
from kvlink.demo.text import tokenize
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, Pipeline, Share, dense, num_seats
from kvlink.transfer.pool import BlockPool
from kvlink.worker import Worker

_BLOCK_TOKENS, _NUM_BLOCKS = 16, 256
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
        stages: Sequence[int],
        patience: float = 1.0,
        device: str = "cpu",
    ) -> None:
        """`stages` are the numbers of stages of prefill and of decode."""
        if device != "cpu":
            raise ConfigError(f"the demo runs stages on the CPU only, not on {device}; omit --pp or --device")
        self.network = tiny_llama()
        self.shape = self.network.config
        self.stages, self.patience = tuple(stages), patience
        config = replace(WorkerConfig.from_env(), lease_s=_LEASE_S * patience, timeout_s=_PULL_S * patience)
        size = self.stages[self.name == "decode"]
        with ExitStack() as opened:
            self.workers = [
                opened.enter_context(
                    Worker(
                        BlockPool.allocate(dense(self._geometry(stage, size))),
                        f"{self.name}-{transport}-stage-{stage}",
                        coordinator=coordinator,
                        transports=transport,
                        config=config,
                    )
                )
                for stage in range(size)
            ]
            self._opened = opened.pop_all()

    def _geometry(self, stage: int, size: int) -> Geometry:
        layers = int(self.shape.num_hidden_layers)
        return Geometry(
            num_layers=layers,
            total_heads=int(self.shape.num_key_value_heads),
            row_bytes=4 * int(self.shape.head_dim),
            num_blocks=_NUM_BLOCKS,
            block_tokens=_BLOCK_TOKENS,
            dtype="float32",
            pipeline=Pipeline.even(stage, size, layers),
        )

    def layers(self) -> list[torch.Tensor]:
        """Returns the blocks of each layer of the model, [2, blocks, tokens, heads, head_dim], without a copy."""
        found: list[torch.Tensor] = []
        for worker in self.workers:
            first, end = worker.pool.layout.layers
            shape = (
                end - first,
                2,
                _NUM_BLOCKS,
                _BLOCK_TOKENS,
                self.shape.num_key_value_heads,
                self.shape.head_dim,
            )
            found.extend(worker.pool.torch().view(torch.float32).view(shape))
        return found

    def digest(self, blocks: Sequence[int], num_tokens: int) -> str:
        """Returns a digest that is equal on both sides exactly if every token's bytes are, whatever the block ids."""
        found = hashlib.blake2b(digest_size=16)
        for layer in self.layers():
            found.update(layer[:, list(blocks)].flatten(1, 2)[:, :num_tokens].contiguous().numpy().data)
        return found.hexdigest()

    def close(self) -> None:
        """Implements Role."""
        self._opened.close()


class PrefillStages(_Server):
    """The prefill server of one transport."""

    name = "prefill"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._free = list(range(_NUM_BLOCKS))
        self._held: dict[str, list[int]] = {}
        self._ended: Counter[str] = Counter()
        self._num_offered = 0

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Implements Role."""
        return {"prefill": self.prefill, "ended": self.ended}

    def prefill(self, request_id: str, prompt: str) -> Reply:
        """Returns what the router carries to decode, and a digest of the prompt's blocks."""
        tokens = tokenize(prompt)
        with torch.inference_mode():
            answer = self.network(torch.tensor([tokens]), use_cache=True)
        blocks = self._allocate(-(-len(tokens) // _BLOCK_TOKENS))
        for computed, layer in zip(answer.past_key_values.layers, self.layers(), strict=True):
            for which, rows in enumerate((computed.keys, computed.values)):
                by_token = rows[0].transpose(0, 1)
                for index, block in enumerate(blocks):
                    part = by_token[index * _BLOCK_TOKENS : (index + 1) * _BLOCK_TOKENS]
                    layer[which, block, : len(part)] = part
        self._held[request_id] = blocks
        heads = int(self.shape.num_key_value_heads)
        reader = Share(heads, pipeline=Pipeline.even(0, self.stages[1], len(self.layers())))
        tickets = [
            worker.offer(
                request_id, blocks, num_tokens=len(tokens), readers=num_seats(worker.pool.layout, reader)
            ).to_text()
            for worker in self.workers
        ]
        self._num_offered += 1
        handoff = {"tickets": tickets, "prompt": tokens, "token": int(answer.logits[0, -1].argmax())}
        return {"handoff": json.dumps(handoff), "digest": self.digest(blocks, len(tokens))}

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


class DecodeStages(_Server):
    """The decode server of one transport."""

    name = "decode"

    def commands(self) -> Mapping[str, Callable[..., Reply]]:
        """Implements Role."""
        return {"decode": self.decode}

    def decode(self, handoff: str, num_tokens: int) -> Reply:
        """Pulls at every stage and generates. "us" is the time of the slowest pull, until its blocks are settled."""
        received = json.loads(handoff)
        prompt = received["prompt"]
        blocks = list(range(-(-len(prompt) // _BLOCK_TOKENS)))
        for layer in self.layers():
            layer.fill_(_POISON)
        pulls = [worker.pull(received["tickets"], blocks) for worker in self.workers]
        for pull in pulls:
            pull.wait()
        tokens = self._generate(blocks, prompt, received["token"], num_tokens)
        paths = [path for pull in pulls for path in pull.explain()]
        return {
            "engine": f"transformers {__version__} in {self.stages[0]} and {self.stages[1]} stage(s)",
            "tokens": tokens,
            "digest": self.digest(blocks, len(prompt)),
            "us": max(pull.stats.total_us for pull in pulls),
            "bytes": sum(pull.stats.num_bytes for pull in pulls),
            "path": ", ".join(sorted({path.transport for path in paths})),
            "explanation": "; ".join(map(str, paths)),
        }

    def _generate(self, blocks: list[int], prompt: list[int], token: int, num_tokens: int) -> list[int]:
        cache = DynamicCache(config=self.shape)
        for index, layer in enumerate(self.layers()):
            keys, values = layer[:, blocks].flatten(1, 2)[:, : len(prompt)].transpose(1, 2).unsqueeze(1)
            cache.update(keys.contiguous(), values.contiguous(), index)
        tokens = [token]
        with torch.inference_mode():
            while len(tokens) < num_tokens:
                answer = self.network(torch.tensor([[tokens[-1]]]), past_key_values=cache, use_cache=True)
                tokens.append(int(answer.logits[0, -1].argmax()))
        return tokens
