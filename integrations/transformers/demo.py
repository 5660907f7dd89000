# SPDX-License-Identifier: Apache-2.0
"""Implements the roles of `kvlink demo --engine transformers`: continuous batching that prefills, decodes, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, __version__
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from kvlink.demo.processes import Reply
from kvlink.demo.servers import (
    BLOCK_TOKENS,
    NUM_BLOCKS,
    NUM_NEW_TOKENS,
    POISON,
    PROMPTS,
    Options,
    digest,
    tokenize,
    until_none,
)
from kvlink.errors import ConfigError, TransferError

from .handoff import KVLinkHandoff
from .handoff_message import Handoff

VOCABULARY = 256
_SEED = 2024
# With the usual 0.02, a random Llama repeats its last token and ignores its cache. From 0.1 on, the output varies.
_WEIGHT_STD = 0.2


def tiny_llama(device: str = "cpu") -> Any:
    """Returns a Llama with four layers and four KV heads of 64 dimensions, in float32. Limits torch to one thread.

    Raises ConfigError for a GPU that torch does not see.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"torch sees no GPU for {device}; run on a machine with a GPU, and install a CUDA build of torch"
        )
    torch.set_num_threads(1)  # makes sums bit-equal in every process
    torch.manual_seed(_SEED)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        initializer_range=_WEIGHT_STD,
        bos_token_id=None,
        eos_token_id=None,
    )
    network: Any = LlamaForCausalLM(config)
    network.train(False)
    return network.to(device)


_BATCH_TOKENS = 256
_RESULT_S = 50.0


class _Engine:
    """A continuous batching manager on its own model. The role starts it once it is ready for requests."""

    def __init__(self, options: Options) -> None:
        self.within_s = _RESULT_S * options.patience
        config = ContinuousBatchingConfig(
            page_size=BLOCK_TOKENS, num_blocks=NUM_BLOCKS, max_batch_tokens=_BATCH_TOKENS
        )
        greedy = GenerationConfig(do_sample=False, max_new_tokens=NUM_NEW_TOKENS, eos_token_id=-1)
        self.manager: Any = tiny_llama(options.device).init_continuous_batching(greedy, config)

    def tokens_of(self, request_id: str) -> list[int]:
        """Returns the tokens of the only active request once it has finished. Raises TransferError."""
        output = self.manager.get_result(request_id, timeout=self.within_s)
        if output is None or output.error:
            raise TransferError(f"request {request_id} has no tokens: {output and output.error}")
        return [int(token) for token in output.generated_tokens]

    def close(self) -> None:
        """Stops the manager."""
        if self.manager.is_running():
            self.manager.stop()


class _Peer(_Engine):
    """An engine that hands off requests over one transport."""

    name: str

    def __init__(self, transport: str, coordinator: str, options: Options) -> None:
        super().__init__(options)
        self.handoff = KVLinkHandoff(
            self.manager,
            f"{self.name}-{transport}",
            coordinator=coordinator,
            transports=transport,
            config=options.worker_config(),
        )
        self.manager.start()

    def digest(self, block_ids: Sequence[int], num_tokens: int) -> str:
        """Returns the digest of a request's rows in `block_ids`."""
        pool, planes = self.handoff.worker.pool, 2 * self.manager.model.config.num_hidden_layers
        seen = pool.numpy() if pool.gpu is None else pool.torch().cpu().numpy()
        blocks = seen.reshape(pool.layout.num_blocks, planes, BLOCK_TOKENS, -1)
        return digest(
            blocks[block, :, : num_tokens - index * BLOCK_TOKENS] for index, block in enumerate(block_ids)
        )

    def close(self) -> None:
        """Withdraws from transfers, then stops the manager."""
        self.handoff.close()
        super().close()


class Prefill(_Peer):
    """The prefill worker of one transport."""

    name = "prefill"

    def prefill(self, request_id: str, prompt: str) -> Reply:
        """Returns what the router carries to decode, and a digest of the prompt's blocks."""
        handoff = self.handoff.prefill(tokenize(prompt), request_id).result(self.within_s)
        blocks = handoff.open_ticket().block_ids
        return {"handoff": handoff.to_json(), "digest": self.digest(blocks, len(handoff.prompt))}

    def ended(self, timeout_s: float) -> Reply:
        """Waits for all offers to end, and counts those that did not end as expected."""
        return until_none(self._left, timeout_s)

    def _left(self) -> Reply:
        stats = self.handoff.stats()
        return {"unsettled": stats.offered - stats.settled, "held": stats.held_tables}


class Decode(_Peer):
    """The decode worker of one transport."""

    name = "decode"

    def decode(self, handoff: str, num_tokens: int) -> Reply:
        """Pulls and generates. "us" is the time of the pull alone, in microseconds from its start to settled blocks.

        Raises the error of the pull, although the tokens would still be right: the prompt is computed here then.
        """
        self._poison()
        received = Handoff.from_json(handoff)
        tokens = self.tokens_of(self.handoff.submit(received, max_new_tokens=num_tokens))
        landed = self.handoff.newest()
        if landed is None or landed.pull is None or landed.error is not None:
            raise (landed and landed.error) or TransferError("nothing was pulled")
        stats, paths = landed.pull.stats, landed.pull.explain()
        return {
            "engine": f"continuous batching of transformers {__version__}",
            "tokens": tokens,
            "digest": self.digest(landed.block_ids, len(received.prompt)),
            "us": stats.total_us,
            "bytes": stats.num_bytes,
            "path": ", ".join(path.transport for path in paths),
            "explanation": "; ".join(map(str, paths)),
        }

    def _poison(self) -> None:
        """Overwrites the cache, so that every byte must be transferred again."""
        cache = self.manager.batch_processor.cache
        with self.manager.pause():
            cache.evict_cached_blocks()
            trash = 2 * cache.bytes_per_sector
            cache.cache_tensor[trash:].view(torch.float32).fill_(POISON)


class Reference(_Engine):
    """The reference: no worker, no handoff, and a cache that never leaves its process."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self.manager.start()

    def tokens(self) -> dict[str, list[int]]:
        """Returns the tokens of all prompts, which takes seconds."""
        return {
            name: self.tokens_of(self.manager.add_request(tokenize(text), name))
            for name, text in PROMPTS.items()
        }
