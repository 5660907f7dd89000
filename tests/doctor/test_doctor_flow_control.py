# SPDX-License-Identifier: Apache-2.0
"""Flow control and congestion notification of Ethernet ports are judged by what the system tools print."""

from __future__ import annotations

from pathlib import Path

import pytest
from doctor.rdma_checks import found, nics, silent
from hardware import machines
from hardware.fake_root import FakeRoot

from kvlink.doctor import Verdict, rdma
from kvlink.doctor.verdict import Check

PASS, WARN = Verdict.PASS, Verdict.WARN


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


DCB = "pfc-cap 8 macsec-bypass off delay 0 \nprio-pfc 0:off 1:off 2:off 3:{} 4:off 5:off 6:off 7:off \n"
MLNX_QOS = """DCBX mode: OS controlled
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   {}   0   0   0   0
\tbuffer      0   0   0   1   0   0   0   0
"""


@pytest.mark.parametrize(
    ("tool", "output", "on", "off"), [("dcb", DCB, "on", "off"), ("mlnx_qos", MLNX_QOS, "1", "0")]
)
def test_priority_flow_control(root: FakeRoot, tool: str, output: str, on: str, off: str) -> None:
    root.nic("mlx5_0")

    def flow(enabled: str) -> Check:
        def run(*command: str) -> str:
            assert "eth0" in command
            return output.format(enabled) if command[0] == tool else ""

        return rdma.flow_control(root.path, nics(root), run)

    assert flow(on) == Check("rdma flow control", PASS, "eth0: PFC on priority 3, ECN cannot tell")
    check = flow(off)
    assert (check.verdict, check.evidence) == (WARN, "eth0: PFC off, ECN cannot tell")
    assert check.fix.startswith("sudo mlnx_qos -i eth0 --pfc 0,0,0,1,0,0,0,0; ")


def test_congestion_notification(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    for end, enabled in (("np", (3, 4)), ("rp", (3,))):
        for priority in range(8):
            at = f"sys/class/net/eth0/ecn/roce_{end}/enable/{priority}"
            root.write(at, "1" if priority in enabled else "0")
    check = found(root)["rdma flow control"]
    assert (check.verdict, check.evidence) == (PASS, "eth0: PFC cannot tell, ECN on priority 3")
    root.write("sys/class/net/eth0/ecn/roce_rp/enable/3", "0")
    check = found(root)["rdma flow control"]
    assert (check.verdict, check.evidence) == (WARN, "eth0: PFC cannot tell, ECN off")


@pytest.mark.parametrize(
    ("guarded", "mark", "own", "mark_for_it"),
    [
        (3, "", 0, "106"),
        (4, "tclass=-1", 0, "138"),
        (0, "", 0, ""),
        (3, "Global tclass=106", 0, ""),
        (3, None, 0, ""),
        (3, "", 106, ""),
        (3, None, 106, ""),
        (4, None, 106, "138"),
    ],
)
def test_packets_outside_the_guarded_priority(
    root: FakeRoot, guarded: int, mark: str | None, own: int, mark_for_it: str
) -> None:
    root.nic("mlx5_0")
    for end in ("np", "rp"):
        root.write(f"sys/class/net/eth0/ecn/roce_{end}/enable/{guarded}", "1")
    if mark is not None:
        root.write("sys/class/infiniband/mlx5_0/tc/1/traffic_class", mark)
    check = rdma.flow_control(root.path, nics(root), silent, own)
    assert check.verdict is (WARN if mark_for_it else PASS)
    assert (", traffic class" in check.evidence) == (mark is not None)
    assert (f"KVLINK_RDMA_TRAFFIC_CLASS={own}, priority 3" in check.evidence) == (own > 0)
    how = f"set KVLINK_RDMA_TRAFFIC_CLASS={mark_for_it} at both ends"
    assert check.fix == (
        f"{how}, where the host trusts DSCP: sudo mlnx_qos -i eth0 --trust dscp" if mark_for_it else ""
    )


def test_interfaces_alike_give_one_warning(tmp_path: Path) -> None:
    check = rdma.flow_control(tmp_path, machines.hgx_h100(tmp_path).discover().nics[:8], silent)
    assert check.evidence.startswith(
        "rail0, rail1, rail2, rail3, rail4, rail5, rail6, rail7: PFC cannot tell"
    )
    assert check.fix.count("sudo mlnx_qos") == 1
    assert check.fix.endswith("(the same for rail1, rail2, rail3, rail4, rail5, rail6, rail7)")


def test_flow_control_that_cannot_be_told(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    check = found(root)["rdma flow control"]
    assert (check.verdict, check.evidence) == (WARN, "eth0: PFC cannot tell, ECN cannot tell")
    assert "mlnx_qos -i eth0" in check.fix


def test_flow_control_is_for_cards(root: FakeRoot) -> None:
    root.nic("rxe0", None)
    assert found(root)["rdma flow control"].verdict is PASS
