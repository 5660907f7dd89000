# SPDX-License-Identifier: Apache-2.0
"""Makes the refusals of all stores, so that every store refuses with the same text."""

from __future__ import annotations

from kvlink.control.refusal import Reason, RefusedError, named
from kvlink.control.values import Claim, Offer
from kvlink.types import WorkerCard


def not_joined(worker_id: str, reason: Reason = Reason.UNKNOWN) -> RefusedError:
    """Refuses because a worker is not joined. The reason is NOT_JOINED if the caller is the worker itself."""
    return RefusedError(
        reason, f"worker {named(worker_id)} is not joined: it never joined, left, or stopped beating"
    )


def restarted(worker_id: str, asked: int, running: int) -> RefusedError:
    """Refuses because another epoch of the worker runs than the caller named."""
    return RefusedError(
        Reason.RESTARTED,
        f"worker {named(worker_id)} restarted: the call is for epoch {asked}, and epoch {running} is running",
    )


def replaced(card: WorkerCard, running: int) -> RefusedError:
    """Refuses a rejoin because another process has taken the worker_id."""
    return RefusedError(
        Reason.REPLACED,
        f"worker {named(card.worker_id)} epoch {card.epoch} was replaced by another process, "
        f"epoch {running}; give each worker its own worker_id",
    )


def not_the_caller(worker_id: str) -> RefusedError:
    """Refuses what a worker does itself, because another process calls in its name."""
    return RefusedError(
        Reason.DENIED,
        f"worker {named(worker_id)} is another process than the caller, who does not have its secret; only the "
        "process itself may do this",
    )


def worker_id_taken(holder: WorkerCard, newcomer: WorkerCard) -> RefusedError:
    """Refuses a second process with the worker_id of a running one."""
    return RefusedError(
        Reason.TAKEN,
        f"worker {named(holder.worker_id)} runs already: the agent of its epoch {holder.epoch} at {holder.agent} "
        f"answers; give the process at {newcomer.agent} its own worker_id, or end the other one first",
    )


def too_many_workers(joined: int) -> RefusedError:
    """Refuses a join because the fleet is full."""
    return RefusedError(
        Reason.TOO_MANY, f"{joined} workers have joined, which is the limit; retry when one has left"
    )


def too_large_cards(card: WorkerCard, most: int) -> RefusedError:
    """Refuses a join because the cards of the fleet are at their limit of bytes."""
    return RefusedError(
        Reason.TOO_MANY,
        f"the card of worker {named(card.worker_id)} does not fit into the coordinator's limit of {most} bytes of "
        "cards; retry when a worker has left",
    )


def too_many_tickets_in_all(most: int) -> RefusedError:
    """Refuses a ticket because the workers together have too many unclaimed ones."""
    return RefusedError(
        Reason.TOO_MANY,
        f"this coordinator has {most} unclaimed tickets, its limit; retry when some have been claimed",
    )


def too_many_bytes(worker_id: str, most: int) -> RefusedError:
    """Refuses a ticket because the tickets of this coordinator are at their limit of bytes."""
    return RefusedError(
        Reason.TOO_MANY,
        f"a ticket of worker {named(worker_id)} does not fit into the coordinator's limit of {most} bytes of "
        "tickets; retry when others have been claimed",
    )


def too_many_tickets(worker_id: str, tickets: int) -> RefusedError:
    """Refuses a ticket because the worker has too many unclaimed ones."""
    return RefusedError(
        Reason.TOO_MANY,
        f"worker {named(worker_id)} has {tickets} unclaimed tickets here, which is the limit; retry when some have "
        "been claimed",
    )


def too_many_claims(waiting: int) -> RefusedError:
    """Refuses a claim because too many claims wait at this coordinator."""
    return RefusedError(
        Reason.TOO_MANY, f"{waiting} claims are waiting, which is the limit; retry when some were answered"
    )


def too_many_orders(worker_id: str, waiting: int) -> RefusedError:
    """Refuses a settle order because the worker does not take its orders."""
    return RefusedError(
        Reason.TOO_MANY,
        f"{waiting} settle orders wait for worker {named(worker_id)}, which is the limit; the lease will expire "
        "instead",
    )


def ranks_disagree(offer: Offer, num_ranks: int) -> RefusedError:
    """Refuses a ticket because the ranks of its request differ in the number of ranks."""
    return RefusedError(
        Reason.MALFORMED,
        f"request {named(offer.request_id)}: rank {offer.rank} offered with {offer.num_ranks} ranks, and other "
        f"ranks with {num_ranks}; use one number of ranks",
    )


def expired(offer: Offer) -> RefusedError:
    """Refuses a claim because the ticket expired."""
    return RefusedError(
        Reason.EXPIRED,
        f"request {named(offer.request_id)} was offered by {named(offer.worker_id)} and not claimed "
        f"within {offer.ttl_s:g} s; recompute it",
    )


def gone_with_worker(request_id: str, why: str) -> RefusedError:
    """Refuses a claim because its ticket's worker is gone. One of the next three functions makes `why`."""
    return RefusedError(Reason.UNKNOWN, f"request {named(request_id)}: {why}")


def has_restarted(worker_id: str, epoch: int) -> str:
    """Describes a worker whose place another process took."""
    return f"worker {named(worker_id)} restarted as epoch {epoch}; recompute it"


def has_left(worker_id: str) -> str:
    """Describes a worker that left."""
    return f"worker {named(worker_id)} has left; recompute it"


def stopped_beating(worker_id: str) -> str:
    """Describes a worker whose lease expired."""
    return f"worker {named(worker_id)} stopped beating; recompute it"


def claim_timed_out(claim: Claim, offered: int, num_ranks: int) -> RefusedError:
    """Refuses a claim that has waited for its whole timeout."""
    if offered:
        what = f"only {offered} of {num_ranks} ranks offered it"
    else:
        what = "no worker offered it, or it had already been claimed,"
    why = f"request {named(claim.request_id)}: {what} within {claim.timeout_s:.3g} s; recompute it"
    return RefusedError(Reason.UNKNOWN, why)


def write_conflict(what: str, tries: int) -> RefusedError:
    """Refuses a call because its compare-and-set failed repeatedly."""
    return RefusedError(
        Reason.NOT_READY,
        f"{what}: the coordinator's store changed during each of {tries} attempts to write; retry",
    )


def store_is_lost(store: str) -> RefusedError:
    """Refuses a call because the coordinator's copy of the store is too old."""
    return RefusedError(
        Reason.NOT_READY,
        f"the coordinator has lost its store, {store}, and does not know what was offered since; retry at another "
        "coordinator",
    )


def closing() -> RefusedError:
    """Refuses a call because the coordinator is shutting down."""
    return RefusedError(Reason.NOT_READY, "the coordinator is shutting down; retry in a moment")


def watch_fell_behind() -> RefusedError:
    """Ends a watch whose consumer does not keep up."""
    return RefusedError(Reason.TOO_MANY, "this watch fell behind the changes; open another watch")
