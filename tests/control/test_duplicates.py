# SPDX-License-Identifier: Apache-2.0
"""Names of workers: duplicates, and names that another process takes."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from control.cards import make_card, make_offer
from control.certificates import Pki
from transports.pools import wide
from waiting import closed_port, until

from kvlink import Worker, WorkerConfig
from kvlink.config.addresses import split_address
from kvlink.control import AgentClient, CoordinatorClient, Security, Session, WorkerAgent
from kvlink.control.refusal import RefusedError, Replaced, WorkerIdTaken
from kvlink.control.security import Keyring, own_file
from kvlink.control.security.keys import TlsFiles
from kvlink.control.security.tenants import TenantsFile
from kvlink.control.security.tickets import TicketKeys
from kvlink.coordinator import Coordinator, incumbents
from kvlink.coordinator.incumbents import Incumbents
from kvlink.coordinator.store.memory import MemoryStore
from kvlink.doctor import day_one
from kvlink.errors import AccessDenied, ConfigError
from kvlink.hardware.kernels.nvrtc import kept
from kvlink.monitoring.status_page.serving import serve_status_page
from kvlink.types import HostIdentity, WorkerCard


def ignore(slot: int, settle_nonce: int) -> None:
    pass


@asynccontextmanager
async def agent(security: Security | None = None, port: int = 0) -> AsyncIterator[WorkerAgent]:
    agent = WorkerAgent(lambda *_: (1, []), lambda *_: False, lambda *_: False, security=security)
    await agent.start(port=port)
    yield agent
    await agent.close()


def second(agent: str = "127.0.0.1:2") -> WorkerCard:
    return make_card(epoch=9, process=2, agent=agent)


def lines(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == level]


async def test_the_process_that_runs_stays_and_the_second_is_told_to_come_again(
    client: CoordinatorClient, coordinator: Coordinator, caplog: pytest.LogCaptureFixture
) -> None:
    async with agent() as healthy:
        session = await Session.join(client, make_card(agent=healthy.address), ignore)
        healthy.publish(session.card)
        await session.offer(make_offer("r"))
        with pytest.raises(
            WorkerIdTaken,
            match=f"'prefill' runs already: the agent of its epoch 1.*{healthy.address} answers",
        ) as refused:
            await client.join(second("10.0.0.9:7401"))
        assert refused.value.retryable
        (warning,) = lines(caplog, logging.WARNING)
        assert f"worker=prefill stays={healthy.address} refused=10.0.0.9:7401" in warning
        assert coordinator.counts.refusals["Join", "TAKEN"] == 1
        assert await client.claim("r") == [make_offer("r").ticket]
        assert (await client.worker("prefill")).epoch == 1
        await session.close()
    assert (await client.join(second())).epoch == 9, "it left: its name is free"


async def test_many_such_joins_are_a_few_lines(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    async with agent() as healthy:
        card = make_card(agent=healthy.address)
        await client.join(card)
        healthy.publish(card)
        for _ in range(15):
            with pytest.raises(WorkerIdTaken):
                await client.join(second())
    assert len(lines(caplog, logging.WARNING)) == 10


async def test_a_process_that_died_is_followed_at_once(
    client: CoordinatorClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with closed_port() as nobody:
        await client.join(make_card(agent=nobody))
        assert (await client.join(second())).epoch == 9
        (line,) = [line for line in lines(caplog, logging.INFO) if line.startswith("another process takes")]
        assert f"worker=prefill agent=127.0.0.1:2 before={nobody} because=" in line
    assert lines(caplog, logging.WARNING) == []


async def test_another_process_at_the_old_address_is_not_the_old_one(client: CoordinatorClient) -> None:
    async with agent() as reused:
        await client.join(make_card(agent=reused.address))
        reused.publish(make_card("decode", process=7, agent=reused.address))
        assert (await client.join(second())).epoch == 9


HERE, THERE = HostIdentity("boot", 1, 2, 3, 4), HostIdentity("another boot", 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("answers", "address", "host", "is_taken"),
    [
        ("the first", "10.0.0.7:1", HERE, True),
        ("the first", "127.0.0.1:1", HERE, True),
        ("the first", "127.0.0.1:1", THERE, True),
        ("the second", "10.0.0.7:1", HERE, False),
        ("the second", "10.0.0.7:1", THERE, False),
        ("the second", "127.0.0.1:1", HERE, False),
        ("the second", "127.0.0.1:1", THERE, True),
        ("nobody yet", "10.0.0.7:1", HERE, False),
        ("nobody yet", "127.0.0.1:1", THERE, True),
    ],
)
async def test_a_process_at_the_address_of_another_is_asked_for(
    answers: str, address: str, host: HostIdentity, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Service, a NAT or loopback on two hosts: the address alone does not say that the first process has ended."""
    first, newcomer = make_card(agent=address), replace(second(address), host=host)

    async def ask(address: str, tenant: str, waits: bool) -> WorkerCard:
        if answers == "nobody yet":
            await asyncio.Event().wait()
        return first if answers == "the first" else newcomer

    monkeypatch.setattr(incumbents, "_OWN_ANSWER_S", 0.0 if answers == "nobody yet" else 30.0)
    deciding = Incumbents(await started_store(first), Security(), ask).check_ended(newcomer)
    with pytest.raises(RefusedError, match="runs already") if is_taken else nullcontext():
        await deciding


async def test_a_process_that_comes_back_asks_nobody() -> None:
    async def ask(address: str, tenant: str, waits: bool) -> WorkerCard:
        raise AssertionError

    await Incumbents(await started_store(), Security(), ask).check_ended(make_card())


async def test_a_restart_on_a_fixed_port_joins_although_its_own_agent_answers(
    client: CoordinatorClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(incumbents, "_OWN_ANSWER_S", 0.0)
    async with agent() as first:
        await client.join(make_card(agent=first.address))
        first.publish(make_card(agent=first.address))
    async with agent(port=split_address(first.address)[1]) as again:
        assert again.address == first.address
        assert (await client.join(second(again.address))).epoch == 9


async def test_a_restart_at_the_same_address_does_not_wait_for_itself(client: CoordinatorClient) -> None:
    async with agent() as starting:
        await client.join(make_card(agent=starting.address))
        assert (await client.join(second(starting.address))).epoch == 9
        assert starting._server.counts.refusals["GetCard", "NOT_READY"] == 1


async def test_another_process_does_not_take_the_name_by_the_address_of_the_first(
    client: CoordinatorClient,
) -> None:
    async with agent() as healthy:
        card = make_card(agent=healthy.address)
        await client.join(card)
        healthy.publish(card)
        with pytest.raises(WorkerIdTaken):
            await client.join(second(healthy.address))


async def test_who_does_not_answer_in_time_has_lost_the_name() -> None:
    async def silent(address: str, tenant: str, waits: bool) -> WorkerCard:
        await asyncio.Event().wait()
        raise AssertionError

    await Incumbents(await started_store(), Security(), silent, answer_s=0.0).check_ended(second())


async def test_an_agent_that_is_starting_is_asked_again(client: CoordinatorClient) -> None:
    """Two pods that start at one time: the first has joined, and its agent is told in a moment."""
    async with agent() as starting:
        card = make_card(agent=starting.address)
        await client.join(card)
        joining = asyncio.create_task(client.join(second()))
        await until(lambda: starting._server.counts.refusals["GetCard", "NOT_READY"])
        starting.publish(card)
        with pytest.raises(WorkerIdTaken):
            await joining


async def test_who_says_that_it_comes_back_takes_no_name_from_a_process_that_runs(
    client: CoordinatorClient,
) -> None:
    async with agent() as healthy:
        await client.join(make_card(agent=healthy.address))
        healthy.publish(make_card(agent=healthy.address))
        with pytest.raises(WorkerIdTaken):
            await client.join(second(), rejoin=True)
        with pytest.raises(Replaced):
            await client.join(make_card(process=2), rejoin=True)
    assert (await client.join(second(), rejoin=True)).epoch == 9, "a coordinator has lost its last epochs"


async def test_under_tls_a_coordinator_may_ask_an_agent_who_it_is_and_nothing_else(tmp_path: Path) -> None:
    pki = Pki(tmp_path)
    coordinator = Coordinator(security=pki.coordinator())
    async with (
        CoordinatorClient(await coordinator.start(), security=pki.worker()) as client,
        agent(pki.worker()) as healthy,
        AgentClient(healthy.address, security=pki.coordinator(), tenant="acme") as asking,
    ):
        card = make_card(agent=healthy.address)
        await client.join(card)
        healthy.publish(card)
        with pytest.raises(WorkerIdTaken):
            await client.join(second())
        with pytest.raises(AccessDenied, match="belongs to tenant 'acme'"):
            await asking.connect("prefill", 1, "tcp", [b""])
        async with agent(pki.worker("other")) as foreign:
            await client.join(make_card("w", agent=foreign.address))
            foreign.publish(make_card("w", agent=foreign.address))
            joined = await client.join(make_card("w", epoch=9, process=2, agent="127.0.0.1:2"))
            assert joined.epoch == 9, "another tenant's agent cannot keep a name"
    await coordinator.close()


async def started_store(card: WorkerCard | None = None) -> MemoryStore:
    store = MemoryStore()
    await store.start()
    await store.join(card or make_card(), rejoin=False)
    return store


@pytest.mark.verify
async def test_a_host_that_is_silent_holds_the_name_for_moments(client: CoordinatorClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        await client.join(make_card(agent=f"127.0.0.1:{silent.getsockname()[1]}"))
        joined = await asyncio.wait_for(client.join(second()), 3.0)
    assert joined.epoch == 9


UID = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user: sudo make test")


@contextmanager
def another_user(code: str, *arguments: object) -> Iterator[Any]:
    """Runs code as another user until the block is left. Yields what it passes to `done`. `imports` come before."""
    imports, _, body = textwrap.dedent(code).partition("---\n")
    script = f"""
import json, os, sys
arguments = sys.argv[1:]
{imports}
os.setgroups([]); os.setgid({UID}); os.setuid({UID})
def done(value):
    print(json.dumps(value), flush=True)
    sys.stdin.read()
{body}
"""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        yield json.loads(other.stdout.readline())
        other.communicate()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that every user can write to. pytest's own are closed to others."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


LISTENS = """
import socket
---
listening = socket.create_server(("127.0.0.1", 0))
done(listening.getsockname()[1])
"""


async def coordinator(port: int) -> None:
    await Coordinator().start(port=port)


async def status_page(port: int) -> None:
    async with serve_status_page(Coordinator(), "127.0.0.1", port):
        raise AssertionError("it listens")


def worker(setting: str) -> Callable[[int], Any]:
    async def start(port: int) -> None:
        config = WorkerConfig(transports="tcp", **{setting: port})  # type: ignore[arg-type]
        with Worker(wide(4).make(), "w", config=config):
            raise AssertionError("it listens")

    return start


PORTS: dict[str, Callable[[int], Any]] = {
    "coordinator": coordinator,
    "status page": status_page,
    "agent": worker("agent_port"),
    "tcp": worker("port"),
    "metrics": worker("metrics_port"),
}


@needs_root
@pytest.mark.parametrize("server", PORTS)
async def test_a_port_that_is_taken_is_an_error_that_names_it(server: str) -> None:
    with another_user(LISTENS) as port, pytest.raises(ConfigError, match=f"cannot (listen|serve).*{port}"):
        await PORTS[server](port)


@needs_root
async def test_who_took_the_coordinators_port_is_not_believed(shared: Path) -> None:
    """A coordinator of another user, which answers everybody."""
    impostor = """
    import asyncio
    from kvlink.coordinator import Coordinator
    ---
    os.mkdir(arguments[0], 0o700)
    os.environ["XDG_RUNTIME_DIR"] = arguments[0]
    os.environ["KVLINK_INSECURE"] = "1"
    async def main():
        address = await Coordinator().start("0.0.0.0")
        print(json.dumps(address.replace("0.0.0.0", "127.0.0.1")), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    asyncio.run(main())
    """
    with another_user(impostor, shared / "of another") as address:
        async with CoordinatorClient(address) as client:
            for call in (client.claim("r", 0.0), client.status(), client.workers()):
                with pytest.raises(AccessDenied, match="did not prove that it knows the token"):
                    await call


@needs_root
def test_another_user_gets_nothing_from_a_pools_socket() -> None:
    """All abstract sockets of the host are listed to everybody."""
    asks = """
    import re, socket
    ---
    listed = re.findall(r"@(kvlink-[0-9a-f]{32})$", open("/proc/net/unix").read(), re.M)
    found = []
    for name in set(listed):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.connect("\\0" + name)
            try:
                asking.send(bytes(32))
                found.append(len(asking.recvmsg(4096, 4096)[0]))
            except OSError:
                found.append(0)
    done(found)
    """
    with Worker(wide(4).make(), "w", transports="shm"), another_user(asks) as received:
        assert received
        assert not any(received)


MAKES_FOLDER = """
import pathlib
---
folder = pathlib.Path(arguments[0])
folder.mkdir()
folder.chmod(0o777)
for name, content in json.loads(arguments[1]).items():
    (folder / name).write_bytes(bytes.fromhex(content))
    (folder / name).chmod(0o666)
done(0)
"""


@needs_root
def test_a_folder_that_is_taken_holds_no_token(shared: Path) -> None:
    taken, own = shared / "kvlink-0", shared / "own"
    with another_user(MAKES_FOLDER, taken, json.dumps({"token": b"x".hex() * 40})):
        assert own_file.tokens([taken, own], os.geteuid()) == {}
        file, token = own_file.make([taken, own], os.geteuid())
        assert file.parent == own
        assert own_file.tokens([taken, own], os.geteuid()) == {file: token}


@needs_root
def test_a_folder_that_is_taken_gives_no_kernel_to_a_gpu(shared: Path) -> None:
    [image] = [kept(shared / "mine", b"source", "sm_90", lambda: b"made by another")]
    [file] = (shared / "mine").iterdir()
    with another_user(MAKES_FOLDER, shared / "taken", json.dumps({file.name: file.read_bytes().hex()})):
        assert kept(shared / "taken", b"source", "sm_90", lambda: b"made here") == b"made here" != image
        assert [each.stat().st_uid for each in (shared / "taken").iterdir()] == [UID]


def test_a_link_beside_a_report_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "a file of the user"
    target.write_text("content")
    (tmp_path / "report.md.new").symlink_to(target)
    assert list(day_one.write(tmp_path / "report.md", [])) == [
        f"{tmp_path / 'report.md'} has 0 steps, of which 0 failed. Please send it back."
    ]
    assert target.read_text() == "content"


def tls_of(file: Path) -> object:
    return Keyring(TlsFiles(file, file, file))


SECRETS: dict[str, Callable[[Path], object]] = {
    "KVLINK_TOKEN_FILE": lambda file: Security(token_file=str(file)).host_tokens(),
    "KVLINK_TICKET_KEYS": TicketKeys.of_file,
    "KVLINK_TLS_CA": tls_of,
    "--tenants": TenantsFile,
}


@pytest.mark.parametrize("setting", SECRETS)
def test_a_file_that_everybody_can_write_is_refused(setting: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("k" * 40)
    file.chmod(0o666)
    with pytest.raises(ConfigError, match=rf"every user of this host can write .*file \({setting}"):
        SECRETS[setting](file)
