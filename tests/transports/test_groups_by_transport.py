# SPDX-License-Identifier: Apache-2.0
"""Pulls attention and states in one transfer over each transport."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
from transports.mixed_pools import MixedSpec, whole, whole_model, write

from kvlink import Worker, WorkerConfig

_TOKENS = 11
_THEIRS, _OURS = [[3, 9, 4], [7], [7]], [[8, 2, 20], [5], [5]]


def test_every_transport_reads_every_group(transport: str) -> None:
    if transport == "cuda":
        pytest.skip("the groups are in host memory")
    spec, config = MixedSpec(), WorkerConfig(transports=transport, lease_slots=16)
    model = whole_model(spec, _TOKENS, 3)
    with ExitStack() as opened:
        owner, reader = (
            opened.enter_context(Worker(spec.make(), name, config=config)) for name in ("p", "d")
        )
        layouts, regions = spec.layouts(), range(len(owner.pool.regions))
        ranges = whole(layouts, _TOKENS)
        write([owner.pool.numpy(region) for region in regions], layouts, _THEIRS, model, ranges)
        wanted = [reader.pool.numpy(region).copy() for region in regions]
        write(wanted, layouts, _OURS, model, ranges)
        reader.pull(owner.offer("r", _THEIRS, num_tokens=_TOKENS), _OURS).wait(20)
        assert all(np.array_equal(reader.pool.numpy(region), wanted[region]) for region in regions)
