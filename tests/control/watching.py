# SPDX-License-Identifier: Apache-2.0
"""Turns a coordinator's own status into conditions to wait for."""

from __future__ import annotations

from kvlink.control import CoordinatorClient


async def holds(client: CoordinatorClient, what: str, at_least: int = 1) -> bool:
    """Returns whether the coordinator's status counts so many of `what`, or none where 0 is asked."""
    count: int = getattr(await client.status(), what)
    return count >= at_least if at_least else not count


async def none_joined(client: CoordinatorClient) -> bool:
    """Returns whether no worker is joined."""
    return not await client.workers()
