# SPDX-License-Identifier: Apache-2.0
"""Pulls an existing cache of torch tensors into a cache with another layout. Run: python torch_cache.py"""

from __future__ import annotations

import torch

import kvlink

LAYERS, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 4, 32, 16, 2, 64


def main() -> None:
    """The owner has FlashAttention's shape, the reader FlashInfer's HND."""
    torch.manual_seed(0)
    flash = [
        torch.randn(2, BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    infer = [
        torch.zeros(BLOCKS, 2, HEADS, BLOCK_TOKENS, HEAD_SIZE, dtype=torch.bfloat16) for _ in range(LAYERS)
    ]
    owned = kvlink.BlockPool.from_tensors(flash, axes="flash-attention", model="demo")
    own = kvlink.BlockPool.from_tensors(infer, axes="flashinfer-hnd", model="demo")

    with kvlink.Worker(owned, "prefill-0") as owner, kvlink.Worker(own, "decode-0") as reader:
        ticket = owner.offer("request-42", torch.tensor([5, 9]), num_tokens=2 * BLOCK_TOKENS)
        pull = reader.pull(ticket, into=torch.tensor([0, 1]))
        pull.wait()
        print(pull.explain()[0])

    for theirs, ours in zip(flash, infer, strict=True):
        # [2, blocks, tokens, heads, row] -> [blocks, 2, heads, tokens, row]
        assert torch.equal(theirs[:, [5, 9]].permute(1, 0, 3, 2, 4), ours[[0, 1]])
    print("all rows are equal, converted from NHD to HND on the way")


if __name__ == "__main__":
    main()
