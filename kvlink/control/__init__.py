# SPDX-License-Identifier: Apache-2.0
"""This package holds what workers and coordinators share of the control plane.

Only kvlink.control and kvlink.coordinator speak gRPC.
"""

from kvlink.control.agent import AgentClients, WorkerAgent
from kvlink.control.client import AgentClient, CoordinatorClient
from kvlink.control.limits import Limits
from kvlink.control.security import Security
from kvlink.control.security.tickets import ticket_signing
from kvlink.control.session import Session, SessionState
from kvlink.control.values import Claim, ConnectReply, CoordinatorStatus, Offer, Renewal, SettleOrder

__all__ = [
    "AgentClient",
    "AgentClients",
    "Claim",
    "ConnectReply",
    "CoordinatorClient",
    "CoordinatorStatus",
    "Limits",
    "Offer",
    "Renewal",
    "Security",
    "Session",
    "SessionState",
    "SettleOrder",
    "WorkerAgent",
    "ticket_signing",
]
