# SPDX-License-Identifier: Apache-2.0
"""Another user of the host takes a name before kvlink does: it is refused by name, passed over, or not believed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transports.pools import wide

from kvlink import Worker, WorkerConfig
from kvlink.control import CoordinatorClient, Security
from kvlink.control.security import Keyring, own_file
from kvlink.control.security.keys import TlsFiles
from kvlink.control.security.tenants import TenantsFile
from kvlink.control.security.tickets import TicketKeys
from kvlink.coordinator import Coordinator
from kvlink.doctor import day_one
from kvlink.errors import AccessDenied, ConfigError
from kvlink.hardware.kernels.nvrtc import kept
from kvlink.monitoring.status_page.serving import serve_status_page

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
