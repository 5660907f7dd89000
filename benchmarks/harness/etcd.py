# SPDX-License-Identifier: Apache-2.0
"""Runs a real etcd on free loopback ports, with one or several members that can be killed, stopped and restarted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlink.control.security import TlsFiles
from kvlink.errors import ConfigError

_READY_WITHIN_S = 60.0


class EtcdCluster:
    """A cluster of members that keep their ports and data over restarts. Raises ConfigError if etcd is not installed.

    `folder` holds the data; it should be on a disk as fast as the figures assume. Without it, /tmp does. With `tls`,
    clients must show a certificate of its CA. `options` are further ones of etcd, without the dashes.
    """

    def __init__(
        self,
        num_members: int = 1,
        folder: Path | None = None,
        tls: TlsFiles | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        if shutil.which("etcd") is None:
            raise ConfigError("etcd is not installed; run apt-get install etcd-server")
        self._tls = tls
        self._options = dict(options or {})
        self._folder = Path(tempfile.mkdtemp("kvlink-etcd", dir=folder))
        ports = _free_ports(2 * num_members)
        self._clients, self._peers = ports[:num_members], ports[num_members:]
        self._members: list[subprocess.Popen[bytes] | None] = [None] * num_members
        self._start_all()

    def _start_all(self) -> None:
        for number in range(len(self._members)):
            self.start(number)
        self.wait()

    @property
    def _everyone(self) -> str:
        return ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(self._peers))

    def data(self, number: int) -> Path:
        """Returns the folder that holds a member's data."""
        return self._folder / f"m{number}"

    @property
    def addresses(self) -> str:
        """Returns the client addresses of all members."""
        return ",".join(f"127.0.0.1:{port}" for port in self._clients)

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of the running members."""
        return [member.pid for member in self._members if member is not None]

    def start(self, number: int) -> None:
        """Starts a member. Returns before it answers."""
        client, peer = self._client_url(number), f"http://127.0.0.1:{self._peers[number]}"
        options = {
            "name": f"m{number}",
            "data-dir": str(self.data(number)),
            "listen-client-urls": client,
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": self._everyone,
            "logger": "zap",
            "log-level": "error",
            **self._options,
        }
        if self._tls is not None:
            files = zip(("trusted-ca-file", "cert-file", "key-file"), map(str, self._tls), strict=True)
            options |= {"client-cert-auth": "true", **dict(files)}
        command = ["etcd", *(f"--{name}={value}" for name, value in options.items())]
        with (self._folder / f"m{number}.log").open("ab") as log:
            self._members[number] = subprocess.Popen(command, stdout=log, stderr=log)

    def wait(self) -> None:
        """Waits until every running member knows a leader."""
        deadline = time.monotonic() + _READY_WITHIN_S
        for number, member in enumerate(self._members):
            while member is not None and not self._is_healthy(number):
                if member.poll() is not None or time.monotonic() > deadline:
                    output = (self._folder / f"m{number}.log").read_text()[-2_000:]
                    raise ConfigError(f"etcd did not start: {output}")
                time.sleep(0.02)

    def leader(self) -> int:
        """Returns the number of the leading member."""
        for number, member in enumerate(self._members):
            if member is not None:
                status = json.loads(self._ask(number, "v3/maintenance/status", b"{}"))
                if status["leader"] == status["header"]["member_id"]:
                    return number
        raise ConfigError("etcd has no leader")

    def lead(self, number: int) -> None:
        """Makes a member the leader."""
        status = json.loads(self._ask(number, "v3/maintenance/status", b"{}"))
        target = json.dumps({"targetID": status["header"]["member_id"]}).encode()
        self._ask(self.leader(), "v3/maintenance/transfer-leadership", target)

    def send(self, number: int, what: signal.Signals) -> None:
        """Sends a signal to one member."""
        member = self._members[number]
        if member is not None:
            os.kill(member.pid, what)

    def kill(self, number: int) -> None:
        """Kills one member. Idempotent."""
        member, self._members[number] = self._members[number], None
        if member is not None:
            member.kill()
            member.wait()

    def control(self, *command: str) -> str:
        """Runs etcdctl with the first member's address and returns its output. Raises CalledProcessError."""
        env = {**os.environ, "ETCDCTL_API": "3"}
        line = ["etcdctl", f"--endpoints={self._client_url(0)}", *command]
        return subprocess.run(line, env=env, check=True, capture_output=True, text=True, timeout=60).stdout

    def close(self) -> None:
        """Kills all members and deletes their data. Idempotent."""
        for number in range(len(self._members)):
            self.kill(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _is_healthy(self, number: int) -> bool:
        try:
            return b"true" in self._ask(number, "health")
        except OSError:
            return False

    def _client_url(self, number: int) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._clients[number]}"

    def _ask(self, number: int, path: str, body: bytes | None = None) -> bytes:
        trust = None
        if self._tls is not None:
            trust = ssl.create_default_context(cafile=self._tls.ca)
            trust.load_cert_chain(self._tls.cert, self._tls.key)
        url = f"{self._client_url(number)}/{path}"
        with urllib.request.urlopen(url, body, timeout=2, context=trust) as reply:
            answer: Any = reply.read()
        return bytes(answer)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()
