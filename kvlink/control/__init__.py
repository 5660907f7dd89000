# SPDX-License-Identifier: Apache-2.0
"""The control plane: who is there, and which tickets wait for whom. Nothing else in kvlink speaks gRPC."""

from kvlink.control.agent import WorkerAgent
from kvlink.control.agent_clients import AgentClients
from kvlink.control.client import AgentClient, CoordinatorClient
from kvlink.control.coordinator import DEFAULT_PORT, Coordinator, serve
from kvlink.control.handoff_stream import HandoffStream
from kvlink.control.limits import Limits
from kvlink.control.security import Security
from kvlink.control.security.tickets import ticket_signing
from kvlink.control.session import Session, SessionState
from kvlink.control.thread import ControlThread
from kvlink.control.values import Claim, ConnectReply, CoordinatorStatus, Offer, Renewal, SettleOrder

__all__ = [
    "DEFAULT_PORT",
    "AgentClient",
    "AgentClients",
    "Claim",
    "ConnectReply",
    "ControlThread",
    "Coordinator",
    "CoordinatorClient",
    "CoordinatorStatus",
    "HandoffStream",
    "Limits",
    "Offer",
    "Renewal",
    "Security",
    "Session",
    "SessionState",
    "SettleOrder",
    "WorkerAgent",
    "serve",
    "ticket_signing",
]
