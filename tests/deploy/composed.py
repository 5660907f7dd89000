# SPDX-License-Identifier: Apache-2.0
"""The services of the compose file without containers: a network namespace in which each name has an address."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from deploy import commands

_NETWORK = "10.80.0"
_GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())"


class Composed:
    """Runs services by their name, as the file says; what is mounted lies below `folder`. Needs root."""

    def __init__(self, folder: Path) -> None:
        if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("etcd"):
            pytest.skip(
                "needs root, iproute2 and etcd: sudo apt-get install iproute2 etcd-server; sudo make test-netns"
            )
        self._folder = folder
        self._services = commands.compose()["services"]
        self._namespace = f"kvcompose{os.getpid()}"
        self._processes: dict[str, subprocess.Popen[str]] = {}
        names = [name for name in self._services if name != "certs"]
        self._addresses = {name: f"{_NETWORK}.{number}" for number, name in enumerate(names, 1)}
        self._hosts = Path("/etc/netns") / self._namespace
        self._hosts.mkdir(parents=True)
        (self._hosts / "hosts").write_text("".join(f"{at} {name}\n" for name, at in self._addresses.items()))
        subprocess.run(["ip", "netns", "add", self._namespace], check=True)
        self._ip("link", "set", "lo", "up")
        for address in self._addresses.values():
            self._ip("addr", "add", f"{address}/32", "dev", "lo")

    def _ip(self, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self._namespace, *arguments], check=True)

    def command(self, name: str) -> list[str]:
        """Returns the arguments of the image's entry point; etcd is configured by its environment alone."""
        given = [self._placed(name, word) for word in self._services[name].get("command", [])]
        return ["ip", "netns", "exec", self._namespace, *self._program(name), *given]

    def _program(self, name: str) -> list[str]:
        """Returns the image's entry point, or the service's own."""
        if name.startswith(("etcd", "prometheus")):
            kind = name.partition("-")[0]
            return [shutil.which(kind) or kind]
        own = self._services[name].get("entrypoint")
        if own is None:
            return [sys.executable, "-m", "kvlink"]
        return [sys.executable, *(word.replace("/examples", str(commands.EXAMPLES)) for word in own[1:])]

    def environment(self, name: str) -> dict[str, str]:
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("KVLINK_", "ETCD_"))}
        given = self._services[name].get("environment", {})
        return clean | {key: self._placed(name, value) for key, value in given.items()}

    def _placed(self, name: str, word: str) -> str:
        certificates, data = str(self._folder / "certs"), str(self._folder / name)
        word = word.replace("0.0.0.0", self._addresses.get(name, "")).replace("/prometheus", data)
        word = word.replace("/etc/kvlink", str(commands.DEPLOY / "prometheus"))
        return word.replace("/certs", certificates).replace("/data", data)

    def run(self, name: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(self.command(name), env=self.environment(name), capture_output=True, text=True)

    def start(self, name: str) -> subprocess.Popen[str]:
        with (self._folder / f"{name}.log").open("a") as log:
            process = subprocess.Popen(
                self.command(name), env=self.environment(name), stdout=log, stderr=log, text=True
            )
        self._processes[name] = process
        return process

    def stop(self, name: str, number: signal.Signals) -> int:
        """Returns the exit status."""
        self._processes[name].send_signal(number)
        return self._processes[name].wait(30)

    def inside(self, program: list[str], env: dict[str, str]) -> subprocess.Popen[str]:
        """A client's process; the variables are those of a service with `env` on top."""
        command = ["ip", "netns", "exec", self._namespace, sys.executable, *program]
        process = subprocess.Popen(
            command,
            env=self.environment("certs") | env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes[f"client {process.pid}"] = process
        return process

    def get(self, url: str) -> str:
        """Returns what a service answers to an HTTP request."""
        command = ["ip", "netns", "exec", self._namespace, sys.executable, "-c", _GET, url]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout

    def worker(self) -> dict[str, str]:
        """Returns the settings that the comment at the top of the file gives workers."""
        certificates = self._folder / "certs"
        return {
            "KVLINK_TLS_CA": str(certificates / "ca.pem"),
            "KVLINK_TLS_CERT": str(certificates / "default.pem"),
            "KVLINK_TLS_KEY": str(certificates / "default.key"),
            "KVLINK_TICKET_KEYS": str(certificates / "default.tickets"),
        }

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-3_000:]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.communicate()
        subprocess.run(["ip", "netns", "delete", self._namespace], check=True)
        shutil.rmtree(self._hosts)
