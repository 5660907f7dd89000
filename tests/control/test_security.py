# SPDX-License-Identifier: Apache-2.0
"""TLS decides who may call: its files, certificates, and tokens."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from control.cards import make_card, make_offer
from control.certificates import HOSTS, Pki, secured, write
from cryptography.hazmat.primitives import serialization
from transports.pools import fill, wide
from waiting import eventually

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.control import AgentClient, CoordinatorClient, Security, Session, WorkerAgent
from kvlink.control.security import COORDINATOR, Keyring, tenant_name
from kvlink.control.security.authority import Authority, names_in
from kvlink.control.security.tokens import bearer
from kvlink.coordinator import Coordinator
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.coordinator.tenant_stores import stores
from kvlink.doctor import Verdict, certificates
from kvlink.errors import AccessDenied, ConfigError, CoordinatorUnavailable, KVLinkError, UnknownRequest

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
    with pytest.raises(
        ConfigError, match=r"cannot read /nowhere/x: No such .* \(KVLINK_TLS_CA, _CERT, _KEY\)"
    ):
        Security.of(WorkerConfig(tls_ca=ca, tls_cert="/nowhere/x", tls_key=key))
    with pytest.raises(ConfigError, match=r"cannot read the token in token \(KVLINK_TOKEN_FILE\)"):
        Security.of(WorkerConfig(token_file="token"))
    with pytest.raises(ConfigError, match=r"--tenants t\.json has no effect without TLS"):
        Security().coordinator_gate("t.json")
    made = Security.from_env({"KVLINK_TLS_CA": ca, "KVLINK_TLS_CERT": cert, "KVLINK_TLS_KEY": key})
    assert made.tenant() == "acme"
    assert "BEGIN" not in repr(made)


def test_files_that_do_not_fit_are_not_taken(pki: Pki, caplog: pytest.LogCaptureFixture) -> None:
    files = pki.files("worker", [ACME])
    ring = Keyring(files, look_every_s=0.0)
    before = ring.current()
    files.key.write_bytes(pki.issue([ACME]).key)
    assert ring.current() is before
    assert "key values mismatch" in caplog.text
    write(files, pki.authority.pem.cert, pki.issue([ACME, "a.example.org"]))
    assert ring.current().names == (ACME, "a.example.org")


def encrypted(key: bytes) -> bytes:
    locked = serialization.BestAvailableEncryption(b"secret")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return serialization.load_pem_private_key(key, None).private_bytes(pem, pkcs8, locked)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda pki, files: files.key.unlink(), r"worker\.key.*KVLINK_TLS_CA, _CERT, _KEY"),
        (lambda pki, files: files.key.write_bytes(pki.issue([ACME]).key), "key values mismatch"),
        (
            lambda pki, files: files.key.write_bytes(encrypted(files.key.read_bytes())),
            "are not a certificate, its key and its CA in PEM",
        ),
        (
            lambda pki, files: files.cert.write_bytes(b"?"),
            "are not a certificate, its key and its CA in PEM",
        ),
        (lambda pki, files: files.ca.write_bytes(OTHERS), "not valid under .*issuer certificate; renew it"),
        (
            lambda pki, files: write(files, pki.authority.pem.cert, pki.issue([ACME], expired=True)),
            "has expired; renew",
        ),
    ],
)
def test_bad_files_are_refused_at_the_start(pki: Pki, spoil: Callable[..., object], says: str) -> None:
    files = pki.files("worker", [ACME])
    spoil(pki, files)
    with pytest.raises(ConfigError, match=says):
        Keyring(files)


POOL = wide(num_blocks=16)
LOOPBACK = ["localhost", "127.0.0.1", "::1"]


def kvlink(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvlink", *arguments],
        env=_environment(env or {}),
        capture_output=True,
        text=True,
        timeout=60,
    )


def _environment(env: dict[str, str]) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVLINK_")}
    return clean | env


def settings(stdout: str) -> list[dict[str, str]]:
    """Returns the settings of each `export` line, in order: the coordinator, then each tenant."""
    lines = [shlex.split(line)[1:] for line in stdout.splitlines() if line.startswith("export ")]
    return [dict(word.split("=", 1) for word in words) for words in lines]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("made") / "certs"
    done = kvlink("certs", "--dir", str(folder), "--tenant", "acme", "--tenant", "other")
    assert done.returncode == 0, done.stderr
    return settings(done.stdout)


def test_keys_are_their_owners_and_nothing_is_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    assert kvlink("certs", "--dir", str(folder)).returncode == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    names = ("ca", "coordinator", "default")
    assert modes.pop("default.tickets") == 0o600
    assert modes == {f"{name}.key": 0o600 for name in names} | {f"{name}.pem": 0o644 for name in names}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    again = kvlink("certs", "--dir", str(folder))
    assert again.returncode == 2
    assert "already has certificates for coordinator, default; pass --renew to replace them" in again.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    assert kvlink("certs", "--dir", str(folder), "--renew").returncode == 0
    changed = {path.name for path in folder.iterdir() if path.read_bytes() != before[path.name]}
    assert changed == {"coordinator.key", "coordinator.pem", "default.key", "default.pem"}


def test_renewal_keeps_hosts_and_tenants_and_adds_hosts(tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    make = ("certs", "--dir", str(folder))
    assert kvlink(*make, "--host", "10.0.0.5", "--host", "prefill-1").returncode == 0
    assert kvlink(*make, "--tenant", "acme", "--host", "10.0.0.7").returncode == 0, "a second tenant is added"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert names_in(before["acme.pem"])[1:] == [*LOOPBACK, "10.0.0.5", "prefill-1", "10.0.0.7"]
    assert names_in(before["default.pem"])[1:] == [*LOOPBACK, "10.0.0.5", "prefill-1"]

    assert kvlink(*make, "--renew", "--host", "10.0.0.9").returncode == 0
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    pairs = {f"{name}.{kind}" for name in ("coordinator", "default", "acme") for kind in ("pem", "key")}
    assert {name for name in after if after[name] != before[name]} == pairs
    for name in ("coordinator.pem", "default.pem", "acme.pem"):
        assert names_in(after[name]) == [*names_in(before[name]), "10.0.0.9"]

    assert kvlink(*make, "--renew", "--tenant", "acme").returncode == 0
    assert (folder / "default.pem").read_bytes() == after["default.pem"], "another tenant was named"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--tenant", "Acme Inc"], "'Acme Inc' is not a valid tenant"),
        (["--tenant", "coordinator"], "cannot be called coordinator"),
        (["--host", "grüße"], "--host 'grüße' is neither a host name nor an IP address"),
    ],
)
def test_bad_names_are_refused(tmp_path: Path, arguments: list[str], says: str) -> None:
    done = kvlink("certs", "--dir", str(tmp_path / "certs"), *arguments)
    assert done.returncode == 2
    assert says in done.stderr


def test_without_the_extra_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['cryptography'] = None; from kvlink.cli import main; main(['certs'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, "pip install 'kvlink[certs]'" in done.stderr) == (2, True), done.stderr


def test_a_token_is_a_secret_file_and_a_public_rule(tmp_path: Path) -> None:
    file = tmp_path / "token"
    done = kvlink("certs", "--token", str(file), "--tenant", "acme")
    rule = json.loads(done.stdout)
    assert rule["tenant"] == "acme"
    assert re.fullmatch("[0-9a-f]{64}", rule["token_sha256"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert file.read_text().strip() not in done.stdout
    assert kvlink("certs", "--token", str(file)).returncode == 2


@contextmanager
def coordinator(env: dict[str, str], *arguments: str) -> Iterator[str]:
    """`kvlink coordinator` on any free port. Yields the port."""
    command = [sys.executable, "-m", "kvlink", "coordinator", "--port", "0", *arguments]
    process = subprocess.Popen(
        command, env=_environment(env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("kvlink coordinator on "), process.communicate()
        yield line.strip().rpartition(":")[2]
    finally:
        process.terminate()
        process.communicate()


def worker(name: str, env: dict[str, str], at: str = "") -> Worker:
    return Worker(POOL.make(), name, coordinator=at, transports="tcp", config=WorkerConfig.from_env(env))


def holds(reader: Worker, into: list[int], owner: Worker, blocks: list[int]) -> bool:
    theirs, ours = (worker.pool.numpy(0).reshape(POOL.num_blocks, -1) for worker in (owner, reader))
    return bool((ours[into] == theirs[blocks]).all() and theirs[blocks].any())


@pytest.mark.parametrize(
    ("header", "token"),
    [
        ("Bearer t0ken", "t0ken"),
        (b"Bearer t0ken", "t0ken"),
        ("Basic t0ken", ""),
        ("t0ken", ""),
        (f"Bearer {'t' * 4_096}", ""),
        (b"Bearer \xff", "\ufffd"),
    ],
)
def test_a_token_is_read_from_a_header_of_its_scheme_and_of_bounded_length(
    header: str | bytes, token: str
) -> None:
    assert bearer(header) == token


def test_a_deployment_of_two_tenants(made: list[dict[str, str]]) -> None:
    own, acme, other = made
    with coordinator(own, "--host", "0.0.0.0") as port:
        at = f"127.0.0.1:{port}"
        with (
            worker("prefill", acme, at) as owner,
            worker("decode", acme, at) as reader,
            worker("thief", other, at) as thief,
        ):
            fill(owner.pool, 1)
            owner.offer("r", [3, 1, 2], publish=True)
            pull = reader.pull("r", [4, 5, 6])
            assert pull.wait(20)
            assert "over tcp" in str(pull.explain()[0])
            assert ", not encrypted" in str(pull.explain()[0])
            assert holds(reader, [4, 5, 6], owner, [3, 1, 2])

            stolen = owner.offer("s", [3, 1, 2], publish=True).to_text()
            with pytest.raises(UnknownRequest, match="no worker offered it"):
                thief.pull("s", [4, 5, 6], timeout_s=0.2).wait(20)
            with pytest.raises(AccessDenied, match="not signed by any of this tenant's keys"):
                thief.pull(Ticket.from_text(stolen), [4, 5, 6])
            cunning = worker("cunning", other | {"KVLINK_TICKET_KEYS": acme["KVLINK_TICKET_KEYS"]})
            with cunning, pytest.raises(KVLinkError, match="lacks the name other"):
                cunning.pull(Ticket.from_text(stolen), [4, 5, 6], timeout_s=2).wait(20)
            ended = eventually(owner.events)
            assert ([event.request_id for event in ended], owner.lease_counts().active) == (["r"], 1)

            status = kvlink("status", "--coordinator", at, "--json", env=own)
            assert status.returncode == 0, status.stderr
            assert [json.loads(line).get("worker") for line in status.stdout.splitlines()][1:] == [
                "decode",
                "prefill",
                "thief",
            ]
            of_tenant = kvlink("status", "--coordinator", at, "--json", env=other)
            assert [json.loads(line).get("worker") for line in of_tenant.stdout.splitlines()][1:] == ["thief"]
        plain = kvlink("status", "--coordinator", at)
        assert plain.returncode == 1
        assert "If it requires TLS, give this process certificates" in plain.stderr


def test_a_coordinator_off_loopback_wants_certificates_or_the_flag() -> None:
    done = kvlink("coordinator", "--host", "0.0.0.0", "--port", "0")
    assert done.returncode == 2
    assert "listening on 0.0.0.0 without TLS must be allowed explicitly: set KVLINK_TLS_CA" in done.stderr
    with coordinator({}, "--host", "0.0.0.0", "--insecure") as port:
        assert kvlink("status", "--coordinator", f"127.0.0.1:{port}").returncode == 0


def test_a_worker_off_loopback_wants_certificates_or_the_flag() -> None:
    with pytest.raises(ConfigError, match=r"calling 10\.1\.2\.3:7400 without TLS must be allowed explicitly"):
        worker("w", {}, "10.1.2.3:7400")


def test_a_worker_with_certificates_wants_ticket_keys_or_to_be_told(made: list[dict[str, str]]) -> None:
    without = {name: value for name, value in made[1].items() if name != "KVLINK_TICKET_KEYS"}
    with pytest.raises(ConfigError, match=r"set KVLINK_TICKET_KEYS .*or KVLINK_TICKET_KEYS=none"):
        worker("w", without)
    with worker("w", without | {"KVLINK_TICKET_KEYS": "none"}) as unsigned:
        assert not unsigned.offer("r", [1]).signature


def test_the_doctor_checks_certificates(made: list[dict[str, str]], tmp_path: Path) -> None:
    def evidence(**env: str) -> tuple[Verdict, str, str]:
        (check,) = certificates.checks(env)
        return check.verdict, check.evidence, check.fix

    verdict, says, _ = evidence(**made[1])
    assert (verdict, "acme.tenant.kvlink.internal" in says) == (Verdict.PASS, True)
    verdict, says, _ = evidence()
    assert (verdict, says.startswith("none: plaintext, on this host alone")) == (Verdict.PASS, True)
    assert evidence(KVLINK_HOST="10.1.2.3")[0] is Verdict.FAIL
    assert evidence(KVLINK_HOST="10.1.2.3", KVLINK_INSECURE="1")[0] is Verdict.WARN
    verdict, says, fix = evidence(**made[1] | {"KVLINK_TLS_KEY": made[2]["KVLINK_TLS_KEY"]})
    assert (verdict, "key values mismatch" in says, "kvlink certs" in fix) == (Verdict.FAIL, True, True)
    folder = str(tmp_path / "short")
    short = settings(kvlink("certs", "--dir", folder, "--days", "0.5").stdout)[1]
    assert evidence(**short)[0] is Verdict.WARN


def test_the_doctor_warns_a_day_before_a_certificate_expires(made: list[dict[str, str]]) -> None:
    config = WorkerConfig.from_env(made[1])
    ring = Security.of(config).keyring
    assert ring is not None
    expires_at = ring.current().expires_at
    for left_h, verdict in ((24.1, Verdict.PASS), (23.9, Verdict.WARN), (-1.0, Verdict.WARN)):
        check = certificates.certificates(config, lambda left_h=left_h: expires_at - left_h * 3600.0)
        assert (check.verdict, "renew it" in check.fix) == (verdict, verdict is Verdict.WARN), left_h
