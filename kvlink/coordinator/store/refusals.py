# SPDX-License-Identifier: Apache-2.0
"""Why stores refuse, in the same words whichever store it is."""

from __future__ import annotations

from kvlink.control.refusal import Reason, Refused, named
from kvlink.control.values import Claim, Offer
from kvlink.types import WorkerCard


def not_joined(worker_id: str, reason: Reason = Reason.UNKNOWN) -> Refused:
    """NOT_JOINED instead of UNKNOWN when the caller is the worker itself."""
    return Refused(reason, f"worker {named(worker_id)} is not joined: it never was, left, or stopped beating")


def restarted(worker_id: str, asked: int, running: int) -> Refused:
    """Another epoch runs than the caller believes."""
    return Refused(
        Reason.RESTARTED, f"worker {named(worker_id)} restarted: epoch {asked} asked, {running} running"
    )


def replaced(card: WorkerCard, running: int) -> Refused:
    """Two processes want one identity."""
    return Refused(
        Reason.REPLACED,
        f"worker {named(card.worker_id)} epoch {card.epoch} was replaced by another process, "
        f"epoch {running}; give every worker its own worker_id",
    )


def taken(holder: WorkerCard, newcomer: WorkerCard) -> Refused:
    """A second process of the name comes while the first one runs."""
    return Refused(
        Reason.TAKEN,
        f"worker {named(holder.worker_id)} runs already: epoch {holder.epoch}, whose agent at {holder.agent} answers; "
        f"give the process at {newcomer.agent} its own worker_id, or end the other one first",
    )


def too_many_workers(joined: int) -> Refused:
    """The fleet is full."""
    return Refused(Reason.TOO_MANY, f"{joined} workers have joined, which is the limit")


def too_many_bytes(worker_id: str, most: int) -> Refused:
    """Of tickets, here."""
    return Refused(
        Reason.TOO_MANY,
        f"a ticket of worker {named(worker_id)} does not fit: {most} bytes of them are the limit here",
    )


def too_many_tickets(worker_id: str, tickets: int) -> Refused:
    """One worker offers faster than anyone claims."""
    return Refused(
        Reason.TOO_MANY, f"worker {named(worker_id)} has {tickets} unclaimed tickets here, the limit"
    )


def too_many_claims(waiting: int) -> Refused:
    """This coordinator is full."""
    return Refused(Reason.TOO_MANY, f"{waiting} claims are waiting, which is the limit")


def too_many_orders(worker_id: str, waiting: int) -> Refused:
    """A worker does not listen."""
    return Refused(
        Reason.TOO_MANY,
        f"{waiting} settle orders wait for worker {named(worker_id)}, the limit; "
        "the lease will expire instead",
    )


def ranks_disagree(offer: Offer, tp_size: int) -> Refused:
    """Two ranks of a request differ in how many there are."""
    return Refused(
        Reason.MALFORMED,
        f"request {named(offer.request_id)}: rank {offer.tp_rank} says that {offer.tp_size} ranks "
        f"offer, others said {tp_size}",
    )


def expired(offer: Offer) -> Refused:
    """A ticket ran out."""
    return Refused(
        Reason.EXPIRED,
        f"request {named(offer.request_id)} was offered by {named(offer.worker_id)} and not claimed "
        f"within {offer.ttl_s:g} s; recompute it",
    )


def gone_with_worker(request_id: str, why: str) -> Refused:
    """`why` comes from one of the three below."""
    return Refused(Reason.UNKNOWN, f"request {named(request_id)}: {why}")


def has_restarted(worker_id: str, epoch: int) -> str:
    """Another process took over."""
    return f"worker {named(worker_id)} restarted as epoch {epoch}; recompute it"


def has_left(worker_id: str) -> str:
    """It said goodbye."""
    return f"worker {named(worker_id)} has left; recompute it"


def stopped_beating(worker_id: str) -> str:
    """Its lease ran out."""
    return f"worker {named(worker_id)} stopped beating; recompute it"


def in_vain(claim: Claim, offered: int, tp_size: int) -> Refused:
    """A claim waited for as long as it wanted."""
    if offered:
        what = f"only {offered} of {tp_size} ranks offered it"
    else:
        what = "nobody offered it (any more; it may have been claimed already)"
    why = f"request {named(claim.request_id)}: {what} within {claim.timeout_s:.3g} s; recompute it"
    return Refused(Reason.UNKNOWN, why)


def store_changes(what: str, tries: int) -> Refused:
    """A compare-and-set fails again and again."""
    return Refused(
        Reason.NOT_READY,
        f"{what}: the coordinator's store changed during each of {tries} attempts to write; ask again",
    )


def store_is_lost(store: str) -> Refused:
    """What a coordinator knows is too old."""
    return Refused(
        Reason.NOT_READY,
        f"the coordinator has lost its store, {store}, and does not know what was offered since; ask another",
    )


def closing() -> Refused:
    """The coordinator ends."""
    return Refused(Reason.NOT_READY, "the coordinator is shutting down; ask again in a moment")


def watch_fell_behind() -> Refused:
    """A watcher does not keep up."""
    return Refused(Reason.TOO_MANY, "this watch fell behind; watch again")
