# SPDX-License-Identifier: Apache-2.0
"""Mutual TLS between real servers and clients over loopback: who believes whom, and what is said when they do not."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.certificates import HOSTS, Pki, secured, write

from kvlink.config import WorkerConfig
from kvlink.control import AgentClient, CoordinatorClient, Security, Session, WorkerAgent
from kvlink.control.security import COORDINATOR, tenant_name
from kvlink.control.security.authority import Authority
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.coordinator.tenant_stores import stores
from kvlink.errors import AccessDenied, ConfigError, CoordinatorUnavailable, KVLinkError

ACME = tenant_name("acme")
PLAINTEXT = Security()


@pytest.fixture
def pki(tmp_path: Path) -> Pki:
    return Pki(tmp_path)


async def failed_status(address: str, client: Security) -> KVLinkError:
    """Returns the error of a single attempt, because a call that runs out of time would not say why."""
    async with CoordinatorClient(address, 20.0, client) as caller:
        caller._channel._patience_s = 0.0
        with pytest.raises(KVLinkError) as caught:
            await caller.status()
    return caught.value


async def failure(server: Security, client: Security) -> KVLinkError:
    coordinator = Coordinator(security=server)
    error = await failed_status(await coordinator.start(), client)
    await coordinator.close()
    return error


async def test_a_ticket_goes_from_one_worker_to_another(pki: Pki) -> None:
    coordinator = Coordinator(security=pki.coordinator())
    address = await coordinator.start()
    async with (
        CoordinatorClient(address, security=pki.worker()) as prefill,
        CoordinatorClient(address, security=pki.worker()) as decode,
    ):
        session = await Session.join(prefill, make_card(), lambda slot, nonce: None)
        claim = asyncio.create_task(decode.claim("r", timeout_s=20.0))
        await session.offer(make_offer("r"))
        assert await claim == [make_offer("r").ticket]
        async with decode.handoffs() as stream:
            await stream.offer(make_offer("s"))
        assert (await decode.status()).claimed == 1
        await session.close()
    await coordinator.close()


OTHERS = Authority.make().pem.cert
SERVERS: dict[str, tuple[Callable[[Pki], Security], type[KVLinkError], str]] = {
    "expired": (
        lambda pki: pki.unchecked([COORDINATOR, *HOSTS], expired=True),
        CoordinatorUnavailable,
        "Its certificate has expired: renew it",
    ),
    "another CA": (
        lambda pki: Pki(pki.folder).unchecked([COORDINATOR, *HOSTS]),
        CoordinatorUnavailable,
        "not issued by a CA in this process's KVLINK_TLS_CA: give both the same CA",
    ),
    "not a coordinator's": (
        lambda pki: pki.unchecked([ACME, *HOSTS], says=[COORDINATOR]),
        CoordinatorUnavailable,
        f"lacks the name {COORDINATOR}",
    ),
    "another host's": (
        lambda pki: pki.unchecked([COORDINATOR, "10.1.2.3"]),
        AccessDenied,
        "does not have the host name of its address: issue one with that name or address, or .*KVLINK_TLS_HOSTS=0",
    ),
    "plaintext": (
        lambda pki: PLAINTEXT,
        CoordinatorUnavailable,
        "speaks plaintext and this process TLS: give it certificates .*kvlink certs",
    ),
}


@pytest.mark.parametrize("server", SERVERS)
async def test_a_client_says_what_is_wrong_with_a_server(pki: Pki, server: str) -> None:
    make, kind, says = SERVERS[server]
    error = await failure(make(pki), pki.worker())
    assert type(error) is kind
    with pytest.raises(KVLinkError, match=says):
        raise error


CLIENTS: dict[str, tuple[Callable[[Pki], Security], str]] = {
    "expired": (
        lambda pki: pki.unchecked([ACME, *HOSTS], expired=True),
        rf"closed the connection: this process's certificate \({ACME}.*; expired .*\) has expired; renew it",
    ),
    "another CA": (
        lambda pki: Pki(pki.folder).unchecked([ACME], trusts=pki.authority.pem.cert),
        rf"does not trust this process's certificate \({ACME}; expires .*\)\. Give both the same CA",
    ),
    "plaintext": (
        lambda pki: PLAINTEXT,
        "at once. If it requires TLS, give this process certificates .*KVLINK_TLS_CA.*kvlink certs",
    ),
}


@pytest.mark.parametrize("client", CLIENTS)
async def test_a_client_that_is_not_believed_says_so(pki: Pki, client: str) -> None:
    make, says = CLIENTS[client]
    error = await failure(pki.coordinator(), make(pki))
    with pytest.raises(CoordinatorUnavailable, match=says):
        raise error


async def test_a_certificate_that_names_no_tenant_is_refused_by_the_coordinator(pki: Pki) -> None:
    for names in (["somebody.example.org"], [ACME, tenant_name("other")]):
        error = await failure(pki.coordinator(), pki.unchecked(names))
        with pytest.raises(AccessDenied, match=r"names \d tenants, not one: .*kvlink certs.*--tenants file"):
            raise error


async def test_hosts_need_not_be_named_where_that_is_switched_off(pki: Pki) -> None:
    coordinator = Coordinator(security=pki.unchecked([COORDINATOR, "10.1.2.3"]))
    client = replace(pki.worker(), check_hosts=False)
    async with CoordinatorClient(await coordinator.start(), security=client) as caller:
        assert (await caller.status()).workers == 0
    await coordinator.close()


def accept(transport: str, hellos: list[bytes], takes_keys: bool, caller: int) -> tuple[int, list[bytes]]:
    return 1, hellos


async def test_an_agent_answers_its_own_tenant_alone(pki: Pki) -> None:
    agent = WorkerAgent(
        accept, lambda slot, nonce: True, lambda slot, nonce: True, security=pki.worker("acme")
    )
    address = await agent.start()
    agent.publish(make_card())
    async with AgentClient(address, security=pki.worker("acme")) as client:
        assert await client.card() == make_card()
        assert (await client.connect("prefill", 1, "tcp", [b"hello"])).connection_id == 1
    # Another tenant's client does not even speak to it ...
    async with AgentClient(address, security=pki.worker("other")) as client:
        with pytest.raises(CoordinatorUnavailable, match="lacks the name other"):
            await client.card()
    # ... and one that does is refused.
    for name in (tenant_name("other"), COORDINATOR):
        async with AgentClient(address, security=pki.unchecked([name], says=[ACME])) as client:
            refused = [client.card, lambda: client.connect("prefill", 1, "tcp", [b""])]
            if name == COORDINATOR:  # which has the card, and asks whether its worker still runs
                assert await refused.pop(0)() == make_card()
            for call in refused:
                with pytest.raises(AccessDenied, match=f"belongs to tenant 'acme' and .*; yours has {name}"):
                    await call()
    await agent.close()


@pytest.mark.verify
async def test_certificates_change_and_running_calls_go_on(pki: Pki) -> None:
    """Both ends move to another CA, by way of trusting both: no call fails and the session never joins again."""
    server_files = pki.files("server", [COORDINATOR, *HOSTS])
    client_files = pki.files("client", [ACME, *HOSTS])
    server, client = secured(server_files), secured(client_files)
    coordinator = Coordinator(stores(lambda tenant: MemoryStore(60.0), server), 0.6, security=server)
    async with CoordinatorClient(await coordinator.start(), security=client) as caller:
        session = await Session.join(caller, make_card(), lambda slot, nonce: None)
        claim = asyncio.create_task(caller.claim("r", timeout_s=30.0))
        await asyncio.sleep(0.05)
        old, new = pki.authority, Authority.make()
        both = old.pem.cert + new.pem.cert
        for authority, trusted in ((old, both), (new, both), (new, new.pem.cert)):
            pki.authority = authority
            for files, names in ((server_files, [COORDINATOR]), (client_files, [ACME])):
                write(files, trusted, pki.issue([*names, *HOSTS]))
            assert (await caller.status()).workers == 1
        await asyncio.sleep(1.0)  # several beats
        await session.offer(make_offer("r"))
        assert await claim == [make_offer("r").ticket]
        assert session.num_rejoins == 0
        for security in (server, client):
            assert security.keyring is not None
            assert security.keyring.number == 3
        # Who has only the old CA is a stranger by now.
        pki.authority = old
        with pytest.raises(CoordinatorUnavailable, match="not issued by a CA"):
            raise await failed_status(coordinator.address, pki.worker())
        await session.close()
    await coordinator.close()


def test_servers_need_certificates_of_their_kind(pki: Pki) -> None:
    with pytest.raises(
        ConfigError, match=f"must have the DNS name {COORDINATOR}; KVLINK_TLS_CERT has {ACME}"
    ):
        Coordinator(security=pki.worker())
    with pytest.raises(ConfigError, match=f"of exactly one tenant; KVLINK_TLS_CERT has {COORDINATOR}"):
        WorkerAgent(accept, lambda slot, nonce: True, lambda slot, nonce: True, security=pki.coordinator())
    with pytest.raises(ConfigError, match=r"tenant_stores\.stores"):
        Coordinator(MemoryStore(), security=pki.coordinator())


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node-7"])
async def test_plaintext_off_loopback_is_asked_for_or_not_done(host: str) -> None:
    refused = "without TLS must be allowed explicitly: set KVLINK_TLS_CA.*kvlink certs.*KVLINK_INSECURE=1"
    with pytest.raises(ConfigError, match=f"listening on {host} {refused}"):
        await Coordinator().start(host)
    address = f"[{host}]:7400" if ":" in host else f"{host}:7400"
    for client in (AgentClient, CoordinatorClient):
        with pytest.raises(ConfigError, match=rf"calling .*{host}.*:7400 {refused}"):
            client(address)
        await client(address, security=Security(insecure=True)).close()


async def test_plaintext_off_loopback_works_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVLINK_INSECURE", "1")
    coordinator = Coordinator()
    address = await coordinator.start("0.0.0.0")
    own = f"{_own_address()}:{address.rpartition(':')[2]}"
    async with CoordinatorClient(own) as client:
        await client.join(make_card())
    await coordinator.close()


def _own_address() -> str:
    """Returns the address of an interface that is not loopback, if there is one."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as unconnected:
        try:
            unconnected.connect(("10.255.255.255", 1))
        except OSError:
            return "127.0.0.1"
        return str(unconnected.getsockname()[0])


def test_settings_go_together(pki: Pki) -> None:
    ca, cert, key = map(str, pki.files("worker", [ACME]))
    with pytest.raises(ConfigError, match="set all of them or none"):
        Security.of(WorkerConfig(tls_ca=ca, tls_cert=cert))
    with pytest.raises(ConfigError, match=r"cannot read the token in token \(KVLINK_TOKEN_FILE\)"):
        Security.of(WorkerConfig(token_file="token"))
    with pytest.raises(ConfigError, match=r"--tenants t\.json has no effect without TLS"):
        Security().coordinator_gate("t.json")
    made = Security.from_env({"KVLINK_TLS_CA": ca, "KVLINK_TLS_CERT": cert, "KVLINK_TLS_KEY": key})
    assert made.tenant() == "acme"
    assert "BEGIN" not in repr(made)
