# SPDX-License-Identifier: Apache-2.0
"""The devices that the other tests of this lane stand on carry reads, and fail the way those tests have them fail."""

from __future__ import annotations

import subprocess

import pytest
from softroce import links

from kvlink.benchmarks.harness.perftest import PerftestError, read_bandwidth, read_latency

KIB = 1024
ALL = {"rxe0", "rxe1", "rxe2", "rxe3", "rxe4"}


def check_reads(owner: str, reader: str, qps: int = 1) -> None:
    """Raises PerftestError. Its figure is not checked: an emulated clock may leave 0.00 of it."""
    read_bandwidth(owner, reader, size=64 * KIB, iterations=20, qps=qps)


def test_libibverbs_opens_the_device(device: str) -> None:
    output = subprocess.run(["ibv_devinfo", "-d", device], check=True, capture_output=True, text=True).stdout
    assert "PORT_ACTIVE" in output


def test_the_device_reads_itself(device: str) -> None:
    check_reads(device, device)
    check_reads(device, device, qps=4)
    read_latency(device, device, size=4 * KIB, iterations=20)


@pytest.mark.usefixtures("guest_links")
def test_five_devices_are_up() -> None:
    listed = subprocess.run(["ibv_devices"], check=True, capture_output=True, text=True).stdout
    assert set(listed.split()) >= ALL
    assert links.active() == ALL


@pytest.mark.usefixtures("guest_links")
@pytest.mark.parametrize(("owner", "reader"), [("rxe1", "rxe3"), ("rxe2", "rxe4"), ("rxe2", "rxe3")])
def test_devices_read_each_other(owner: str, reader: str) -> None:
    check_reads(owner, reader)


@pytest.mark.usefixtures("guest_links")
def test_a_cut_link_stops_its_own_device_only() -> None:
    with links.down("rxe1"):
        assert links.active() == ALL - {"rxe1"}
        check_reads("rxe2", "rxe4")
        with pytest.raises(PerftestError, match="Port number 1 state is Down"):
            check_reads("rxe1", "rxe3")
    assert links.active() == ALL
    check_reads("rxe1", "rxe3")


@pytest.mark.usefixtures("guest_links")
def test_a_delay_is_felt_on_its_own_link() -> None:
    delay_us = 100_000
    with links.impaired("rxe1", "netem", "delay", f"{delay_us}us"):
        assert read_latency("rxe1", "rxe3", size=KIB, iterations=5) > delay_us
        assert read_latency("rxe2", "rxe4", size=KIB, iterations=5) < delay_us
    assert read_latency("rxe1", "rxe3", size=KIB, iterations=5) < delay_us


@pytest.mark.usefixtures("guest_links")
def test_loss_is_made_good() -> None:
    with links.impaired("rxe1", "netem", "loss", "5%"):
        check_reads("rxe1", "rxe3")
