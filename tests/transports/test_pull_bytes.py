# SPDX-License-Identifier: Apache-2.0
"""Every byte of a pull arrives, at once or streamed, or the pull ends with an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from transports.pairs import POISON, Pair
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
    wide,
)
from transports.processes import PATIENCE, RemoteWorker, eventually

from kvlink import Worker
from kvlink.errors import (
    AccessDenied,
    Cancelled,
    PeerUnreachable,
    StaleBlocks,
    TransferError,
    TransferTimeout,
    TransportUnavailable,
    UnknownRequest,
)
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


NewOwner = Callable[..., RemoteWorker]
NewReader = Callable[..., Worker]

MODEL = {"num_layers": 6, "total_heads": 2, "row_bytes": 64, "num_blocks": 32}
OWNER = PoolSpec(block_tokens=16, order="HND", **MODEL)
READER = PoolSpec(block_tokens=8, order="PAIRED_NHD", **MODEL)
OWNER_BLOCKS = [5, 30, 2, 17, 11, 8, 23, 1]
READER_BLOCKS = list(range(31, 15, -1))
UNITS = {"BLOCKS": len(OWNER_BLOCKS), "LAYERS": 6}
NUM_TOKENS = 123  # the last block is partial


def check(reader: Worker, before: list, seed: int, tokens: range, layers: range) -> None:
    source = Source(OWNER.layout(), random_contents(OWNER.layout(), seed), OWNER_BLOCKS)
    after = expected(before, reader.pool.layout, READER_BLOCKS, [source], tokens, layers)
    assert same(snapshot(reader.pool), after)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("tokens", "layers"), [((0, NUM_TOKENS), (0, 6)), ((37, 101), (1, 5))], ids=["whole", "part"]
)
def test_the_owner_writes_while_the_reader_pulls(
    transport: str,
    unit: str,
    tokens: tuple[int, int],
    layers: tuple[int, int],
    new_owner: NewOwner,
    new_reader: NewReader,
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    for seed in range(8):
        owner.do("fill", seed=1000 + seed)  # what was there before must not be taken for it
        before = poison(reader.pool, seed)
        ticket = owner.offer(OWNER_BLOCKS, num_tokens=NUM_TOKENS, ready=0, ready_unit=unit)
        pull = reader.pull(ticket, READER_BLOCKS, tokens=tokens, layers=layers)
        owner.do(
            "stream",
            request_id=ticket.request_id,
            blocks=OWNER_BLOCKS,
            seed=seed,
            unit=unit,
            most_ms=seed % 4,  # 0: all at once
        )
        assert pull.wait(20)
        check(reader, before, seed, range(*tokens), range(*layers))
        assert owner.fate_of(ticket.request_id) == "settled"


@pytest.mark.parametrize("unit", UNITS)
def test_what_is_ready_comes_and_nothing_else(
    transport: str, unit: str, new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    owner.do("fill", seed=3)
    before = poison(reader.pool, 3)
    ticket = owner.offer(OWNER_BLOCKS, num_tokens=NUM_TOKENS, ready=1, ready_unit=unit)
    pull = reader.pull(ticket, READER_BLOCKS)

    def ready(count: int) -> tuple[range, range]:
        return (
            (range(min(16 * count, NUM_TOKENS)), range(6))
            if unit == "BLOCKS"
            else (range(NUM_TOKENS), range(count))
        )

    source = Source(OWNER.layout(), random_contents(OWNER.layout(), 3), OWNER_BLOCKS)
    for count in (1, 2, 5):
        owner.do("set_ready", request_id=ticket.request_id, ready=count)
        after = expected(before, reader.pool.layout, READER_BLOCKS, [source], *ready(count))
        eventually(lambda after=after: same(snapshot(reader.pool), after))
        assert not pull.wait(0.01)
        assert same(snapshot(reader.pool), after)
    owner.do("set_ready", request_id=ticket.request_id, ready=2)  # never goes back
    owner.do("set_ready", request_id=ticket.request_id, ready=UNITS[unit])
    assert pull.wait(20)
    check(reader, before, 3, range(NUM_TOKENS), range(6))


def test_an_offer_aborted_in_the_middle_is_stale(
    transport: str, new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    ticket = owner.offer(OWNER_BLOCKS, ready=3)
    pull = reader.pull(ticket, READER_BLOCKS)
    assert not pull.wait(0.02)
    owner.do("abort", request_id=ticket.request_id)
    with pytest.raises(StaleBlocks):
        pull.wait(20)
    assert owner.fate_of(ticket.request_id) == "aborted"
    with pytest.raises(UnknownRequest):
        owner.do("set_ready", request_id=ticket.request_id, ready=4)


def test_an_owner_that_never_finishes_runs_into_the_deadline(
    transport: str, new_owner: NewOwner, new_reader: NewReader
) -> None:
    owner, reader = new_owner(OWNER, transports=transport), new_reader(READER, transports=transport)
    ticket = owner.offer(OWNER_BLOCKS, ready=3)
    with pytest.raises(TransferTimeout):
        reader.pull(ticket, READER_BLOCKS, timeout_s=0.2).wait(20)
    owner.do("set_ready", request_id=ticket.request_id, ready=8)
    assert reader.pull(ticket, READER_BLOCKS).wait(20)


class SlowKernels:
    """As a torch.cuda.Event: not passed until it is told so."""

    def __init__(self) -> None:
        self.passed = threading.Event()
        self.lost = False

    def query(self) -> bool:
        if self.lost:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return self.passed.is_set()


def test_readers_wait_for_the_kernels_that_write_the_blocks(transport: str, new_reader: NewReader) -> None:
    exporter, taker = (new_reader(wide(8), transports=transport) for _ in range(2))
    kernels = SlowKernels()
    pull = taker.pull(exporter.offer("r", [1, 2], after=kernels), [3, 4], timeout_s=20)
    time.sleep(0.05)
    assert not pull.done()
    exporter.pool.numpy()[:] = 9  # later than the offer
    kernels.passed.set()
    pull.wait()
    assert (taker.pool.numpy().reshape(8, -1)[3:5] == 9).all()
    assert exporter.offer("again", [1, 2], after=kernels).ready == 2


def test_blocks_of_a_lost_device_are_never_used(transport: str, new_reader: NewReader) -> None:
    exporter, taker = (new_reader(wide(8), transports=transport) for _ in range(2))
    kernels = SlowKernels()
    pull = taker.pull(exporter.offer("r", [1, 2], after=kernels), [3, 4], timeout_s=20)
    kernels.lost = True
    with pytest.raises(StaleBlocks):
        pull.wait()


NewPair = Callable[..., Pair]

# With one lane, post 1 of all and of slots reads the lease table's header while connecting; then come data and slot. A
# pull whose connection is cut begins again: it fails when that happens twice.
FAULTS = {
    "drop-data@1": TransferTimeout,
    "drop-slot@2": TransferTimeout,
    "hang-data@1": TransferTimeout,
    "hang-slot@2": TransferTimeout,
    "fail-data@1..2": PeerUnreachable,
    "fail-slot@2..3": PeerUnreachable,
    "break-data@1..2": PeerUnreachable,
    "break-slot@2;break-slot@4": PeerUnreachable,
    "deny-data@1": AccessDenied,
    "deny-slot@2": AccessDenied,
    "corrupt-slot@2": StaleBlocks,
}


@pytest.mark.parametrize("num_blocks", [1, 40], ids=["inline", "queued"])
@pytest.mark.parametrize("fault", FAULTS)
def test_one_fault_fails_one_pull(transport: str, fault: str, num_blocks: int, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault=fault)
    ticket = pair.offer(range(num_blocks))
    pair.reader.connect(ticket, timeout_s=20 * PATIENCE)
    timeout_s = 2 if FAULTS[fault] is TransferTimeout else 20 * PATIENCE
    pull = pair.start(ticket, range(num_blocks), timeout_s=timeout_s)
    with pytest.raises(FAULTS[fault]) as failed:
        pull.wait(20 * PATIENCE)
    assert failed.type is FAULTS[fault]
    assert ticket.request_id in str(failed.value)
    assert f"{transport}" in str(failed.value)
    assert 0 <= pull.stats.total_us < 20e6 * PATIENCE
    pair.pull(ticket, range(num_blocks), timeout_s=20)  # the very same lease is still good
    assert pair.owner.fate_of(ticket.request_id) == "settled"


def test_the_lane_of_a_small_pull_breaks_and_another_takes_over(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="break-slot@3", lanes=2)  # each lane has read one while connecting
    pull = pair.pull(pair.offer([3]), [4], timeout_s=20)
    assert pull.explain()[0].lanes == 2
    pair.works()


@pytest.mark.parametrize("fault", ["delay=5ms@every:1", "delay-data=20ms@1..3", "delay-slot=20ms@every:2"])
def test_delays_change_no_byte(transport: str, fault: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault=fault, num_blocks=300)
    for num_blocks in (1, 7, 290):
        pair.pull(pair.offer(range(num_blocks)), range(num_blocks - 1, -1, -1))


def test_a_corrupted_read_is_found_by_comparing(transport: str, new_pair: NewPair) -> None:
    """Leases vouch for the time of a read, not for the wire: this shows that the suite's comparison can fail."""
    pair = new_pair(transport, fault="corrupt-data@1")
    if transport == "cuda":
        with pytest.raises(TransportUnavailable, match="it would corrupt GPU memory, which no CPU reaches"):
            pair.works()
        return
    assert pair.start(pair.offer([4, 5]), [1, 2]).wait(20)
    there, here = pair.contents[[4, 5]], pair.blocks()[[1, 2]]
    assert (there != here).sum() == 1
    pair.works()


def test_a_connection_that_fails_while_being_made_is_tried_again(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="fail@1..2")
    pair.works()


def test_connecting_in_vain_says_why_and_heals(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="fail@1..3")
    ticket = pair.offer([3])
    with pytest.raises(PeerUnreachable, match="injected fault"):
        pair.start(ticket, [4]).wait(20)
    assert (pair.blocks()[4] == POISON).all()
    pair.pull(ticket, [4])


def test_many_pulls_through_a_bad_connection(transport: str, new_pair: NewPair) -> None:
    plan = "fail@every:11;delay=1ms@every:3;corrupt-slot@every:7;break@every:37;drop@every:41"
    pair = new_pair(transport, fault=plan)
    good = bad = 0
    for index in range(120):
        blocks = range(index % 5, index % 5 + 9)
        ticket = pair.offer(blocks)
        try:
            pair.pull(ticket, blocks, timeout_s=0.1)
            good += 1
        except TransferError as error:
            assert not isinstance(error, Cancelled)
            bad += 1
            pair.owner.do("abort", request_id=ticket.request_id)
    assert good > 30
    assert bad > 10


def test_a_short_deadline_spoils_no_other_pull(transport: str, new_pair: NewPair) -> None:
    pair = new_pair(transport, fault="delay-data=60ms@2..9")
    pair.works()
    patient = pair.start(pair.offer(range(20)), range(20))
    hasty = pair.start(pair.offer(range(20, 40)), range(20, 40), timeout_s=0.02)
    with pytest.raises(TransferTimeout):
        hasty.wait(20)
    assert patient.wait(20)
    assert pair.holds(range(20), range(20))
