# SPDX-License-Identifier: Apache-2.0
"""Runs perftest between two devices of this machine, as the reference for `kvlink bench`."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import time
from pathlib import Path

_TIMEOUT_S = 60.0
# perftest 6 writes it without quotes, as `BW_average: 54.31,`.
_FIGURE = re.compile(r'^"?([\w.]+)"? ?: ([\d.]+),?$', re.MULTILINE)


class PerftestError(Exception):
    """perftest ended without a figure. The text has the output of both ends."""


def read_bandwidth(owner: str, reader: str, size: int, iterations: int, qps: int = 1) -> float:
    """Returns the average MiB/s at which `reader` reads `size` bytes at a time from `owner`. Raises PerftestError."""
    return _measure("ib_read_bw", owner, reader, size, iterations, "--qp", str(qps))["BW_average"]


def read_latency(owner: str, reader: str, size: int, iterations: int) -> float:
    """Returns the median µs of consecutive reads of `size` bytes. Raises PerftestError."""
    return _measure("ib_read_lat", owner, reader, size, iterations)["t_typical"]


def gid_index(device: str, port: int = 1) -> int:
    """Returns the index of the device's first RoCE v2 GID that is an IPv4 address; 0 without one, as on InfiniBand."""
    folder = Path(f"/sys/class/infiniband/{device}/ports/{port}")
    for number in sorted(int(path.name) for path in (folder / "gids").iterdir()):
        if "0000:0000:0000:0000:0000:ffff" in (folder / f"gids/{number}").read_text() and _is_v2(
            folder, number
        ):
            return number
    return 0


def _is_v2(port: Path, number: int) -> bool:
    try:
        return "v2" in (port / f"gid_attrs/types/{number}").read_text()
    except OSError:  # the kernel answers so for an empty entry
        return False


def _measure(tool: str, owner: str, reader: str, size: int, iterations: int, *more: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report")
        port = _free_port()
        common = [tool, "-F", f"--size={size}", f"--iters={iterations}", f"--port={port}", *more]
        serve = _command(common, owner)
        ask = [*_command(common, reader), "--out_json", f"--out_json_file={report}", "127.0.0.1"]
        with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
            try:
                _wait_for(server, port)
                client = subprocess.run(ask, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                raise PerftestError(f"no answer within {_TIMEOUT_S:.0f} s: {' '.join(ask)}") from None
            finally:
                server.kill()
                served = server.communicate()[0]
        if client.returncode or not report.exists():
            raise PerftestError(f"{' '.join(ask)}:\n{client.stdout}{client.stderr}\nThe server:\n{served}")
        return {name: float(value) for name, value in _FIGURE.findall(report.read_text())}


def _command(common: list[str], device: str) -> list[str]:
    return [*common, f"--ib-dev={device}", f"--gid-index={gid_index(device)}"]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def _wait_for(server: subprocess.Popen[str], port: int) -> None:
    """Waits until the server listens or has ended. A connection would be taken for the client."""
    listening = re.compile(rf":{port:04X} [0-9A-F]+:0000 0A ")
    deadline = time.monotonic() + _TIMEOUT_S
    while server.poll() is None and time.monotonic() < deadline:
        if any(listening.search(Path(f"/proc/net/{table}").read_text()) for table in ("tcp", "tcp6")):
            return
        time.sleep(0.05)
