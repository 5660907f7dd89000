# SPDX-License-Identifier: Apache-2.0
"""The options of RDMA connections: their bounds, what must fit each other, and the form in which C++ gets them."""

from __future__ import annotations

import pytest

from kvlink import WorkerConfig
from kvlink.config.rdma_config import parse_pkey
from kvlink.errors import ConfigError
from kvlink.transfer.nic_registration import rdma_options


@pytest.mark.parametrize(
    "gid", ["", "0", "255", "10.1.0.7", "10.1.0.0/16", "10.1.2.3/16", "0.0.0.0/0", "2001:db8::/32", "fe80::1"]
)
def test_gids(gid: str) -> None:
    assert WorkerConfig(rdma_gid=gid).rdma_gid == gid


@pytest.mark.parametrize(
    "gid", ["256", "-1", "x", "10.1.0.0/33", "10.1.0.0/255.255.0.0", "fe80::1%eth0", "::/129", "1.2.3", "²"]
)
def test_malformed_gids_are_refused(gid: str) -> None:
    with pytest.raises(ConfigError, match=r"KVLINK_RDMA_GID=.* chooses no GID"):
        WorkerConfig(rdma_gid=gid)


def test_keys_of_partitions() -> None:
    assert [parse_pkey(text) for text in ("", "0x8001", "0XFFFF", "32769", "1")] == [
        0,
        0x8001,
        0xFFFF,
        0x8001,
        1,
    ]
    for text in ("0", "0x0", "0x8000", "32768", "0x10000", "65536", "-1", "x", "0x"):
        with pytest.raises(ConfigError, match=r"KVLINK_RDMA_PKEY=.* is no key of a partition"):
            WorkerConfig(rdma_pkey=text)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("rdma_service_level", (-1, 16)),
        ("rdma_timeout", (7, 21)),
        ("rdma_retries", (0, 8)),
        ("rdma_silence_s", (0.1, 31.0)),
        ("rdma_qps", (0, 17)),
    ],
)
def test_bounds(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"KVLINK_{name.upper()}={value} must be between"):
            WorkerConfig(**{name: value})  # type: ignore[arg-type]


def test_a_reader_waits_as_long_as_its_nic_resends() -> None:
    with pytest.raises(
        ConfigError, match=r"KVLINK_RDMA_SILENCE_S=0.6 is less than the 0.94 s .*TIMEOUT=15 .*RETRIES=6"
    ):
        WorkerConfig(rdma_timeout=15)
    with pytest.raises(ConfigError, match=r"less than the 0\.54 s"):
        WorkerConfig(rdma_silence_s=0.5, rdma_retries=7)
    WorkerConfig(rdma_timeout=17, rdma_retries=7, rdma_silence_s=4.3)


def test_the_connection_manager_chooses_gid_and_partition_itself() -> None:
    for chosen in ({"rdma_gid": "3"}, {"rdma_pkey": "0x8001"}):
        with pytest.raises(ConfigError, match=r"KVLINK_RDMA_CONNECT=cm chooses"):
            WorkerConfig(rdma_connect="cm", **chosen)  # type: ignore[arg-type]


def test_cpp_gets_every_option() -> None:
    env = {
        "KVLINK_RDMA_CONNECT": "direct",
        "KVLINK_RDMA_GID": "10.1.0.0/16",
        "KVLINK_RDMA_PKEY": "0x8001",
        "KVLINK_RDMA_SERVICE_LEVEL": "5",
        "KVLINK_RDMA_TRAFFIC_CLASS": "106",
        "KVLINK_RDMA_TIMEOUT": "16",
        "KVLINK_RDMA_RETRIES": "3",
        "KVLINK_RDMA_SILENCE_S": "2.5",
        "KVLINK_RDMA_QPS": "8",
    }
    assert repr(rdma_options(WorkerConfig.from_env(env))) == (
        "connect='direct' gid='10.1.0.0/16' pkey=0x8001 service_level=5 traffic_class=106 timeout=16 retries=3 "
        "silence_ns=2500000000 qps=8"
    )
