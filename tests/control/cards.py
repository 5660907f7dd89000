# SPDX-License-Identifier: Apache-2.0
"""Cards and offers as a small worker would make them."""

from __future__ import annotations

from kvlink.control import Offer
from kvlink.layout import KVLayout, Plane
from kvlink.types import HostIdentity, TransportCard, WorkerCard


def make_layout() -> KVLayout:
    return KVLayout(
        model="test",
        dtype="bfloat16",
        block_tokens=16,
        total_heads=8,
        first_head=0,
        num_heads=8,
        row_bytes=256,
        block_stride=32 << 10,
        token_stride=2 << 10,
        head_stride=256,
        num_blocks=100,
        planes=(Plane(0, 0, 0), Plane(0, 1, 100 * (32 << 10))),
    )


def make_card(
    worker_id: str = "prefill", epoch: int = 1, process: int = 1, agent: str = "127.0.0.1:1"
) -> WorkerCard:
    return WorkerCard(
        worker_id=worker_id,
        epoch=epoch,
        incarnation=process.to_bytes(16, "big"),
        agent=agent,
        host=HostIdentity("boot", 1, 2, 3, 4),
        layouts=(make_layout(),),
        region_bytes=(200 * (32 << 10),),
        transports=(
            TransportCard("shm", b"address", (b"key",), (b"slots", b"words")),
            TransportCard("tcp", b"", (), (), "no"),
        ),
    )


def make_offer(
    request_id: str,
    worker_id: str = "prefill",
    epoch: int = 1,
    ttl_s: float = 30.0,
    rank: int = 0,
    of: int = 1,
    seats: int = 1,
) -> Offer:
    ticket = f"ticket of {request_id} from {worker_id} epoch {epoch} rank {rank}"
    return Offer(request_id, worker_id, epoch, ttl_s, rank, of, seats, ticket.encode())
