# SPDX-License-Identifier: Apache-2.0
"""An owner without an agent, as a program in C++ would be: an engine of the core, and its native channel.

Arguments: the transport, and the port of the channel. Prints one JSON object with its card and two tickets, the second
of blocks that are never written. Runs until its standard input ends.
"""

from __future__ import annotations

import ctypes
import json
import sys
from array import array

import numpy as np

from kvlink import Geometry, Ticket, _core, dense
from kvlink.control.codec import CARD
from kvlink.hardware.host_identity import this_host
from kvlink.ticket import LeaseSeat
from kvlink.types import NativeChannel, TransportCard, WorkerCard

LAYOUT = dense(Geometry(num_layers=2, total_heads=2, row_bytes=64, num_blocks=32, block_tokens=4))
BLOCKS = [9, 3, 30]
_EPOCH, _TTL_S = 7, 3600.0


def content() -> np.ndarray:
    """Returns each byte of the owner's pool."""
    size = LAYOUT.num_blocks * LAYOUT.block_stride * len(LAYOUT.planes)
    return np.random.default_rng(55).integers(0, 256, size, dtype=np.uint8)


def ticket(engine: _core.Engine, number: int, ready: int) -> Ticket:
    (seat,) = engine.grant(number, 1, ready, _TTL_S)
    return Ticket(
        f"request-{number}",
        "native",
        _EPOCH,
        "",
        (LeaseSeat(*seat),),
        array("I", BLOCKS),
        num_tokens=len(BLOCKS) * LAYOUT.block_tokens,
        ready=ready,
        ttl_s=_TTL_S,
    )


def main(transport: str, port: int) -> None:
    memory = _core.HostMemory(content().size)
    ctypes.memmove(memory.address, content().tobytes(), memory.bytes)
    engine = _core.Engine(_EPOCH, [transport], "127.0.0.1", 0, "", 64, 1, 500.0, 1, (), worker="native")
    engine.add_pool_region(memory)
    engine.start()
    channel = _core.Channel()
    card = WorkerCard(
        worker_id="native",
        epoch=_EPOCH,
        incarnation=bytes(16),
        agent="",
        host=this_host(),
        layouts=(LAYOUT,),
        region_bytes=(memory.bytes,),
        transports=tuple(
            TransportCard(name, address, tuple(pool), tuple(leases), refused, bounces)
            for name, address, pool, leases, refused, bounces in engine.access()
        ),
        channel=NativeChannel(*_listening(channel, engine, port)),
    )
    channel.publish(CARD.encode(card))
    tickets = [ticket(engine, 1, len(BLOCKS)).to_text(), ticket(engine, 2, 0).to_text()]
    print(json.dumps({"card": CARD.encode(card).hex(), "tickets": tickets}), flush=True)
    sys.stdin.read()
    channel.close()
    engine.close()


def _listening(
    channel: _core.Channel, engine: _core.Engine, port: int
) -> tuple[tuple[str, ...], bytes, bytes]:
    addresses, instance, secret = channel.listen(engine, "127.0.0.1", port)
    return tuple(addresses), instance, secret


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
