# SPDX-License-Identifier: Apache-2.0
"""A pull brings exactly the bytes of its ticket to exactly the rows asked for, whatever the two layouts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from transports.pools import (
    OWN_GPU,
    USUAL,
    Memory,
    PoolSpec,
    Source,
    expected,
    poison,
    random_contents,
    same,
    snapshot,
)
from transports.processes import RemoteWorker

from kvlink import Worker
from kvlink.errors import TransportUnavailable
from kvlink.layout import Order, Regions

few_examples = settings(
    max_examples=12,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

_ONE_REGION_ORDERS = [order.name for order in Order]
_SPLIT_ORDERS = {
    Regions.ONE: _ONE_REGION_ORDERS,
    Regions.PER_LAYER: [order.name for order in Order if order.value.startswith("L")],
    Regions.PER_PLANE: ["NHD", "HND"],
}


@st.composite
def placements(draw: st.DrawFn, **fixed: Any) -> PoolSpec:
    """Somewhere to put a given geometry."""
    regions = draw(st.sampled_from(list(Regions)))
    return PoolSpec(
        block_tokens=draw(st.sampled_from([1, 3, 4, 8, 16])),
        order=draw(st.sampled_from(_SPLIT_ORDERS[regions])),
        regions=regions.name,
        **fixed,
    )


@st.composite
def pulls(draw: st.DrawFn) -> dict[str, Any]:
    mla = draw(st.booleans())
    geometry = {
        "num_layers": draw(st.integers(1, 4)),
        "total_heads": 1 if mla else draw(st.sampled_from([1, 2, 4])),
        "planes_per_layer": 1 if mla else 2,
        "row_bytes": draw(st.sampled_from([1, 6, 64, 200, 1024])),
    }
    num_tokens = draw(st.integers(1, 120))
    memory = st.sampled_from([memory.value for memory in Memory] if USUAL != OWN_GPU else [OWN_GPU])
    owner = draw(placements(num_blocks=150, memory=draw(memory), **geometry))
    reader = draw(placements(num_blocks=150, memory=draw(memory), **geometry))
    begin = draw(st.integers(0, num_tokens - 1))
    first_layer = draw(st.integers(0, owner.num_layers - 1))
    return {
        "owner": owner,
        "reader": reader,
        "num_tokens": num_tokens,
        "tokens": (begin, draw(st.integers(begin + 1, num_tokens))),
        "layers": (first_layer, draw(st.integers(first_layer + 1, owner.num_layers))),
        "owner_blocks": draw(st.permutations(range(150)))[: -(-num_tokens // owner.block_tokens)],
        "reader_blocks": draw(st.permutations(range(150)))[: -(-num_tokens // reader.block_tokens)],
        "seed": draw(st.integers(0, 1 << 30)),
    }


def pull_and_compare(owner: RemoteWorker, reader: Worker, case: dict[str, Any]) -> None:
    owner.do("fill", seed=case["seed"])
    before = poison(reader.pool, case["seed"])
    ticket = owner.offer(case["owner_blocks"], num_tokens=case["num_tokens"])
    pull = reader.pull(
        ticket, case["reader_blocks"], tokens=case["tokens"], layers=case["layers"], timeout_s=20
    )
    assert pull.wait(30)
    layout = owner.pool.layout()
    source = Source(layout, random_contents(layout, case["seed"]), case["owner_blocks"])
    after = expected(
        before,
        reader.pool.layout,
        case["reader_blocks"],
        [source],
        range(*case["tokens"]),
        range(*case["layers"]),
    )
    assert same(snapshot(reader.pool), after)
    assert owner.fate_of(ticket.request_id) == "settled"


@few_examples
@given(case=pulls())
@pytest.mark.parametrize("fault", ["", "delay=300us@every:2"])
def test_random_pulls(
    transport: str,
    fault: str,
    new_owner: Callable[..., RemoteWorker],
    new_reader: Callable[..., Worker],
    case: dict[str, Any],
) -> None:
    names = {"transports": f"fault+{transport}" if fault else transport, "fault": fault}
    owner = new_owner(case["owner"], transports=transport)
    reader = new_reader(case["reader"], **names)
    try:
        if transport == "shm" and case["owner"].memory != "kvlink":
            with pytest.raises(TransportUnavailable, match="not allocated by kvlink"):
                pull_and_compare(owner, reader, case)
        else:
            pull_and_compare(owner, reader, case)
    finally:
        owner.close()
        reader.close()


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 1000])
def test_sizes_from_one_token_to_many_blocks(
    transport: str,
    num_tokens: int,
    new_owner: Callable[..., RemoteWorker],
    new_reader: Callable[..., Worker],
) -> None:
    spec = PoolSpec(num_blocks=64, num_layers=8, total_heads=4, row_bytes=128)
    owner, reader = new_owner(spec, transports=transport), new_reader(spec, transports=transport)
    blocks = range(-(-num_tokens // 16))
    case = {
        "num_tokens": num_tokens,
        "tokens": (0, num_tokens),
        "layers": (0, 8),
        "owner_blocks": [63 - block for block in blocks],
        "reader_blocks": [(7 * block + 5) % 64 for block in blocks],
        "seed": num_tokens,
    }
    for _ in range(3):
        pull_and_compare(owner, reader, case)


@pytest.mark.parametrize("memory", ["numpy", "torch", "dlpack"])
def test_shm_says_why_it_cannot_export_foreign_memory_and_another_path_is_taken(
    distant: str,
    memory: str,
    new_owner: Callable[..., RemoteWorker],
    new_reader: Callable[..., Worker],
) -> None:
    if distant in ("shm", "cuda"):
        pytest.skip("another path from host memory is under test")
    owner = new_owner(PoolSpec(memory=memory), transports=f"shm,{distant}")
    reader = new_reader(PoolSpec(), transports=f"shm,{distant}")
    owner.do("fill", seed=1)
    pull = reader.pull(owner.offer([3, 4]), [5, 6])
    assert pull.wait(20)
    (path,) = pull.explain()
    assert path.transport == distant
    assert [refusal.transport for refusal in path.refused] == ["shm"]
    assert "the pool was not allocated by kvlink" in path.refused[0].reason
    assert f"over {distant}" in str(path)
    assert "not shm" in str(path)
