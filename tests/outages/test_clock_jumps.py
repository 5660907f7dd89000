# SPDX-License-Identifier: Apache-2.0
"""The wall clock of coordinators and workers jumps under load: nothing of theirs depends on it but certificates."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from outages.programs import Coordinator, LoadProcess, Program
from outages.scene import Scene, make_token, secrets_of, ticket_secret

pytestmark = pytest.mark.timeout(300)

_HOUR = 3600
_SOURCE = Path(__file__).with_name("wall_clock.c")


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """Returns the library to preload, and the file that moves the clock."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine: apt-get install gcc")
    folder = tmp_path_factory.mktemp("clock")
    library, file = folder / "wall_clock.so", folder / "shift"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, _SOURCE], check=True)
    file.write_text("0\n")
    return str(library), file


@pytest.fixture(scope="module")
def scene(clock: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One coordinator in memory, whose leases and tickets are by its own clock."""
    folder = tmp_path_factory.mktemp("logs")
    token = make_token(folder)
    env = {"KVLINK_TOKEN_FILE": str(token), "LD_PRELOAD": clock[0], "WALL_CLOCK_FILE": str(clock[1])}
    programs: list[Program] = []
    try:
        programs.append(Coordinator(folder, "a", "memory", (), "--lease-s", "20", **env))
        address = programs[0].first_line.rpartition(" ")[2]
        load = LoadProcess(folder, address, ticket_secret(token), **env)
        programs.append(load)
        yield Scene(folder, programs[:-1], load, secrets_of(token))
    finally:
        for program in programs:
            program.kill()


@pytest.mark.parametrize("by_s", [_HOUR, -2 * _HOUR, 10 * 365 * 24 * _HOUR], ids=["hour", "back", "decade"])
def test_nothing_is_lost_and_nobody_joins_again(scene: Scene, clock: tuple[str, Path], by_s: int) -> None:
    def to(shift: int) -> None:
        clock[1].write_text(f"{shift}\n")

    seen = scene.disturb(lambda: to(by_s), lambda: to(0), 4.0, lines=5)
    assert not seen.totals.refused
    assert seen.totals.rejoins == 0
    assert seen.within(1.0)


def test_the_clock_does_move(clock: tuple[str, Path]) -> None:
    """The preloaded library works: other tests of this file would pass without it."""
    clock[1].write_text(f"{10 * _HOUR}\n")
    program = "import time, datetime; print(time.time() - 36000, datetime.datetime.now().timestamp() - 36000)"
    env = {"LD_PRELOAD": clock[0], "WALL_CLOCK_FILE": str(clock[1])}
    output = subprocess.run(
        ["python3", "-c", program], env={"PATH": "/usr/bin:/bin", **env}, capture_output=True, text=True
    )
    clock[1].write_text("0\n")
    assert output.returncode == 0, output.stderr
    assert all(abs(float(at) - time.time()) < 60 for at in output.stdout.split())
