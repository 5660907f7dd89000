# SPDX-License-Identifier: Apache-2.0
"""Workers offer blocks on while they arrive: what has validated, and nothing else, whatever ends in between."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from waiting import eventually

import kvlink.transfer.pulls
from kvlink import BlockPool, LeaseEnd, StaleBlocks, Ticket, Worker
from kvlink.coordinator import Coordinator
from kvlink.errors import Cancelled, ConfigError, PeerUnreachable, TransferTimeout, UnknownRequest
from kvlink.layout import Geometry, dense
from kvlink.transfer.peer import Peer
from kvlink.transfer.peers import Peers
from kvlink.transfer.pull_request import batch_units
from kvlink.types import ReadyUnit
from kvlink.worker.relay import Relay

NUM_BLOCKS, TOKENS = 16, 4
FROM, INTO = list(range(8)), list(range(15, 7, -1))
WAIT_S = 30.0


def make(opened: ExitStack, name: str, block_tokens: int = TOKENS, coordinator: str | None = None) -> Worker:
    shape = Geometry(
        num_layers=2, total_heads=1, row_bytes=64, num_blocks=NUM_BLOCKS, block_tokens=block_tokens
    )
    return opened.enter_context(
        Worker(BlockPool.allocate(dense(shape)), name, transports="loopback", coordinator=coordinator)
    )


def planes(worker: Worker) -> npt.NDArray[np.uint8]:
    return worker.pool.numpy().reshape(4, NUM_BLOCKS, -1)


def fill(worker: Worker, seed: int = 1) -> None:
    planes(worker)[:] = np.random.default_rng(seed).integers(256, size=planes(worker).shape, dtype=np.uint8)


def rows(worker: Worker, blocks: Sequence[int]) -> npt.NDArray[np.uint8]:
    """By plane and token."""
    return planes(worker)[:, blocks].reshape(4, -1, 64)


def equal(a: Worker, b: Worker, num_tokens: int = len(FROM) * TOKENS, into: Sequence[int] = INTO) -> bool:
    return np.array_equal(rows(a, FROM)[:, :num_tokens], rows(b, into)[:, :num_tokens])


@pytest.fixture
def owner(opened: ExitStack) -> Worker:
    owner = make(opened, "owner")
    fill(owner)
    return owner


@pytest.fixture
def relays(opened: ExitStack) -> list[Worker]:
    return [make(opened, f"relay-{number}") for number in range(3)]


def ends(worker: Worker) -> list[LeaseEnd]:
    eventually(lambda: not worker.lease_counts().active)
    return [event.how for event in worker.events()]


def test_a_chain_brings_every_byte_to_everyone(owner: Worker, relays: list[Worker]) -> None:
    seats = owner.split(owner.offer("r", FROM, readers=3))
    one = relays[0].relay(seats[0], INTO, batch_bytes=1)
    two = relays[1].relay(one.ticket, INTO, fallback=seats[1].to_text(), batch_bytes=1)
    three = relays[2].relay(two.ticket, INTO, readers=0, fallback=seats[2])
    assert three.ticket is None
    for relay, worker in zip((one, two, three), relays, strict=True):
        assert relay.wait(WAIT_S)
        assert relay.num_valid_tokens == len(FROM) * TOKENS
        assert relay.failed == []
        assert equal(owner, worker)
    for worker in (owner, *relays[:2]):
        assert ends(worker) == [LeaseEnd.SETTLED], "spare seats are released"


def test_readers_of_a_relay_get_what_has_validated_there(owner: Worker, relays: list[Worker]) -> None:
    ticket = owner.offer("r", FROM, ready=0)
    one = relays[0].relay(ticket, INTO)
    two = relays[1].relay(one.ticket, INTO, readers=0)
    for ready in (1, 3):
        owner.set_ready("r", ready)
        eventually(lambda ready=ready: two.num_valid_tokens == ready * TOKENS)
        assert one.num_valid_tokens == ready * TOKENS
        assert equal(owner, relays[1], ready * TOKENS)
    assert not two.wait(0)
    owner.abort("r")
    with pytest.raises(StaleBlocks, match="from owner"):
        one.wait(WAIT_S)
    with pytest.raises(StaleBlocks, match="from relay-0"):
        two.wait(WAIT_S)
    assert ends(relays[0]) == [LeaseEnd.ABORTED]
    assert one.num_valid_tokens == two.num_valid_tokens == 3 * TOKENS


def test_the_rest_is_read_from_another_source_and_nobody_else_notices(
    owner: Worker, relays: list[Worker], opened: ExitStack
) -> None:
    whole = make(opened, "whole", block_tokens=8)
    whole_rows = planes(whole).reshape(4, NUM_BLOCKS * 8, 64)
    whole_rows[:, : len(FROM) * TOKENS] = rows(owner, FROM)
    spare = whole.offer("r", [0, 1, 2, 3])
    one = relays[0].relay(owner.offer("r", FROM, ready=0), INTO, fallback=spare, batch_bytes=1)
    two = relays[1].relay(one.ticket, INTO, readers=0)
    owner.set_ready("r", 3)
    eventually(lambda: two.num_valid_tokens == 3 * TOKENS)
    planes(relays[0])[:, INTO[3:]] = 0xEE  # nobody has read them
    proven = rows(relays[0], INTO[:3]).copy()
    owner.abort("r")
    assert one.wait(WAIT_S)
    assert [type(error) for error in one.failed] == [StaleBlocks]
    assert one.pull.stats.num_bytes == 4 * 64 * (len(FROM) - 3) * TOKENS, "only the rest"
    assert np.array_equal(rows(relays[0], INTO[:3]), proven)
    assert two.wait(WAIT_S)
    assert two.failed == []
    assert equal(owner, relays[0])
    assert equal(owner, relays[1])
    assert ends(whole) == ends(relays[0]) == [LeaseEnd.SETTLED]


def test_a_source_that_is_gone_before_is_left_out(
    owner: Worker, relays: list[Worker], opened: ExitStack
) -> None:
    gone = make(opened, "gone")
    dead = gone.offer("r", FROM)
    gone.close()
    one = relays[0].relay(dead, INTO, fallback=owner.offer("r", FROM), timeout_s=WAIT_S)
    two = relays[1].relay(one.ticket, INTO, readers=0)
    assert one.wait(WAIT_S)
    assert two.wait(WAIT_S)
    assert [type(error) for error in one.failed] == [PeerUnreachable]
    assert equal(owner, relays[1])


def test_a_first_source_that_hangs_costs_its_share_of_the_deadline(
    owner: Worker, relays: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Peers.connect
    given: list[float] = []

    async def connect(peers: Peers, worker_id: str, epoch: int, agent: str, deadline: float) -> Peer | None:
        given.append(deadline)
        if worker_id == "owner":
            return await plain(peers, worker_id, epoch, agent, deadline)
        raise TransferTimeout(f"{worker_id} was not connected within the deadline")

    monkeypatch.setattr(Peers, "connect", connect)
    hanging = relays[1].offer("r", FROM)
    one = relays[0].relay(hanging, INTO, fallback=owner.offer("r", FROM), timeout_s=2 * WAIT_S)
    assert one.wait()
    assert [type(error) for error in one.failed] == [TransferTimeout]
    assert given[1] - given[0] == pytest.approx(WAIT_S, rel=0.2)
    assert equal(owner, relays[0])


def test_without_any_source_the_offer_ends(relays: list[Worker], opened: ExitStack) -> None:
    gone = make(opened, "gone")
    dead = gone.offer("r", FROM)
    gone.close()
    one = relays[0].relay(dead, INTO, timeout_s=WAIT_S)
    with pytest.raises(PeerUnreachable, match="gone"):
        one.wait()
    assert one.failed == []
    assert ends(relays[0]) == [LeaseEnd.ABORTED]


def test_a_cancelled_relay_ends_its_offer(owner: Worker, relays: list[Worker]) -> None:
    spare = relays[2].offer("r", FROM)
    one = relays[0].relay(owner.offer("r", FROM, ready=0), INTO, fallback=spare)
    two = relays[1].relay(one.ticket, INTO, readers=0)
    one.cancel()
    assert one.pull.done()
    with pytest.raises(StaleBlocks, match=r"from relay-0 .* its owner aborted it"):
        two.wait(WAIT_S)
    one.cancel()


def _turning(
    owner: Worker, relay: Worker, spare: Worker, monkeypatch: pytest.MonkeyPatch, ask: Callable[[], None]
) -> Relay:
    """A relay of which the first source has ended. It calls `ask` before it reads from the second."""
    one = relay.relay(owner.offer("r", FROM, ready=0), INTO, fallback=spare.offer("r", FROM))
    eventually(lambda: one.pull.parts())
    plain = kvlink.transfer.pulls.check_relay

    def checked(peer: Peer | None, ticket: Ticket) -> Peer:
        ask()
        return plain(peer, ticket)

    monkeypatch.setattr(kvlink.transfer.pulls, "check_relay", checked)
    owner.abort("r")
    return one


def test_cancel_prevents_the_pull_from_the_next_source(
    owner: Worker, relays: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread is about to read from the next source when `cancel` returns."""
    cancelled: list[Relay] = []
    one = _turning(owner, relays[0], relays[2], monkeypatch, lambda: cancelled[0].cancel())
    cancelled.append(one)
    fill(relays[2], 2)
    before = planes(relays[0]).copy()
    with pytest.raises(Cancelled):
        one.wait(WAIT_S)
    assert np.array_equal(planes(relays[0]), before)
    assert ends(relays[0]) == [LeaseEnd.ABORTED]
    with pytest.raises(Cancelled):
        one.wait(WAIT_S)


def test_cancel_ends_a_wait_for_a_source_that_does_not_answer(
    owner: Worker, relays: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    async def never(*_: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    one = relays[0].relay(owner.offer("r", FROM, ready=0), INTO, fallback=relays[2].offer("r", FROM))
    eventually(lambda: one.pull.parts())
    monkeypatch.setattr(Peers, "connect", never)
    owner.abort("r")
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(one.wait)
        assert asked.wait(WAIT_S)
        one.cancel()
        with pytest.raises(Cancelled):
            waiting.result(WAIT_S)


def test_a_wait_with_a_timeout_returns_while_the_next_source_is_connected(
    owner: Worker, relays: list[Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    spare = relays[2].offer("r", FROM)
    fill(relays[2], 2)
    one = relays[0].relay(owner.offer("r", FROM, ready=0), INTO, fallback=spare, timeout_s=3600)
    eventually(lambda: one.pull.parts())
    with monkeypatch.context() as patched:
        patched.setattr(Peers, "connect", never)
        owner.abort("r")
        eventually(lambda: one.failed)
        assert not one.wait(0.01)
        assert not one.wait(0)
    one.cancel()


def test_an_ended_relay_leaves_a_later_offer_of_its_name_alone(owner: Worker, relays: list[Worker]) -> None:
    one = relays[0].relay(owner.offer("r", FROM), INTO)
    two = relays[1].relay(one.ticket, INTO, readers=0)
    assert one.wait(WAIT_S)
    assert two.wait(WAIT_S)
    assert ends(relays[0]) == [LeaseEnd.SETTLED]
    again = relays[0].offer("r", INTO)
    one.cancel()
    assert relays[1].pull(again, INTO).wait(WAIT_S)


def test_a_relay_is_never_read_again_from_its_first_block(owner: Worker, relays: list[Worker]) -> None:
    """A pull that is cut off starts again by itself, and would write blocks that others have read."""
    one = relays[0].relay(owner.offer("r", FROM, ready=0), INTO)
    eventually(lambda: one.pull.parts())
    owner.close()
    with pytest.raises((PeerUnreachable, StaleBlocks)):  # whether the lease or the connection ends first
        one.wait(WAIT_S)
    assert relays[0].stats().restarts == 0


def test_blocks_of_other_sizes_and_a_part_of_the_last_one(owner: Worker, opened: ExitStack) -> None:
    wide, leaf = make(opened, "wide", block_tokens=16), make(opened, "leaf")
    tokens = len(FROM) * TOKENS - 3
    one = wide.relay(owner.offer("r", FROM, num_tokens=tokens), [3, 2], batch_bytes=1)
    two = leaf.relay(one.ticket, INTO, readers=0)
    assert one.wait(WAIT_S)
    assert two.wait(WAIT_S)
    assert one.num_valid_tokens == two.num_valid_tokens == tokens
    assert equal(owner, leaf, tokens)


def test_each_seat_of_a_split_ticket_settles_alone(owner: Worker, relays: list[Worker]) -> None:
    seats = owner.split(owner.offer("r", FROM, readers=2))
    assert [len(seat.seats) for seat in seats] == [1, 1]
    relays[0].pull(seats[1], INTO).wait(WAIT_S)
    assert owner.lease_counts().active == 1
    relays[1].pull(seats[0], INTO).wait(WAIT_S)
    assert ends(owner) == [LeaseEnd.SETTLED]


def test_what_cannot_be_relayed_is_refused(owner: Worker, relays: list[Worker], opened: ExitStack) -> None:
    ticket = owner.offer("r", FROM)
    with pytest.raises(ConfigError, match="`fallback` has 4 tokens, and `ticket` 32"):
        relays[0].relay(ticket, INTO, fallback=owner.offer("q", FROM[:1]))
    with pytest.raises(ConfigError, match="pass one ticket, not a list"):
        relays[0].relay([ticket], INTO)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs a coordinator"):
        relays[0].relay("r", INTO)
    by_layer = owner.offer("layers", FROM, ready=0, ready_unit=ReadyUnit.LAYERS)
    with pytest.raises(ConfigError, match="this offer counts layers"):
        relays[0].relay(by_layer, INTO)
    with pytest.raises(UnknownRequest):
        relays[0].set_ready("layers", 1)
    with pytest.raises(ConfigError, match="forged"):
        replace(ticket, seats=(ticket.seats[0]._replace(slot=0),))
    assert Ticket.from_text(ticket.to_text()) == ticket


def test_batches_suit_the_request() -> None:
    layout = dense(Geometry(num_layers=2, total_heads=1, row_bytes=64, num_blocks=4, block_tokens=16))
    assert batch_units(layout, 16, 1 << 20, None) == (1 << 20) // 64 // 16
    assert batch_units(layout, 16, 64, None) == (256 << 10) // (256 * 16)
    assert batch_units(layout, 16, 64, 1) == 1
    assert batch_units(layout, 1, 64, 1024) == 4


async def test_tickets_pass_through_the_coordinator(opened: ExitStack) -> None:
    coordinator = Coordinator()
    address = await coordinator.start()

    def run() -> None:
        owner, one, two = [make(opened, name, coordinator=address) for name in ("owner", "one", "two")]
        fill(owner)
        ticket = owner.offer("r", FROM, readers=2)
        seats = owner.split(ticket)
        first = one.relay(seats[0], INTO, offer_as="r/one", publish=True)
        second = two.relay("r/one", INTO, readers=0, fallback=seats[1])
        assert second.wait(WAIT_S)
        assert first.wait(WAIT_S)
        assert equal(owner, two)
        opened.close()

    await asyncio.to_thread(run)
    await coordinator.close()
