# SPDX-License-Identifier: Apache-2.0
"""Pools on GPUs: read directly, or by way of bounce buffers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from transports.gpus import ON_HOST, SUITES_BETWEEN_GPUS, Holdable, Open, run_suite
from transports.pools import ON_GPU, OWN_GPU, PoolSpec, wide
from transports.processes import eventually

from kvlink import _core
from kvlink.errors import PeerUnreachable, StaleBlocks, TransportUnavailable


def test_every_byte_arrives_without_a_stop_on_the_host(opened: Open) -> None:
    spec = wide(512)
    exporter, taker = opened(spec, OWN_GPU, OWN_GPU)
    for blocks in ([5], list(range(0, 512, 3)), list(range(512))):
        into = [511 - block for block in blocks]
        ticket = exporter.offer(blocks)
        path = taker.do("pull", ticket=ticket.to_text(), into=into, timeout_s=60)
        assert (path["transport"], path["bounces_at"]) == ("cuda", [])
        assert path["bytes"] == len(blocks) << 14
        assert taker.do("differing", into=into, seed=3, blocks=blocks) == 0
        assert exporter.fate_of(ticket.request_id) == "settled"


_TWO_WORKERS = """
import ctypes
from kvlink import BlockPool, Geometry, Worker, WorkerConfig, dense

layout = dense(Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=16, model="m"))
for transport in ("cuda", "tcp"):
    config = WorkerConfig.from_env({"KVLINK_TRANSPORTS": transport})
    pools = BlockPool.allocate(layout, gpu=0), BlockPool.allocate(layout, gpu=0)
    with Worker(pools[0], "owner", config=config) as owner, Worker(pools[1], "reader", config=config) as reader:
        pull = reader.pull(owner.offer("request", range(16)), range(16), timeout_s=60)
        pull.wait()
        assert pull.explain()[0].transport == transport
print(ctypes.CDLL("libcuda.so.1").fake_cuda_modules())
"""


def test_each_worker_loads_the_shipped_kernel_once(cuda_driver: str) -> None:
    """One reads in place and one by way of its bounce buffer; neither needs cuda-python."""
    command = [sys.executable, "-c", _TWO_WORKERS]
    env = {**os.environ, "LD_LIBRARY_PATH": cuda_driver}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.split()) == (0, ["4"]), done.stderr
    assert "without kvlink's kernel" not in done.stderr


@pytest.mark.parametrize("order", ["NHD", "HND"])
def test_scattered_heads_and_layers_find_their_places(opened: Open, order: str) -> None:
    spec = PoolSpec(num_blocks=48, regions="PER_LAYER", order=order)
    exporter, taker = opened(spec, OWN_GPU, OWN_GPU, transports="cuda")
    blocks, into = list(range(0, 48, 2)), list(range(47, 0, -2))
    taker.do("pull", ticket=exporter.offer(blocks).to_text(), into=into, timeout_s=60)
    assert taker.do("differing", into=into, seed=3, blocks=blocks) == 0


def test_a_pool_that_cannot_be_exported_is_still_read_into(opened: Open) -> None:
    """The stand-in has addresses that numpy allocated, and its driver knows nothing of them."""
    exporter, taker = opened(wide(64), OWN_GPU, ON_GPU)
    path = taker.do("pull", ticket=exporter.offer([1, 2]).to_text(), into=[3, 4], timeout_s=60)
    assert path["transport"] == "cuda"
    assert taker.do("differing", into=[3, 4], seed=3, blocks=[1, 2]) == 0


@pytest.mark.parametrize(
    ("owner", "why"), [(ON_GPU, "cannot export this memory"), (ON_HOST, "does not offer it")]
)
def test_where_it_cannot_be_taken_it_is_refused_by_name(opened: Open, owner: str, why: str) -> None:
    exporter, taker = opened(wide(8), owner, OWN_GPU, transports="cuda,tcp")
    path = taker.do("pull", ticket=exporter.offer([1]).to_text(), into=[2], timeout_s=60)
    assert path["transport"] == "tcp"
    assert why in path["refused"]["cuda"]


def test_blocks_that_were_released_are_never_used(opened: Open) -> None:
    exporter, taker = opened(wide(64), OWN_GPU, OWN_GPU, transports="cuda")
    ticket = exporter.offer([1, 2])
    exporter.do("abort", request_id=ticket.request_id)
    with pytest.raises(StaleBlocks):
        taker.do("pull", ticket=ticket.to_text(), into=[3, 4], timeout_s=60)


def test_an_owner_killed_in_the_middle_is_an_error(holdable: Holdable) -> None:
    process, victim, taker, held = holdable(wide(64, memory=OWN_GPU), transports="cuda")
    taker.do("pull", ticket=victim.offer([1]).to_text(), into=[2], timeout_s=60)
    ticket = victim.offer(range(64))
    held.touch()
    taker.do("start_pull", ticket=ticket.to_text(), into=list(range(64)), timeout_s=60)
    process.kill()
    eventually(held.read_text)  # what its GPU began has yet to end, but the reader knows
    held.unlink()
    with pytest.raises(PeerUnreachable, match=ticket.request_id):
        taker.do("finish_pull")


@pytest.mark.parametrize(
    "reader",
    [
        PoolSpec(num_blocks=48, order="NHD"),
        PoolSpec(num_blocks=96, order="PAIRED_NHD", block_tokens=8),
        PoolSpec(num_blocks=48, order="NHD", tp_rank=1, tp_size=2),
    ],
    ids=["NHD", "smaller blocks", "half the heads"],
)
def test_other_layouts_come_by_way_of_the_staging_buffer(opened: Open, reader: PoolSpec) -> None:
    owner = PoolSpec(num_blocks=48, order="HND")
    exporter, taker = opened(owner, OWN_GPU, OWN_GPU, reader, transports="cuda", staging="always")
    blocks, into = list(range(0, 48, 2)), list(range(reader.num_blocks - 1, -1, -2))
    path = taker.do(
        "pull", ticket=exporter.offer(blocks, readers=reader.tp_size).to_text(), into=into, timeout_s=60
    )
    assert path["staged"]
    assert all(predicted > 0 for predicted in path["predicted_us"])
    assert taker.do("differing", into=into, seed=3, blocks=blocks, owner=owner.json()) == 0


@pytest.mark.parametrize(("staging", "predicts"), [("auto", False), ("never", False), ("always", True)])
def test_a_staging_buffer_is_there_where_it_may_be_of_use(opened: Open, staging: str, predicts: bool) -> None:
    """Small pieces cost cuda nothing, so there is no buffer unless it is asked for."""
    exporter, taker = opened(wide(64), OWN_GPU, OWN_GPU, transports="cuda", staging=staging)
    path = taker.do("pull", ticket=exporter.offer([1, 2]).to_text(), into=[3, 4], timeout_s=60)
    assert (path["staged"], path["predicted_us"] != [None, None]) == (predicts, predicts)
    assert taker.do("differing", into=[3, 4], seed=3, blocks=[1, 2]) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
@SUITES_BETWEEN_GPUS
def test_the_suite_over_all_transports_passes_between_gpus(
    cuda_driver: str, staging: str, which: str, least: int
) -> None:
    """Streaming, races, faults, deaths, tensor parallelism, in a process that finds the stand-in."""
    run_suite(staging, which, least, 900, LD_LIBRARY_PATH=cuda_driver)


NO_NIC = {name: f"{name}: {why}. {fix}" for name, _, _, why, fix in _core.transports() if why}.get(
    "verbs", ""
)
NEEDS_NIC = pytest.mark.skipif(bool(NO_NIC), reason=NO_NIC)


@pytest.mark.parametrize(
    ("transport", "owner", "reader", "at"),
    [
        ("tcp", ON_GPU, ON_GPU, ["reader", "owner"]),
        ("tcp", ON_HOST, ON_GPU, ["reader"]),
        ("tcp", ON_GPU, ON_HOST, ["owner"]),
        ("tcp", ON_HOST, ON_HOST, []),
        ("shm", ON_HOST, ON_GPU, ["reader"]),
        ("cma", ON_HOST, ON_GPU, ["reader"]),
        ("fault+tcp", ON_HOST, ON_GPU, ["reader"]),
        pytest.param("verbs", ON_HOST, ON_GPU, ["reader"], marks=NEEDS_NIC),
    ],
)
def test_every_byte_arrives_and_explain_says_bounce(
    opened: Open, transport: str, owner: str, reader: str, at: list[str]
) -> None:
    spec = wide(512)
    exporter, taker = opened(spec, owner, reader, transports=f"{transport},tcp")
    for blocks in ([5], list(range(0, 512, 3)), list(range(512))):
        into = [511 - block for block in blocks]
        ticket = exporter.offer(blocks)
        path = taker.do("pull", ticket=ticket.to_text(), into=into, timeout_s=60)
        assert (path["transport"], path["bounces_at"]) == (transport, at)
        assert path["bytes"] == len(blocks) << 14
        assert taker.do("differing", into=into, seed=3, blocks=blocks) == 0
        assert exporter.fate_of(ticket.request_id) == "settled"


def test_scattered_heads_and_layers_find_their_places_by_bounce(opened: Open) -> None:
    spec = PoolSpec(num_blocks=48, regions="PER_LAYER", order="HND")
    exporter, taker = opened(spec, ON_GPU, ON_GPU, transports="tcp")
    ticket = exporter.offer(list(range(0, 48, 2)))
    into = list(range(47, 0, -2))
    taker.do("pull", ticket=ticket.to_text(), into=into, timeout_s=60)
    assert taker.do("differing", into=into, seed=3, blocks=list(range(0, 48, 2))) == 0


def test_transports_that_cannot_send_from_a_gpu_are_refused_by_name(opened: Open) -> None:
    exporter, taker = opened(wide(8), ON_GPU, ON_GPU, transports="shm,cma,tcp")
    ticket = exporter.offer([1])
    path = taker.do("pull", ticket=ticket.to_text(), into=[2], timeout_s=60)
    assert path["transport"] == "tcp"
    assert set(path["refused"]) == {"shm", "cma"}
    assert "allow tcp, which sends from it" in path["refused"]["shm"]


@pytest.mark.parametrize("better", [pytest.param("verbs", marks=NEEDS_NIC)])
def test_nics_that_do_not_reach_the_owners_gpu_are_refused_by_name(opened: Open, better: str) -> None:
    exporter, taker = opened(wide(8), ON_GPU, ON_GPU, transports=f"{better},tcp")
    path = taker.do("pull", ticket=exporter.offer([1]).to_text(), into=[2], timeout_s=60)
    assert path["transport"] == "tcp"
    assert "NICs do not reach this GPU memory" in path["refused"][better]


def test_where_staging_is_not_allowed_it_is_refused_with_the_fix(opened: Open) -> None:
    exporter, taker = opened(wide(8), ON_GPU, ON_GPU, transports="tcp", gpudirect="dma-buf,peermem")
    ticket = exporter.offer([1])
    with pytest.raises(TransportUnavailable, match="bounce is not allowed; add it to KVLINK_GPUDIRECT"):
        taker.do("pull", ticket=ticket.to_text(), into=[2], timeout_s=60)


def test_an_owner_killed_during_bounce_is_an_error(holdable: Holdable) -> None:
    process, victim, taker, held = holdable(wide(4096, memory=ON_GPU), transports="tcp")
    ticket = victim.offer(range(4096))
    held.touch()  # the bounce buffer takes a sixteenth of it
    taker.do("start_pull", ticket=ticket.to_text(), into=list(range(4096)), timeout_s=60)
    process.kill()
    held.unlink()
    with pytest.raises(PeerUnreachable, match=ticket.request_id):
        taker.do("finish_pull")
