# SPDX-License-Identifier: Apache-2.0
"""How failures of etcd reach those who called the coordinator."""

from __future__ import annotations

from kvlink.control.refusal import Reason, Refused, refusal_of
from kvlink.errors import CoordinatorError, CoordinatorUnavailable


class StoreFull(CoordinatorError):
    """etcd has reached its quota (NOSPACE). It refuses what writes; reads, deletions and renewals go on."""


def as_refusal(error: BaseException) -> Refused:
    """What a failed call of the store raises."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, CoordinatorUnavailable):
        return Refused(
            Reason.NOT_READY,
            f"the coordinator does not reach its store: {error}. Workers that have met go on without it; ask again",
        )
    if isinstance(error, StoreFull):
        return Refused(
            Reason.TOO_MANY,
            f"the coordinator's store is full: {error}. It has to be compacted, defragmented and its alarm disarmed, "
            "as the operator's guide says; ask again later",
        )
    if isinstance(error, CoordinatorError):
        return Refused(Reason.FAILED, f"the coordinator's store refused: {error}")
    return refusal_of(error)
