# SPDX-License-Identifier: Apache-2.0
"""The rule against luck finds what it is for, and leaves alone what is outside the gate."""

from __future__ import annotations

from pathlib import Path

import pytest
from luck import findings, main


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("time.sleep(0.1)", "sleeps"),
        ("await asyncio.sleep(1)", "sleeps"),
        ("assert time.monotonic() - began < 5", "reads the clock (time.monotonic())"),
        (
            "deadline = asyncio.get_running_loop().time() + 1",
            "reads the clock (asyncio.get_running_loop().time())",
        ),
        ("began = perf_counter_ns()", "reads the clock (perf_counter_ns())"),
        ("free.bind(('127.0.0.1', 0)); port = free.getsockname()[1]", "probes for a free port"),
    ],
)
def test_luck_is_found(tmp_path: Path, body: str, what: str) -> None:
    write(tmp_path / "unit" / "test_x.py", f"async def test_x(began):\n    {body}\n")
    assert [(each.path, each.line, each.function, each.what) for each in findings(tmp_path)] == [
        ("unit/test_x.py", 2, "test_x", what)
    ]
    assert main(tmp_path) == 1


@pytest.mark.parametrize(
    "source",
    [
        "async def test_x():\n    await asyncio.sleep(0)\n",
        "@pytest.mark.verify\ndef test_x():\n    time.sleep(1)\n",
        "pytestmark = [pytest.mark.slow]\ndef test_x():\n    time.sleep(1)\n",
        "@pytest.mark.verify\nclass TestX:\n    def test_x(self):\n        time.sleep(1)\n",
        "@pytest.fixture\ndef replica(etcd):\n    pass\n\ndef test_x(replica):\n    time.sleep(1)\n",
        "from virtual_time import run\nasync def x():\n    await asyncio.sleep(9)\n    return loop.time()\n",
        "def serve():\n    server.bind(('', 0))\n    server.listen()\n    return server.getsockname()\n",
    ],
)
def test_what_is_no_luck_or_outside_the_gate_is_not_found(tmp_path: Path, source: str) -> None:
    write(tmp_path / "unit" / "test_x.py", source)
    write(tmp_path / "transports" / "test_y.py", "def test_y():\n    time.sleep(1)\n")
    assert list(findings(tmp_path)) == []


def test_the_simulation_of_the_control_plane_has_a_virtual_clock(tmp_path: Path) -> None:
    sleeps = "async def test_x():\n    await asyncio.sleep(1)\n"
    write(tmp_path / "unit" / "test_x.py", f"from control_simulation.world import World\n{sleeps}")
    write(tmp_path / "unit" / "test_y.py", f"from control.cards import make_card\n{sleeps}")
    assert [each.path for each in findings(tmp_path)] == ["unit/test_y.py"]


def test_real_clocks_are_found_beside_virtual_ones(tmp_path: Path) -> None:
    source = "from virtual_time import run\ndef test_x():\n    time.sleep(1)\n    time.monotonic()\n"
    write(tmp_path / "unit" / "test_x.py", source)
    assert [each.line for each in findings(tmp_path)] == [3, 4]


def write(path: Path, source: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(source)
