# SPDX-License-Identifier: Apache-2.0
"""Ticket keys and host tokens: without them nothing is answered, and no error shows them."""

from __future__ import annotations

import asyncio
import socket
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from control.cards import make_card, make_offer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from transports.pools import fill, wide
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
from kvlink.control.security.tickets import TicketKeys, ticket_signing
from kvlink.control.session import Session, SessionState
from kvlink.control.values import Claim, Membership
from kvlink.coordinator import Coordinator
from kvlink.errors import AccessDenied, ConfigError, UnknownRequest
from kvlink.ticket import LeaseSeat
from kvlink.types import ReadyUnit

Pass = Callable[[Ticket], Ticket]
KEY, OTHER = "k" * 32, "o" * 32
TICKET = Ticket("r", "prefill", 5, "127.0.0.1:1", (LeaseSeat(3, 1011, 1012),), array("I", range(40)), 640, 40)
POOL = wide(num_blocks=16)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n")
    return file


def test_a_signed_ticket_survives_the_wire(file: Path) -> None:
    keys = TicketKeys.of_file(file)
    signed = keys.sign(TICKET)
    read = Ticket.from_text(signed.to_text())
    assert read == signed
    assert keys.checked(read) is read
    assert replace(read, signature=b"") == TICKET
    assert KEY not in repr(keys)


CHANGES: dict[str, Callable[[Ticket], Ticket]] = {
    "request_id": lambda ticket: replace(ticket, request_id="s"),
    "worker_id": lambda ticket: replace(ticket, worker_id="other"),
    "epoch": lambda ticket: replace(ticket, epoch=6),
    "agent": lambda ticket: replace(ticket, agent="10.6.6.6:1"),
    "lease": lambda ticket: replace(ticket, seats=(LeaseSeat(4, 1011, 1012),)),
    "seats": lambda ticket: replace(ticket, seats=ticket.seats * 2),
    "blocks": lambda ticket: replace(ticket, block_ids=array("I", [*range(39), 90])),
    "fewer blocks": lambda ticket: replace(ticket, block_ids=ticket.block_ids[:-1]),
    "tokens": lambda ticket: replace(ticket, num_tokens=639),
    "ready": lambda ticket: replace(ticket, ready=39),
    "unit": lambda ticket: replace(ticket, ready_unit=ReadyUnit.LAYERS),
    "rank": lambda ticket: replace(ticket, rank=1),
    "ranks": lambda ticket: replace(ticket, num_ranks=2),
    "time": lambda ticket: replace(ticket, ttl_s=3600.0),
    "names that run together": lambda ticket: replace(ticket, request_id="rp", worker_id="refill"),
    "model": lambda ticket: replace(ticket, model=ticket.model + 1),
    "signature": lambda ticket: replace(ticket, signature=bytes(16)),
    "no signature": lambda ticket: replace(ticket, signature=b""),
}


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_can_be_changed(file: Path, what: str) -> None:
    keys = TicketKeys.of_file(file)
    changed = CHANGES[what](keys.sign(TICKET))
    with pytest.raises(
        AccessDenied, match=r"request (r|s|rp): the ticket is .*KVLINK_TICKET_KEYS than .*keys"
    ):
        keys.checked(Ticket.from_bytes(changed.to_bytes()))


def test_keys_change_in_three_steps(file: Path, tmp_path: Path) -> None:
    """Believe the new one everywhere, sign with it, forget the old one: no ticket in flight is refused."""
    owner_file, reader_file = file, tmp_path / "reader"
    reader_file.write_text(f"{KEY}\n")
    owner, reader = TicketKeys.of_file(owner_file, 0.0), TicketKeys.of_file(reader_file, 0.0)
    old = owner.sign(TICKET)
    for step in (f"{KEY}\n{OTHER}", f"{OTHER}\n{KEY}"):
        for mine, theirs in ((owner_file, reader_file), (reader_file, owner_file)):
            mine.write_text(step)
            reader.checked(owner.sign(TICKET))
            assert theirs != mine
        reader.checked(old)
    reader_file.write_text(OTHER)
    reader.checked(owner.sign(TICKET))
    with pytest.raises(AccessDenied):
        reader.checked(old)


@pytest.mark.parametrize("content", ["", "short", f"{KEY}\nshort", "\n".join([KEY] * 9), "ü" * 40])
def test_files_without_keys_are_refused(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(ConfigError, match="KVLINK_TICKET_KEYS"):
        TicketKeys.of_file(file)


@pytest.mark.parametrize("options", [{}, {"tls_cert": "a.pem"}], ids=["plaintext", "tls"])
def test_without_keys_nothing_is_signed_or_checked(options: dict[str, Any]) -> None:
    sign, check = ticket_signing(WorkerConfig(ticket_keys="none", **options))
    assert sign(TICKET) is check(TICKET) is TICKET


def on_loopback(file: Path, token: str, **options: Any) -> tuple[Pass, Pass]:
    """Signs and checks as a worker does that has the token and no other settings."""
    file.write_text(f"{token}\n")
    file.chmod(0o600)
    return ticket_signing(WorkerConfig(token_file=str(file), **options))


def test_a_worker_that_believes_everybody_signs_for_those_who_do_not(tmp_path: Path) -> None:
    sign, believe = on_loopback(tmp_path / "mine", KEY, insecure=True)
    _, check = on_loopback(tmp_path / "the same", KEY)
    assert check(sign(TICKET)).signature
    assert believe(TICKET) is TICKET


def test_on_loopback_the_token_of_the_host_signs(tmp_path: Path) -> None:
    sign, check = on_loopback(tmp_path / "mine", KEY)
    _, check_too = on_loopback(tmp_path / "the same", KEY)
    sign_as_another, refuse = on_loopback(tmp_path / "another", OTHER)
    read = Ticket.from_text(sign(TICKET).to_text())
    assert check(read) is check_too(read) is read
    for forged in (TICKET, sign_as_another(TICKET), *(change(read) for change in CHANGES.values())):
        with pytest.raises(
            AccessDenied, match=r"request (r|s|rp): the ticket is .*KVLINK_TOKEN_FILE of both"
        ):
            check(forged)
    with pytest.raises(AccessDenied):
        refuse(read)


class Tokens:
    """A process that shows the first token and accepts all. A token is found by a look only."""

    def __init__(self, *tokens: str) -> None:
        self.found, self.seen = [*tokens], tokens[:1]

    def prepare(self) -> None:
        raise AssertionError("only servers make a token")

    def shown(self) -> str:
        return "".join(self.seen[:1])

    def known(self, again: bool) -> Sequence[str]:
        if again:
            self.seen = tuple(self.found)
        return self.seen

    def describe_admitted(self) -> str:
        return ""


def test_a_ticket_under_any_token_of_the_user_is_good_and_one_under_a_new_token_is_found_by_a_look() -> None:
    """Processes of one user with other environments show other tokens, and a removed file is made again."""
    tokens = Tokens(KEY)
    reader = TicketKeys.of_host(tokens)
    tokens.found.append(OTHER)
    for token in (OTHER, KEY):
        reader.checked(TicketKeys.of_host(Tokens(token)).sign(TICKET))
    with pytest.raises(AccessDenied):
        reader.checked(TicketKeys.of_host(Tokens("a third one")).sign(TICKET))


def test_without_any_token_tickets_stay_unsigned_and_none_is_believed() -> None:
    keys = TicketKeys.of_host(Tokens())
    assert keys.sign(TICKET) is TICKET
    assert not keys.marked(b"message", keys.mark(b"message"))
    with pytest.raises(AccessDenied, match="is not signed"):
        keys.checked(TICKET)


def worker(name: str, keys: Path | str) -> Worker:
    config = WorkerConfig(ticket_keys=str(keys))
    return Worker(POOL.make(), name, transports="tcp", config=config)


def test_by_default_a_worker_takes_no_ticket_that_was_changed_or_made_up() -> None:
    with worker("prefill", "") as owner, worker("decode", "") as reader:
        ticket = owner.offer("r", [1, 2], readers=2)
        for forged in (replace(ticket, block_ids=array("I", [8, 9])), replace(ticket, signature=b"")):
            with pytest.raises(AccessDenied, match="request r: the ticket is"):
                reader.pull(Ticket.from_text(forged.to_text()), [1, 2])
        assert reader.pull(ticket, [1, 2], settle=False).wait(20)


def test_a_holder_of_a_ticket_cannot_ask_for_other_blocks(file: Path) -> None:
    with worker("prefill", file) as owner, worker("decode", file) as reader, worker("older", "none") as older:
        fill(owner.pool, 1)
        ticket = owner.offer("r", [1, 2], readers=2)
        own, of_others = Ticket.from_text(ticket.to_text()), replace(ticket, block_ids=array("I", [8, 9]))
        for warm in (False, True):
            for given in (of_others, [of_others], replace(of_others, signature=b"")):
                with pytest.raises(AccessDenied, match="request r: the ticket is"):
                    reader.pull(given, [1, 2], settle=False)
            with pytest.raises(AccessDenied):
                reader.connect(of_others)
            assert reader.pull(own, [1, 2], settle=False).wait(20), warm
        assert older.pull(own, [1, 2], settle=False).wait(20), "one without keys takes all, as before"
        with pytest.raises(AccessDenied, match="is not signed"):
            reader.pull(older.offer("s", [1]), [1])


def test_keys_that_take_long_to_read_hold_up_nobody_else(file: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    with worker("prefill", file) as owner, ThreadPoolExecutor(1) as elsewhere:
        sign = owner.offers.sign

        def signed(ticket: Ticket) -> Ticket:
            if ticket.request_id == "slow":
                begun.set()
                assert goes_on.wait(20)
            return sign(ticket)

        owner.offers.sign = signed
        slow = elsewhere.submit(owner.offer, "slow", [1])
        try:
            assert begun.wait(20)
            assert owner.offer("fast", [2]).signature
            assert [ticket.request_id for ticket in owner.offers.tickets()] == ["fast"]
            with pytest.raises(ConfigError, match="slow is offered already"):
                owner.offer("slow", [3])
        finally:
            goes_on.set()
        assert slow.result(20).signature
        assert len(owner.offers.tickets()) == 2


def test_a_name_that_no_ticket_holds_takes_no_lease(file: Path) -> None:
    with worker("prefill", file) as owner:
        with pytest.raises(ConfigError, match=r"request id has 513 bytes.*it must have 1 to 512 bytes"):
            owner.offer("x" * 513, [1])
        assert owner.lease_counts().granted == 0


HOW = "run both as one user, or set KVLINK_TOKEN_FILE of both to one file"


def methods(of: type) -> list[str]:
    return [each.path for each in vars(of).values() if isinstance(each, Method)]


BEYOND = [
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    "/grpc.health.v1.Health/Watch",
    "/kvlink.v1.Coordinator/NoSuchMethod",
]


@dataclass(frozen=True)
class HostTokens:
    folder: Path

    def file(self, name: str) -> str:
        path = self.folder / name
        path.write_text(f"the token of {name}\n")
        path.chmod(0o600)
        return str(path)

    def security(self, name: str) -> Security:
        return Security(token_file=self.file(name))


@pytest.fixture
def tokens(tmp_path: Path) -> HostTokens:
    return HostTokens(tmp_path)


def never(*_: object) -> bool:
    raise AssertionError("it was called")


@pytest.fixture
async def agent(tokens: HostTokens) -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent(never, never, never, reflect=True, security=tokens.security("owner"))  # type: ignore[arg-type]
    await agent.start()
    agent.publish(make_card())
    yield agent
    await agent.close()


@pytest.fixture
async def coordinator(tokens: HostTokens) -> AsyncIterator[Coordinator]:
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
    coordinator: Coordinator, agent: WorkerAgent, tokens: HostTokens
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


async def test_who_has_the_token_gets_everything(coordinator: Coordinator, tokens: HostTokens) -> None:
    async with CoordinatorClient(coordinator.address, security=tokens.security("owner")) as client:
        await client.join(make_card())
        async with client.handoffs() as stream:
            await stream.offer(make_offer("r"))
        assert await client.claim("r", 0.0) == [make_offer("r").ticket]
        assert (await anext(client.watch())).card == make_card()


async def test_a_tool_may_send_the_token_itself(coordinator: Coordinator, tokens: HostTokens) -> None:
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
    coordinator: Coordinator, tokens: HostTokens
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
    coordinator: Coordinator, tokens: HostTokens, name: str
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
    imposter: tuple[Coordinator, CoordinatorClient], tokens: HostTokens
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
def token(tokens: HostTokens) -> SharedToken:
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
    """Another user may have had the port, and have received it there."""
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


def test_a_server_proves_itself_for_one_call(token: SharedToken, tokens: HostTokens, clock: Clock) -> None:
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


def test_a_file_that_every_user_can_write_is_refused(tokens: HostTokens) -> None:
    path = tokens.file("all")
    Path(path).chmod(0o606)
    with pytest.raises(ConfigError, match=r"every user .* can write .*chmod o="):
        host_tokens(path)


def test_a_file_that_every_user_can_read_is_warned_of(
    tokens: HostTokens, caplog: pytest.LogCaptureFixture
) -> None:
    path = tokens.file("readable")
    Path(path).chmod(0o644)
    host_tokens(path)
    assert f"can read the token (KVLINK_TOKEN_FILE), run chmod o= on it file={path}" in caplog.text


async def test_a_token_is_for_loopback_alone(tokens: HostTokens) -> None:
    security = replace(tokens.security("owner"), insecure=True)
    off_loopback = "KVLINK_TOKEN_FILE without TLS is for loopback only"
    for client in (AgentClient, CoordinatorClient):
        with pytest.raises(ConfigError, match=f"calling 10.1.2.3:7400: {off_loopback}"):
            client("10.1.2.3:7400", security=security)
    with pytest.raises(ConfigError, match=f"listening on 0.0.0.0: {off_loopback}"):
        await Coordinator(security=security).start("0.0.0.0")


# The data path hangs on the agent.


@pytest.fixture
def tokened_worker(tokens: HostTokens) -> AsyncIterator[Callable[[str, str], Worker]]:
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
    tokened_worker: Callable[[str, str], Worker], transport: str
) -> None:
    owner, thief = tokened_worker("owner-prefill", transport), tokened_worker("thief", transport)
    ticket = owner.offer("r", [1, 2])
    before = thief.pool.numpy().copy()
    with pytest.raises(AccessDenied, match=HOW):
        thief.pull(Ticket.from_text(ticket.to_text()), [1, 2]).wait()
    assert (thief.pool.numpy() == before).all()
    assert thief.peers() == []


def test_a_reader_with_the_same_token_reads(tokened_worker: Callable[[str, str], Worker]) -> None:
    owner, reader = tokened_worker("owner-prefill", "tcp"), tokened_worker("owner-decode", "tcp")
    reader.pull(owner.offer("r", [1, 2]), [1, 2]).wait()
    assert [peer.card.worker_id for peer in reader.peers()] == ["owner-prefill"]
    assert split_address(owner.card.agent)[0] == "127.0.0.1"
