# SPDX-License-Identifier: Apache-2.0
"""Makes pools on a GPU with known contents, filled by torch."""

from __future__ import annotations

from typing import Any

from kvlink import BlockPool, KVLayout
from kvlink.errors import ConfigError

from .contents import Contents


def filled(layout: KVLayout, gpu: int, seed: int) -> BlockPool:
    """Returns a pool on a GPU with the bytes of Contents for `seed`. Raises ConfigError without torch."""
    torch = torch_with_gpu()
    on_host = BlockPool.allocate(layout)
    Contents(layout, seed).fill(on_host)
    pool = BlockPool.allocate(layout, gpu=gpu)
    for region in range(len(pool.regions)):
        pool.torch(region).copy_(on_host.torch(region))
    torch.cuda.synchronize(gpu)
    return pool


def torch_with_gpu() -> Any:
    """Returns the torch module. Raises ConfigError without torch or without a GPU."""
    try:
        import torch
    except ImportError:
        raise ConfigError("bench gpu compares on the GPU with torch; run pip install torch") from None
    if not torch.cuda.is_available():
        raise ConfigError(
            "torch sees no GPU here; run on a machine with a GPU, and install a CUDA build of torch"
        )
    return torch
