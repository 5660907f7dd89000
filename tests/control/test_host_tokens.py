# SPDX-License-Identifier: Apache-2.0
"""Without certificates a server on loopback answers those who can read the same token, in every call."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
from control.cards import make_card, make_offer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transports.pools import wide
from waiting import until

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.config.addresses import split_address
from kvlink.control import AgentClient, CoordinatorClient, Security, WorkerAgent
from kvlink.control.codec import AgentCalls, CoordinatorCalls, Method
from kvlink.control.security.host_tokens import (
    HEADER,
    Metadata,
    Prover,
    SharedToken,
    Verdict,
    Verifier,
    host_tokens,
)
from kvlink.control.session import Session, SessionState
from kvlink.control.values import Claim, Membership
from kvlink.coordinator import Coordinator
from kvlink.errors import AccessDenied, ConfigError, UnknownRequest

HOW = "run both as one user, or set KVLINK_TOKEN_FILE of both to one file"


def methods(of: type) -> list[str]:
    return [each.path for each in vars(of).values() if isinstance(each, Method)]


BEYOND = [
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.health.v1.Health/Watch",
    "/kvlink.v1.Coordinator/NoSuchMethod",
]


@dataclass(frozen=True)
class Tokens:
    folder: Path

    def file(self, name: str) -> str:
        path = self.folder / name
        path.write_text(f"the token of {name}\n")
        path.chmod(0o600)
        return str(path)

    def security(self, name: str) -> Security:
        return Security(token_file=self.file(name))


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path)


def never(*_: object) -> bool:
    raise AssertionError("it was called")


@pytest.fixture
async def agent(tokens: Tokens) -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent(never, never, never, reflect=True, security=tokens.security("owner"))  # type: ignore[arg-type]
    await agent.start()
    agent.publish(make_card())
    yield agent
    await agent.close()


@pytest.fixture
async def coordinator(tokens: Tokens) -> AsyncIterator[Coordinator]:
    coordinator = Coordinator(reflect=True, security=tokens.security("owner"))
    await coordinator.start()
    yield coordinator
    await coordinator.close()


async def refusal(address: str, path: str) -> grpc.aio.AioRpcError:
    """Returns the refusal of a call that has sent nothing yet."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(path)()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    return caught.value


@pytest.mark.parametrize("path", [*methods(CoordinatorCalls), *BEYOND])
async def test_no_call_to_a_coordinator_goes_without_its_token(coordinator: Coordinator, path: str) -> None:
    error = await refusal(coordinator.address, path)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert HOW in (error.details() or "")


@pytest.mark.parametrize("path", [*methods(AgentCalls), *BEYOND])
async def test_no_call_to_an_agent_goes_without_its_token(agent: WorkerAgent, path: str) -> None:
    error = await refusal(agent.address, path)
    assert error.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "this worker agent has no certificate and answers processes that show the token in" in str(error)


async def test_probes_need_none(coordinator: Coordinator) -> None:
    async with grpc.aio.insecure_channel(coordinator.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_another_users_client_hears_what_to_do(
    coordinator: Coordinator, agent: WorkerAgent, tokens: Tokens
) -> None:
    async with CoordinatorClient(coordinator.address, security=tokens.security("thief")) as client:
        for call in (client.join(make_card()), client.claim("r", 0.0), client.worker("prefill")):
            with pytest.raises(AccessDenied, match=HOW):
                await call
        with pytest.raises(AccessDenied, match=HOW):
            await client.handoffs().claim(Claim("r"))
        with pytest.raises(AccessDenied, match=HOW):
            await anext(client.watch())
    async with AgentClient(agent.address, security=tokens.security("thief")) as client:
        with pytest.raises(AccessDenied, match=f"worker agent at {agent.address}: .*{HOW}"):
            await client.card()
    assert coordinator.counts.refusals["Join", "DENIED"] == 1


async def test_who_has_the_token_gets_everything(coordinator: Coordinator, tokens: Tokens) -> None:
    async with CoordinatorClient(coordinator.address, security=tokens.security("owner")) as client:
        await client.join(make_card())
        async with client.handoffs() as stream:
            await stream.offer(make_offer("r"))
        assert await client.claim("r", 0.0) == [make_offer("r").ticket]
        assert (await anext(client.watch())).card == make_card()


async def test_a_tool_may_send_the_token_itself(coordinator: Coordinator, tokens: Tokens) -> None:
    method = CoordinatorCalls.LIST_WORKERS
    async with grpc.aio.insecure_channel(coordinator.address) as channel:
        ask = channel.unary_unary(method.path)
        assert await ask(b"", metadata=(("authorization", "Bearer the token of owner"),)) == b""
        with pytest.raises(grpc.aio.AioRpcError, match="has no certificate"):
            await ask(b"", metadata=(("authorization", "Bearer the token of thief"),))


# Another user may take the port of a server that has ended, and answer whatever he likes.


class Imposter(Security):
    """Admits everybody, and has no token to prove."""

    def verifier(self, host: str) -> Verifier | None:
        return None


@pytest.fixture
async def imposter(
    coordinator: Coordinator, tokens: Tokens
) -> AsyncIterator[tuple[Coordinator, CoordinatorClient]]:
    """A coordinator at the port of one that has ended, and a client of that one, which is connected."""
    async with CoordinatorClient(coordinator.address, security=tokens.security("owner")) as client:
        await client.join(make_card())
        await coordinator.close()
        taken = Coordinator(security=Imposter(token_file=tokens.file("thief")))
        await taken.start(*split_address(coordinator.address))
        async with CoordinatorClient(taken.address, security=Imposter(insecure=True)) as accomplice:
            await accomplice.join(make_card("thief"))
            await accomplice.offer(make_offer("r", worker_id="thief"))
        yield taken, client
        await taken.close()


async def test_nothing_is_believed_of_who_took_the_port(
    imposter: tuple[Coordinator, CoordinatorClient],
) -> None:
    _, client = imposter
    for call in (
        client.claim("r", 0.0),
        client.join(make_card()),
        client.worker("thief"),
        client.offer(make_offer("r")),  # is answered by a refusal
        client.handoffs().claim(Claim("r")),
        anext(client.watch()),
    ):
        with pytest.raises(AccessDenied, match="did not prove that it knows the token of this process"):
            await call


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "127.0.0.1"])
async def test_localhost_is_the_address_where_servers_listen(
    coordinator: Coordinator, tokens: Tokens, name: str
) -> None:
    """At ::1 another user may listen on the same port, and pass calls and proofs on."""
    host, port = split_address(coordinator.address)
    with suppress(OSError), socket.create_server(("::1", port), family=socket.AF_INET6) as passes_on:
        passes_on.setblocking(False)
        async with CoordinatorClient(f"{name}:{port}", security=tokens.security("owner")) as client:
            assert await client.workers() == []
        with pytest.raises(BlockingIOError):
            passes_on.accept()
    assert host == "127.0.0.1"


async def test_a_member_stays_with_its_own_coordinator(
    imposter: tuple[Coordinator, CoordinatorClient], tokens: Tokens
) -> None:
    """It joins no other one, and publishes no ticket there."""
    taken, client = imposter
    session = Session(client, make_card(), Membership(1, 60.0, 20.0), never)
    try:
        await until(lambda: session.state is SessionState.REJOINING)
        with pytest.raises(AccessDenied, match="did not prove"):
            await session._rejoin()
        offering = asyncio.create_task(session.offer(make_offer("mine")))
        async with CoordinatorClient(taken.address, security=Imposter(insecure=True)) as accomplice:
            with pytest.raises(UnknownRequest):
                await accomplice.claim("mine", 0.0)
        offering.cancel()
        assert session.state is SessionState.REJOINING
    finally:
        await session.close()


# What is sent along is good for one port, and not for long.


class Clock:
    now = 5_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def token(tokens: Tokens) -> SharedToken:
    return SharedToken(Path(tokens.file("owner")))


def verdict(token: SharedToken, clock: Clock, sent: Sequence[tuple[str, str]], port: int = 7400) -> Verdict:
    verifier = Verifier(token, clock)
    verifier._port = port
    return verifier.judge(sent)[0]


def test_a_proof_is_good_for_its_port_alone(token: SharedToken, clock: Clock) -> None:
    proof = Prover(token, 7400, clock)().sent
    assert verdict(token, clock, proof) is Verdict.ADMITTED
    assert verdict(token, clock, proof, 7401) is Verdict.REFUSED, "it could be used here if heard there"


def test_a_proof_is_of_no_use_at_a_server_that_listened_later(token: SharedToken, clock: Clock) -> None:
    """Another user may have had the port, and have heard it there."""
    proof = Prover(token, 7400, clock)().sent
    clock.now += 0.001
    server = Verifier(token, clock)
    server.listens(7400)
    assert server.judge(proof)[0] is Verdict.TOO_EARLY
    assert server.judge(Prover(token, 7400, clock)().sent)[0] is Verdict.ADMITTED


@pytest.mark.parametrize(("passed_s", "good"), [(299, True), (301, False), (-299, True), (-301, False)])
def test_a_proof_is_good_for_minutes(token: SharedToken, clock: Clock, passed_s: float, good: bool) -> None:
    proof = Prover(token, 7400, clock)().sent
    clock.now += passed_s
    assert (verdict(token, clock, proof) is Verdict.ADMITTED) is good


def test_a_server_proves_itself_for_one_call(token: SharedToken, tokens: Tokens, clock: Clock) -> None:
    prover, server, thief = (
        Prover(token, 7400, clock),
        Verifier(token, clock),
        Verifier(SharedToken(Path(tokens.file("thief"))), clock),
    )
    server.listens(7400)
    thief.listens(7400)
    call, other = prover(), prover()
    answer = server.judge(call.sent)[1]
    assert call.is_proven(answer)
    assert not other.is_proven(answer)
    assert not call.is_proven(thief.judge(call.sent)[1])
    assert not call.is_proven(call.sent)
    assert not Metadata((), "").is_proven(()), "without a token no server can prove itself"
    assert not Metadata((), "").is_proven((("kvlink-answer", ""),))


def test_the_token_is_not_in_a_proof(token: SharedToken, clock: Clock) -> None:
    assert "the token of owner" not in repr(Prover(token, 7400, clock)())


@pytest.mark.parametrize(
    "sent", ["", ".", "5000", "5000.", "5000.00", "-1.00", "9" * 5000, "٥.00", "5000.\udcff", "x" * 60]
)
def test_what_is_no_proof_admits_nobody(token: SharedToken, clock: Clock, sent: str) -> None:
    assert verdict(token, clock, ((HEADER, sent),)) is Verdict.REFUSED
    assert verdict(token, clock, (("authorization", f"Bearer {sent}"),)) is Verdict.REFUSED


# Files that KVLINK_TOKEN_FILE names.


def test_a_file_that_every_user_can_write_is_refused(tokens: Tokens) -> None:
    path = tokens.file("all")
    Path(path).chmod(0o606)
    with pytest.raises(ConfigError, match=r"every user .* can write .*chmod o="):
        host_tokens(path)


def test_a_file_that_every_user_can_read_is_warned_of(
    tokens: Tokens, caplog: pytest.LogCaptureFixture
) -> None:
    path = tokens.file("readable")
    Path(path).chmod(0o644)
    host_tokens(path)
    assert f"can read the token (KVLINK_TOKEN_FILE), run chmod o= on it file={path}" in caplog.text


async def test_a_token_is_for_loopback_alone(tokens: Tokens) -> None:
    security = replace(tokens.security("owner"), insecure=True)
    off_loopback = "KVLINK_TOKEN_FILE without TLS is for loopback only"
    for client in (AgentClient, CoordinatorClient):
        with pytest.raises(ConfigError, match=f"calling 10.1.2.3:7400: {off_loopback}"):
            client("10.1.2.3:7400", security=security)
    with pytest.raises(ConfigError, match=f"listening on 0.0.0.0: {off_loopback}"):
        await Coordinator(security=security).start("0.0.0.0")


# The data path hangs on the agent.


@pytest.fixture
def worker(tokens: Tokens) -> AsyncIterator[Callable[[str, str], Worker]]:
    made: list[Worker] = []

    def make(name: str, transport: str) -> Worker:
        config = WorkerConfig(token_file=tokens.file(name.partition("-")[0]), transports=transport)
        made.append(Worker(wide(num_blocks=8).make(), name, config=config))
        return made[-1]

    yield make  # type: ignore[misc]
    for each in made:
        each.close()


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
def test_a_reader_with_another_token_gets_no_connection_to_the_pool(
    worker: Callable[[str, str], Worker], transport: str
) -> None:
    owner, thief = worker("owner-prefill", transport), worker("thief", transport)
    ticket = owner.offer("r", [1, 2])
    before = thief.pool.numpy().copy()
    with pytest.raises(AccessDenied, match=HOW):
        thief.pull(Ticket.from_text(ticket.to_text()), [1, 2]).wait()
    assert (thief.pool.numpy() == before).all()
    assert thief.peers() == []


def test_a_reader_with_the_same_token_reads(worker: Callable[[str, str], Worker]) -> None:
    owner, reader = worker("owner-prefill", "tcp"), worker("owner-decode", "tcp")
    reader.pull(owner.offer("r", [1, 2]), [1, 2]).wait()
    assert [peer.card.worker_id for peer in reader.peers()] == ["owner-prefill"]
    assert split_address(owner.card.agent)[0] == "127.0.0.1"
