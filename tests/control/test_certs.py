# SPDX-License-Identifier: Apache-2.0
"""`kvlink certs`, and a deployment that uses what it makes: a coordinator process, workers of two tenants."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transports.pools import fill, wide
from waiting import eventually

from kvlink import Ticket, Worker, WorkerConfig
from kvlink.control import Security
from kvlink.control.security.authority import names_in
from kvlink.doctor import Verdict, certificates
from kvlink.errors import AccessDenied, ConfigError, KVLinkError, UnknownRequest

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


def test_the_doctor_looks_at_certificates(made: list[dict[str, str]], tmp_path: Path) -> None:
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
