# SPDX-License-Identifier: Apache-2.0
"""An etcd, two coordinators and load as processes, and what is seen of the load while something is wrong."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from control.etcd_cluster import EtcdCluster, start_etcd
from outages.load import NONCE, Totals
from outages.programs import Coordinator, LoadProcess, Program

_LINES = 60
"""That a process may log, at INFO, about one fault."""
_GROWTH_MIB = 40.0
_CALM_S = 3.0
_CALM_WITHIN_S = 1.0
_TRIES = 3
_SETTLED_S = 5.0


@dataclass
class Seen:
    """Holds the effects of one fault."""

    totals: Totals
    gap_s: float
    """The longest time in which no handoff ended."""
    lines: int
    """At INFO, of the process that logged most."""
    growth_mib: float
    """The growth of the process that grew most."""
    calm_s: float
    """The slowest handoff of some seconds before."""

    def within(self, promised_s: float) -> bool:
        """Whether no handoff took longer than what the guide promises, on a machine that may be slow by itself."""
        return self.totals.slowest_s < promised_s + 4 * self.calm_s

    def __str__(self) -> str:
        one = self.totals
        return (
            f"{one.done} handoffs, {len(one.lost)} lost, {sum(one.refused.values())} refused, {one.late} above 1 s, "
            f"slowest {one.slowest_s:.1f} s, none for {self.gap_s:.1f} s, {one.rejoins} joined again, "
            f"{self.lines} lines, +{self.growth_mib:.0f} MiB; before it the slowest took {self.calm_s:.2f} s"
        )


class Scene:
    """Programs that log into one folder."""

    def __init__(self, folder: Path, programs: list[Program], load: LoadProcess, secrets: list[str]) -> None:
        self.folder, self.load, self.secrets = folder, load, secrets
        self.programs: list[Program] = [*programs, load]

    def disturb(
        self, begin: Callable[[], object], end: Callable[[], object], for_s: float, lines: int = _LINES
    ) -> Seen:
        """Has a fault for so long, and some time to get over it. Checks what holds for every fault.

        Where the machine is too busy to hand off in time without a fault, before or after, the fault is tried again;
        the test is skipped when that does not help.
        """
        for _ in range(_TRIES):
            self.load.totals()
            calm = self._watch(_CALM_S)
            if not calm.done or calm.slowest_s > _CALM_WITHIN_S:
                continue
            seen = self._disturbed(begin, end, for_s, calm.slowest_s)
            after = self._watch(_CALM_S)
            assert not seen.totals.doubled
            self.check_logs()
            if not after.done or after.slowest_s > _CALM_WITHIN_S:
                continue
            print(f"\n    {seen}", end=" ")
            lost = seen.totals.lost + after.lost
            assert not lost, lost[:5]
            assert seen.lines <= lines
            assert seen.growth_mib < _GROWTH_MIB
            return seen
        pytest.skip(
            f"without a fault handoffs take longer than {_CALM_WITHIN_S:g} s: this machine is too busy"
        )

    def _watch(self, for_s: float) -> Totals:
        time.sleep(for_s)
        return self.load.totals()

    def _disturbed(
        self, begin: Callable[[], object], end: Callable[[], object], for_s: float, calm_s: float
    ) -> Seen:
        logged = [program.num_lines() for program in self.programs]
        memory = [program.memory_mib() for program in self.programs]
        began = time.monotonic()
        begin()
        try:
            time.sleep(for_s)
        finally:
            end()
        totals, ended = self._watch(_SETTLED_S), time.monotonic()
        at = [began, *sorted(totals.done_at), ended]
        gap_s = max(b - a for a, b in itertools.pairwise(at))
        lines = max(
            program.num_lines() - before for program, before in zip(self.programs, logged, strict=True)
        )
        grown = max(
            program.memory_mib() - before for program, before in zip(self.programs, memory, strict=True)
        )
        return Seen(totals, gap_s, lines, grown, calm_s)

    def check_logs(self) -> None:
        """No secret is in any, and no traceback."""
        for program in self.programs:
            output = program.logged
            assert output or program is self.load, f"{program.log.name} is empty"
            assert "Traceback" not in output, output[output.index("Traceback") :][:3_000]
            for secret in self.secrets:
                assert secret not in output, f"{program.log.name} has {secret}"

    def close(self) -> None:
        for program in self.programs:
            program.kill()


def secrets_of(token: Path) -> list[str]:
    """Returns what no log may have: the contents of each ticket, what settles, the token of the host."""
    return [ticket_secret(token), str(NONCE), hex(NONCE)[2:], token.read_text().strip()]


def ticket_secret(token: Path) -> str:
    return "t1cket" + token.read_text().strip()[:12][::-1]


def make_token(folder: Path) -> Path:
    """Makes the token of this scene."""
    path = folder / "token"
    path.write_text(os.urandom(24).hex() + "\n")
    path.chmod(0o600)
    return path


@contextmanager
def on_loopback(
    folder: Path, num_members: int = 3, lease_s: float = 20.0
) -> Iterator[tuple[Scene, EtcdCluster]]:
    """Three members, two coordinators, which are the first programs, and load."""
    token = make_token(folder)
    programs: list[Program] = []
    etcd = start_etcd(num_members)
    try:
        for name in ("a", "b"):
            store, options = f"etcd://{etcd.addresses}/outages", ("--lease-s", str(lease_s))
            programs.append(Coordinator(folder, name, store, (), *options, KVLINK_TOKEN_FILE=str(token)))
        addresses = ",".join(program.address for program in programs)  # type: ignore[attr-defined]
        load = LoadProcess(folder, addresses, ticket_secret(token), KVLINK_TOKEN_FILE=str(token))
        programs.append(load)
        scene = Scene(folder, programs[:-1], load, secrets_of(token))
        yield scene, etcd
        totals = load.finish()
        assert not totals.lost, totals.lost[:5]
        scene.check_logs()
    finally:
        for program in programs:
            program.kill()
        etcd.close()
