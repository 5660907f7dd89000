# SPDX-License-Identifier: Apache-2.0
"""Defines every call of the control plane with its path and codecs. Protobuf messages never leave this package."""

from __future__ import annotations

from kvlink.control.codec import _calls as calls
from kvlink.control.codec import _handoffs as handoffs
from kvlink.control.codec import _overview as overview
from kvlink.control.codec import _prefixes as prefixes
from kvlink.control.codec import _records as records
from kvlink.control.codec._cards import CARD
from kvlink.control.codec._handoffs import BatchWriter
from kvlink.control.codec._overview import write_view
from kvlink.control.codec._wire import Codec, Method

__all__ = [
    "CARD",
    "AgentCalls",
    "BatchWriter",
    "Codec",
    "CoordinatorCalls",
    "Method",
    "StoredRecords",
    "write_view",
]


class CoordinatorCalls:
    """Lists the methods of protos/kvlink/v1/coordinator.proto."""

    SERVICE = "kvlink.v1.Coordinator"
    JOIN = Method(SERVICE, "Join", calls.JOIN, calls.MEMBERSHIP)
    KEEP_ALIVE = Method(SERVICE, "KeepAlive", overview.BEAT, calls.PUSH)
    LEAVE = Method(SERVICE, "Leave", calls.LEAVE, calls.LEFT)
    GET_WORKER = Method(SERVICE, "GetWorker", calls.GET_WORKER, CARD)
    LIST_WORKERS = Method(SERVICE, "ListWorkers", calls.LIST, calls.CARDS)
    WATCH_WORKERS = Method(SERVICE, "WatchWorkers", calls.WATCH, calls.CHANGES)
    OFFER = Method(SERVICE, "Offer", handoffs.OFFER, handoffs.OFFERED)
    CLAIM = Method(SERVICE, "Claim", handoffs.CLAIM, handoffs.TICKETS)
    SETTLE = Method(SERVICE, "Settle", handoffs.SETTLE, handoffs.SETTLE_PASSED_ON)
    HANDOFFS = Method(SERVICE, "Handoffs", handoffs.HANDOFF_BATCH, handoffs.HANDOFF_RESULTS)
    PUBLISH_PREFIXES = Method(SERVICE, "PublishPrefixes", prefixes.PUBLISH, prefixes.PUBLISHED)
    FIND_PREFIX = Method(SERVICE, "FindPrefix", prefixes.FIND, prefixes.FOUND)
    STATUS = Method(SERVICE, "Status", calls.ASK_STATUS, calls.STATUS)
    OVERVIEW = Method(SERVICE, "Overview", overview.ASK_OVERVIEW, overview.OVERVIEW)


class AgentCalls:
    """Lists the methods of protos/kvlink/v1/agent.proto."""

    SERVICE = "kvlink.v1.WorkerAgent"
    GET_CARD = Method(SERVICE, "GetCard", calls.GET_CARD, CARD)
    CONNECT = Method(SERVICE, "Connect", calls.CONNECT, calls.CONNECTED)
    SETTLE_SEAT = Method(SERVICE, "SettleSeat", calls.SETTLE_SEAT, calls.SEAT_SETTLED)
    RENEW_SEATS = Method(SERVICE, "RenewSeats", calls.RENEW_SEATS, calls.SEATS_ENDED)
    DRAIN = Method(SERVICE, "Drain", calls.DRAIN, calls.LEASES_LEFT)


class StoredRecords:
    """Lists the codecs of values that coordinators share through their store."""

    CARD = CARD
    INCARNATION = records.INCARNATION
    CLAIMED = records.CLAIMED
    OFFER = handoffs.OFFER
    SETTLE = handoffs.SETTLE
