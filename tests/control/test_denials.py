# SPDX-License-Identifier: Apache-2.0
"""An operator sees callers that are turned away, and callers cannot write into the log."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import grpc.aio
import pytest
from control.cards import make_card, make_offer
from control.certificates import Pki

from kvlink.control import Claim, CoordinatorClient, Renewal, SettleOrder
from kvlink.control.denials import DenialLog
from kvlink.control.rpc.eager_future import EagerFuture
from kvlink.control.values import ConnectReply, ConnectRequest, HandoffResults, Push, PushKind
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.errors import AccessDenied, ConfigError, CoordinatorError
from kvlink.monitoring.metrics.coordinator import exposition
from kvlink.ticket import LeaseSeat
from kvlink.types import TransportCard, WorkerCard


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_denials_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    denials = DenialLog(lines=2, per_s=60.0, clock=clock)
    for _ in range(5):
        denials.note("/kvlink.v1.Coordinator/Claim", "ipv4:10.0.0.9:1", "no token")
    assert [record.getMessage().partition("suppressed=")[2] for record in caplog.records] == ["0", "0"]
    clock.now = 60.0
    denials.note("/kvlink.v1.Coordinator/Claim", "ipv4:10.0.0.9:1", "w" * 9000)
    last = caplog.records[-1].getMessage()
    assert last.startswith("denied method=/kvlink.v1.Coordinator/Claim peer=ipv4:10.0.0.9:1 why=www")
    assert last.endswith("suppressed=3")
    assert len(last) < 400


async def test_who_shows_no_token_is_in_the_log_with_his_address(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator()
    async with grpc.aio.insecure_channel(await coordinator.start()) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/kvlink.v1.Coordinator/Claim")(b"")
    await coordinator.close()
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("denied")]
    assert "method=/kvlink.v1.Coordinator/Claim peer=ipv4:127.0.0.1:" in line
    assert coordinator.counts.refusals["Claim", "DENIED"] == 1


async def test_another_tenant_is_in_the_log_with_his_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pki = Pki(tmp_path)
    coordinator = Coordinator(security=pki.coordinator())
    async with CoordinatorClient(await coordinator.start(), security=pki.coordinator()) as observer:
        with pytest.raises(AccessDenied, match="observer"):
            await observer.join(make_card())
    await coordinator.close()
    (line,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("denied")]
    assert "method=/kvlink.v1.Coordinator/Join peer=ipv4:127.0.0.1:" in line
    assert "why=you are an observer here" in line


async def test_metrics_say_when_the_certificate_ends(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    security = pki.coordinator()
    assert security.keyring is not None
    ends = security.keyring.current().expires_at
    coordinator = Coordinator(security=security)
    await coordinator.start()
    text = exposition(await coordinator.status(), coordinator.counts, coordinator.readiness.health()).decode()
    await coordinator.close()
    (value,) = [
        line.split()[1]
        for line in text.splitlines()
        if line.startswith("kvlink_coordinator_certificate_expiry_timestamp_seconds ")
    ]
    assert float(value) == ends
    plain = Coordinator()
    assert b"certificate" not in exposition(await plain.status(), plain.counts, plain.readiness.health())


@pytest.mark.parametrize("name", ["\x1b[31mred", "w\x1b]0;title\x07", "w\n", "w\u202e", "w\x9b1m", "\ud800"])
async def test_names_that_a_terminal_would_obey_are_refused(name: str) -> None:
    coordinator = Coordinator()
    async with CoordinatorClient(await coordinator.start()) as client:
        with pytest.raises(ConfigError, match=r"cannot be printed|surrogate|cannot send"):
            await client.join(make_card(name))
        await client.join(make_card())
        with pytest.raises(ConfigError, match=r"cannot be printed|surrogate|cannot send"):
            await client.offer(make_offer("r")._replace(request_id=name))
    await coordinator.close()


def test_what_is_shown_in_tracebacks_has_no_secret() -> None:
    secret, nonce = b"\xfa\xceSECRET", 0xFACE5EC2E7
    shown = [
        make_offer("r")._replace(ticket=secret),
        SettleOrder("w", 1, 3, nonce),
        Claim("r", claim_id=secret),
        Renewal("w", 1, [(3, nonce)]),
        Push(PushKind.SETTLE, 3, nonce),
        HandoffResults(1, 1, [(0, [secret])], []),
        ConnectReply(1, [secret], (secret,), (secret,)),
        ConnectRequest("w", 1, "tcp", [secret]),
        LeaseSeat(3, nonce, nonce),
        TransportCard("tcp", b"", (secret,), (secret,)),
    ]
    for value in [*shown, shown]:
        assert "SECRET" not in repr(value)
        assert str(nonce) not in repr(value)
    assert repr(shown[1]) == "SettleOrder('w' epoch 1, slot 3)"


class Broken(MemoryStore):
    async def worker(self, worker_id: str, epoch: int) -> WorkerCard:
        raise ZeroDivisionError

    def claim(self, claim: Claim) -> EagerFuture[list[bytes]]:
        answer: EagerFuture[list[bytes]] = EagerFuture()
        answer.set_exception(ZeroDivisionError())
        return answer


async def test_failures_in_streams_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(Broken())
    async with CoordinatorClient(await coordinator.start()) as client:
        for _ in range(2):
            async with client.handoffs() as stream:
                claims = [stream.claim(Claim(f"r{number}")) for number in range(30)]
                results = await asyncio.gather(*claims, return_exceptions=True)
                assert all(isinstance(result, CoordinatorError) for result in results)
    await coordinator.close()
    assert len([record for record in caplog.records if record.exc_info]) == 10


async def test_failures_are_logged_at_a_bounded_rate(caplog: pytest.LogCaptureFixture) -> None:
    coordinator = Coordinator(Broken())
    async with CoordinatorClient(await coordinator.start()) as client:
        for number in range(50):
            with pytest.raises(CoordinatorError, match="ZeroDivisionError"):
                await client.worker(f"w{number}")
    await coordinator.close()
    assert len([record for record in caplog.records if record.exc_info]) == 10
