# SPDX-License-Identifier: Apache-2.0
"""The image, built and run by whichever container engine this machine has: docker, or podman."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import subprocess
import time
from typing import Any

import pytest
from deploy import commands

_ROOT = commands.DEPLOY.parents[1]
_READY_WITHIN_S = 60.0
_NEEDED = "sudo apt-get install podman buildah runc, or docker with a running daemon"


def find_engine() -> str:
    """Skips the test where there is none that works."""
    found = [name for name in ("docker", "podman") if shutil.which(name)]
    for name in found:
        if subprocess.run([name, "info"], capture_output=True).returncode == 0:
            return name
    pytest.skip(f"no container engine works on this machine ({', '.join(found) or 'none found'}): {_NEEDED}")


def _base_tag() -> str:
    """KVLINK_TEST_IMAGE_PYTHON names another tag of `python` to start from, as tests/deploy/base-image makes one."""
    (tag,) = re.findall(r"^ARG PYTHON=(.*)$", commands.CONTAINERFILE.read_text(), re.MULTILINE)
    return os.environ.get("KVLINK_TEST_IMAGE_PYTHON", tag)


class Image:
    """Built from this working tree. `close` deletes it, with its containers and volumes."""

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._name = f"localhost/kvlink-test:{os.getpid()}"
        self._base = f"docker.io/library/python:{_base_tag()}"
        self._made: list[tuple[str, str]] = []

    def build(self) -> None:
        """Skips when what it starts from cannot be had."""
        if self._run("image", "inspect", self._base).returncode:
            pulled = self._run("pull", self._base)
            if pulled.returncode:
                why = f"{self._base} cannot be had ({pulled.stderr.strip()[-200:]})"
                pytest.skip(f"{why}; make another: sudo tests/deploy/base-image")
        form = ["--format=docker"] if self._engine == "podman" else []  # OCI's own has no health check
        options = ["--network=host", *form, f"--build-arg=PYTHON={_base_tag()}", f"--tag={self._name}"]
        self.do("build", *options, f"--file={commands.CONTAINERFILE}", str(_ROOT))

    def settings(self) -> dict[str, Any]:
        """Returns the settings of containers that are made from the image."""
        (image,) = json.loads(self.do("image", "inspect", self._name))
        config = image["Config"]
        return config | {"Healthcheck": config.get("Healthcheck") or image.get("Healthcheck")}

    def added_bytes(self) -> int:
        """To what it starts from."""
        names = (self._name, self._base)
        whole, before = (int(self.do("image", "inspect", "--format={{.Size}}", name)) for name in names)
        return whole - before

    def volume(self) -> str:
        """An empty one."""
        return self._note("volume", self.do("volume", "create"))

    def call(self, program: str, *arguments: str, volume: str = "") -> subprocess.CompletedProcess[str]:
        """Runs to its end in a container of its own."""
        mount = [f"--volume={volume}:/certs"] if volume else []
        return self._run("run", "--rm", *_CLOSED, *mount, f"--entrypoint={program}", self._name, *arguments)

    def start(self, volume: str, env: dict[str, str]) -> str:
        """Its own command, with the options of the compose file. Returns the container, once it says that it serves."""
        hardened = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        given = [f"--env={name}={value}" for name, value in env.items()]
        options = [*_CLOSED, *hardened, *given, f"--volume={volume}:/certs:ro"]
        container = self._note("container", self.do("run", "--detach", *options, self._name))
        give_up = time.monotonic() + _READY_WITHIN_S
        while "kvlink coordinator on" not in (output := self._run("logs", container)).stdout:
            assert time.monotonic() < give_up, output.stdout + output.stderr
            time.sleep(0.2)
        return container

    def inside(self, container: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Beside what runs there."""
        return self._run("exec", container, *command)

    def stop(self, container: str) -> int:
        """As the engine stops containers, by the image's signal. Returns the exit status; 137 is a kill."""
        self.do("stop", container)
        return int(self.do("inspect", "--format", "{{.State.ExitCode}}", container))

    def close(self) -> None:
        for kind, name in reversed(self._made):
            self._run(kind, "rm", "--force", name)
        self._run("image", "rm", "--force", self._name)

    def do(self, *arguments: str) -> str:
        done = self._run(*arguments)
        assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
        return done.stdout.strip()

    def _note(self, kind: str, name: str) -> str:
        name = name.split()[-1]
        self._made.append((kind, name))
        return name

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([self._engine, *arguments], capture_output=True, text=True)


def _limits() -> list[str]:
    """Within this process's own: an engine without the right to raise them starts nothing by its defaults."""
    hard = {name: resource.getrlimit(number)[1] for name, number in _LIMITED.items()}
    few = {name: most for name, most in hard.items() if most != resource.RLIM_INFINITY}
    return [f"--ulimit={name}={min(few.get(name, _ENOUGH), _ENOUGH)}" for name in _LIMITED]


_ENOUGH = 4_096
_LIMITED = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
_CLOSED = ["--network=none", *_limits()]
