# SPDX-License-Identifier: Apache-2.0
"""Starts a coordinator by a command line made for elsewhere: on loopback, on free ports, with its own certificates."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

PATHS = {"KVLINK_TLS_CA": "ca.pem", "KVLINK_TLS_CERT": "coordinator.pem", "KVLINK_TLS_KEY": "coordinator.key"}
_HERE = {"host": "127.0.0.1", "http-host": "127.0.0.1", "port": "0", "http-port": "0"}


def environment(certificates: Path, names: Mapping[str, str]) -> dict[str, str]:
    """This process's, with the variables `names` pointing to files that `kvlink certs` made."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KVLINK_")}
    return clean | {
        name: str(certificates / PATHS[name]) if name in PATHS else at for name, at in names.items()
    }


def here(arguments: list[str], store: str) -> list[str]:
    """The same options; those that name places, for this machine. `--name value` becomes `--name=value`."""
    joined = re.sub(r"(--[a-z-]+)\0(?=[^-])", r"\1=", "\0".join(arguments)).split("\0")
    places = _HERE | {"store": store}
    kept = [word for word in joined if word.removeprefix("--").partition("=")[0] not in places]
    given = [word.removeprefix("--").partition("=")[0] for word in joined if word not in kept]
    return [*kept, "--port=0", *(f"--{name}={places[name]}" for name in given if name != "port")]


@dataclass
class Running:
    process: subprocess.Popen[str]
    address: str
    page: str

    @classmethod
    def start(cls, arguments: list[str], env: Mapping[str, str]) -> Running:
        process = subprocess.Popen(
            [sys.executable, "-m", "kvlink", *arguments],
            env=dict(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        output: dict[str, str] = {}
        while len(output) < 2:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            what, _, where = line.strip().rpartition(" on ")
            output[what] = where
        return cls(process, output["kvlink coordinator"], output["kvlink status page"])


def run(arguments: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvlink", *arguments]
    return subprocess.run(command, env=dict(env), capture_output=True, text=True, timeout=60)
