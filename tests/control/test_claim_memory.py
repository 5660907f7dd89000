# SPDX-License-Identifier: Apache-2.0
"""As many claims as may wait at a coordinator for one tenant fit into the memory that the chart gives it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from control.processes import CoordinatorProcess
from control.watching import holds
from waiting import until

from kvlink.control import Claim, CoordinatorClient, Limits
from kvlink.control.codec import CoordinatorCalls

VALUES = Path(__file__).parents[2] / "integrations" / "deploy" / "chart" / "values.yaml"
NUM_CALLS = 1_000
_WAIT_S = 3_000.0

pytestmark = [pytest.mark.verify, pytest.mark.timeout(600)]


def resident(process: CoordinatorProcess) -> int:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def memory_limit() -> int:
    limit = yaml.safe_load(VALUES.read_text())["resources"]["limits"]["memory"]
    return int(limit.removesuffix("Gi")) << 30


async def test_claims_of_one_call_each(coordinator_process: Callable[..., CoordinatorProcess]) -> None:
    """A thousand of them, as all take a minute of two cores."""
    process = coordinator_process()
    async with CoordinatorClient(process.address, timeout_s=60.0) as client:
        await client.status()
        before = resident(process)
        claims = [
            asyncio.create_task(
                client._channel.attempt(CoordinatorCalls.CLAIM, Claim(f"cmpl-{number:032}", _WAIT_S), _WAIT_S)
            )
            for number in range(NUM_CALLS)
        ]
        await until(lambda: holds(client, "waiting_claims", NUM_CALLS))
        each = (resident(process) - before) / NUM_CALLS
        for claim in claims:
            claim.cancel()
        await asyncio.gather(*claims, return_exceptions=True)
    print(f"{each / 1024:.1f} KiB each, beside {before >> 20} MiB", end=" ")
    assert before + each * Limits().waiting_claims < memory_limit()


async def test_all_claims_of_one_stream(coordinator_process: Callable[..., CoordinatorProcess]) -> None:
    process = coordinator_process()
    num_claims = Limits().waiting_claims
    async with CoordinatorClient(process.address, timeout_s=60.0) as client, client.handoffs() as stream:
        await client.status()
        before = resident(process)
        for number in range(num_claims):
            stream.claim(Claim(f"cmpl-{number:032}", _WAIT_S))
        await until(lambda: holds(client, "waiting_claims", num_claims))
        after = resident(process)
    print(f"{(after - before) / num_claims / 1024:.1f} KiB each, {after >> 20} MiB in all", end=" ")
    assert after < memory_limit() / 4
