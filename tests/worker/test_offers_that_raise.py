# SPDX-License-Identifier: Apache-2.0
"""An offer that raises leaves no lease behind, wherever it raises."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from waiting import eventually

from kvlink import BlockPool, LeaseEnd, Ticket, Worker
from kvlink.config import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.layout import Geometry, dense
from kvlink.runtime.supervised import failures
from kvlink.ticket import LeaseSeat
from kvlink.types import ReadyUnit


class Busy:
    """Work on a device that has not ended."""

    def query(self) -> bool:
        return False


@pytest.fixture
def worker() -> Iterator[Worker]:
    pool = BlockPool.allocate(dense(Geometry(1, 1, 64, 64)), huge_pages=False)
    with Worker(pool, "owner", transports="loopback", config=WorkerConfig(lease_slots=4)) as made:
        yield made


def nothing_is_left(worker: Worker) -> bool:
    """Whether no lease is active, once the ended ones are swept. No event may come."""
    assert worker.events() == []
    assert worker.offers.tickets() == []
    return len(worker.offers) == 0 and worker.lease_counts().active == 0


def unable(*_: Any, **__: Any) -> Any:
    raise PermissionError("the key")


def closed(job: Coroutine[Any, Any, None], request_id: str) -> None:
    """As a control thread does that is closed."""
    job.close()
    raise ConfigError("the control thread is closed")


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


BENT: dict[str, Callable[[Worker], object]] = {
    "no text as trace": lambda worker: worker.offer("r", [1], trace=5),  # type: ignore[arg-type]
    "more readers than slots": lambda worker: worker.offer("r", [1], readers=5),
    "a key that cannot be read": lambda worker: bend(worker, "sign", unable).offer("r", [1]),
    "an interrupt while signing": lambda worker: bend(worker, "sign", interrupted).offer("r", [1]),
    "no loop to wait for the device": lambda worker: bend(worker, "in_background", closed).offer(
        "r",
        [1],
        after=Busy(),  # type: ignore[arg-type]
    ),
    "nobody to publish it": lambda worker: worker.offers.offer(
        "r", [1], num_tokens=None, ttl_s=9, readers=1, ready=None, ready_unit=ReadyUnit.BLOCKS, publish=unable
    ),
    "a seat twice": lambda worker: worker.offers.grant_at("r", [LeaseSeat(1, 1 << 40, 1 << 41)] * 2, 9),
}


def bend(worker: Worker, what: str, how: Callable[..., Any]) -> Worker:
    setattr(worker.offers, what, how)
    return worker


@pytest.mark.parametrize("how", BENT)
def test_no_lease_is_left(worker: Worker, how: str) -> None:
    before = {name: getattr(worker.offers, name) for name in ("sign", "in_background")}
    with pytest.raises((ConfigError, PermissionError, KeyboardInterrupt)):
        BENT[how](worker)
    eventually(lambda: nothing_is_left(worker))
    for name, value in before.items():
        setattr(worker.offers, name, value)
    worker.offer("r", [1], readers=4)  # the id and every slot are free
    assert len(worker.offers) == 1


def test_the_error_is_told_although_the_lease_ended_meanwhile(worker: Worker) -> None:
    def slow(ticket: Ticket) -> Ticket:
        worker.abort("r")
        while worker.lease_counts().active:
            worker.offers.num_pinned_blocks()  # collects
        return unable()

    bend(worker, "sign", slow)
    with pytest.raises(PermissionError):
        worker.offer("r", [1])
    assert nothing_is_left(worker)


def test_an_end_does_not_take_the_next_offer_of_the_request(worker: Worker) -> None:
    """The end of an offer is collected while another thread withdraws it, and offers the request again."""

    def offer_again(request_id: str) -> None:
        worker.offers.on_ended = lambda _: None
        worker.offers._withdraw(request_id, worker.offers.lease_of(request_id))
        worker.offer(request_id, [2])

    worker.offer("r", [1])
    worker.offers.on_ended = offer_again
    worker.abort("r")

    def is_offered_again() -> bool:
        assert worker.events() == []
        return [ticket.block_ids.tolist() for ticket in worker.offers.tickets()] == [[2]]

    eventually(is_offered_again)
    worker.abort("r")
    assert eventually(worker.events)[0].how is LeaseEnd.ABORTED


def test_an_end_that_cannot_be_told_does_not_keep_the_others(worker: Worker) -> None:
    told: list[str] = []
    before = failures().get("end of an offer", 0)

    def tell(request_id: str) -> None:
        told.append(request_id)
        raise RuntimeError("the loop is closed")

    worker.offers.on_ended = tell
    for name in ("a", "b", "c"):
        worker.offer(name, [1])
        worker.abort(name)
    events = []
    while len(events) < 3:
        events += worker.events()
    assert sorted(event.request_id for event in events) == sorted(told) == ["a", "b", "c"]
    assert failures()["end of an offer"] == before + 3
    assert nothing_is_left(worker)


@pytest.mark.parametrize("sign", [unable, interrupted])
def test_a_soft_offer_that_cannot_be_signed_ends_alone(worker: Worker, sign: Callable[..., Any]) -> None:
    kept = worker.offer_soft("kept", [3])
    plain = worker.offers.sign
    with pytest.raises((PermissionError, KeyboardInterrupt)):
        bend(worker, "sign", sign).offer_soft("s", [3])
    assert worker.soft_lease_counts().active == 1
    with pytest.raises(ConfigError, match="trace"):
        bend(worker, "sign", plain).offer_soft("s", [3], trace=5)  # type: ignore[arg-type]
    assert worker.soft_lease_counts().active == 1
    seat = kept.seats[0]
    assert worker._engine.core.holds_lease(seat.slot, seat.nonce)
    assert worker.revoke([3]) == 1
