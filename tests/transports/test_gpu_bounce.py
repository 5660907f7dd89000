# SPDX-License-Identifier: Apache-2.0
"""Pools on a GPU over transports that do not reach one. tests/fake_cuda stands for the GPU and its driver."""

from __future__ import annotations

import pytest
from transports.gpus import ON_HOST, Holdable, Open
from transports.pools import ON_GPU, PoolSpec, wide

from kvlink import _core
from kvlink.errors import PeerUnreachable, TransportUnavailable

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


def test_scattered_heads_and_layers_find_their_places(opened: Open) -> None:
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


def test_an_owner_killed_in_the_middle_is_an_error(holdable: Holdable) -> None:
    process, victim, taker, held = holdable(wide(4096, memory=ON_GPU), transports="tcp")
    ticket = victim.offer(range(4096))
    held.touch()  # the bounce buffer takes a sixteenth of it
    taker.do("start_pull", ticket=ticket.to_text(), into=list(range(4096)), timeout_s=60)
    process.kill()
    held.unlink()
    with pytest.raises(PeerUnreachable, match=ticket.request_id):
        taker.do("finish_pull")
