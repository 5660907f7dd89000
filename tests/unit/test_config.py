# SPDX-License-Identifier: Apache-2.0
"""The configuration of a worker: its fields, those of RDMA, and durations."""

from __future__ import annotations

import math
import re
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlink.config import CATALOGUE, WorkerConfig, parse_channel, sources, unknown
from kvlink.config.addresses import split_address
from kvlink.config.rdma_config import NicNames, parse_nics, parse_pkey
from kvlink.config.setting import Setting
from kvlink.config.timeouts import checked, given_or
from kvlink.errors import ConfigError
from kvlink.runtime.durations import BOUNDS_S, Durations
from kvlink.transfer.nic_registration import rdma_options
from kvlink.transfer.transport_names import select

BUILT_IN = ["loopback", "shm", "cma", "tcp"]


def test_an_empty_environment_gives_the_defaults() -> None:
    assert WorkerConfig.from_env({}) == WorkerConfig()
    assert WorkerConfig.from_env({"KVLINK_PORT": " ", "KVLINK_LOG": ""}) == WorkerConfig()


def test_the_catalogue_describes_every_field_once() -> None:
    assert {setting.name for setting in CATALOGUE} == {field.name for field in fields(WorkerConfig)}
    assert len({setting.env for setting in CATALOGUE}) == len(CATALOGUE)
    assert all(setting.env == f"KVLINK_{setting.name.upper()}" for setting in CATALOGUE)


@pytest.mark.parametrize("setting", CATALOGUE, ids=lambda setting: setting.env)
def test_an_option_is_explained_in_sentences(setting: Setting) -> None:
    """Errors put "The option" before the meaning, so it begins with a verb in the third person."""
    assert re.match(r"(Allows|Lists|Names|Requires|Selects|Sets|Writes) ", setting.meaning)
    for text in (setting.meaning, setting.advice):
        assert not text or text.endswith(".")


def test_defaults_of_a_caller_give_way_to_the_environment_and_to_arguments() -> None:
    own = {"host": "10.0.0.9", "lanes": 3, "port": 7}
    config = WorkerConfig.from_env({"KVLINK_HOST": "10.0.0.1"}, defaults=own, port=9)
    assert (config.host, config.lanes, config.port) == ("10.0.0.1", 3, 9)


def test_workers_of_a_host_count_up_from_the_ports_that_were_given() -> None:
    config = WorkerConfig(agent_port=7410, metrics_port=7481)
    second = config.of_worker(1)
    assert (second.port, second.agent_port, second.metrics_port) == (0, 7411, 7482)
    assert config.of_worker(0) == config
    with pytest.raises(ConfigError, match="KVLINK_METRICS_PORT=65536"):
        WorkerConfig(metrics_port=65535).of_worker(1)


def test_the_native_channel_is_off_unless_it_is_set() -> None:
    given = {"": None, "off": None, "ON": 0, " 7420": 7420, "65535": 65535}
    assert {text: parse_channel(text) for text in given} == given
    assert parse_channel(WorkerConfig().channel) is None
    assert WorkerConfig(channel="7420").of_worker(2).channel == "7422"
    assert WorkerConfig(channel="on").of_worker(2).channel == "on"
    for text in ("0", "65536", "yes", "7420x", "-1", "²"):
        with pytest.raises(ConfigError, match="must be on, off, or a port"):
            WorkerConfig(channel=text)


def test_values_are_read_by_the_type_of_their_default() -> None:
    config = WorkerConfig.from_env(
        {"KVLINK_PORT": "7401", "KVLINK_LEASE_S": "2.5", "KVLINK_LOG_JSON": "Yes", "KVLINK_HOST": "10.0.0.1"}
    )
    assert (config.port, config.lease_s, config.log_json, config.host) == (7401, 2.5, True, "10.0.0.1")


def test_arguments_win_over_the_environment_and_none_does_not() -> None:
    env = {"KVLINK_PORT": "7401", "KVLINK_HOST": "10.0.0.1"}
    config = WorkerConfig.from_env(env, port=9, host=None)
    assert (config.port, config.host) == (9, "10.0.0.1")


@pytest.mark.parametrize(
    ("env", "value", "says"),
    [
        ("KVLINK_PORT", "http", "whole number"),
        ("KVLINK_PORT", "65536", "between 0 and 65535"),
        ("KVLINK_AGENT_PORT", "-1", "between 0"),
        ("KVLINK_INLINE_US", "-4", "between 0 and 100000 µs"),
        ("KVLINK_LANES", "1.5", "whole number"),
        ("KVLINK_LEASE_S", "nan", "between 0.001"),
        ("KVLINK_TIMEOUT_S", "inf", "between 0.001"),
        ("KVLINK_LOG", "loud", "one of debug"),
        ("KVLINK_NICS", "mlx5_0:one", "device:port"),
        ("KVLINK_LOG_JSON", "maybe", "one of 1"),
    ],
)
def test_a_bad_value_is_refused_by_name(env: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        WorkerConfig.from_env({env: value})
    assert env in str(refused.value)


def test_arguments_are_checked_like_the_environment() -> None:
    with pytest.raises(ConfigError, match="KVLINK_LEASE_SLOTS=0"):
        WorkerConfig(lease_slots=0)
    with pytest.raises(ConfigError, match="host:port"):
        WorkerConfig(coordinator="nowhere")


def test_sources_name_the_variable() -> None:
    found = sources({"KVLINK_PORT": "1", "KVLINK_HOST": "", "PATH": "/bin"})
    assert found["port"] == "KVLINK_PORT"
    assert {name for name, source in found.items() if source != "default"} == {"port"}


def test_misspelt_variables_are_found() -> None:
    assert unknown({"KVLINK_PROT": "1", "KVLINK_PORT": "1", "HOME": "/"}) == {"KVLINK_PROT": "KVLINK_PORT"}


@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        ("", BUILT_IN),
        ("  ", BUILT_IN),
        (" all", BUILT_IN),
        ("tcp", ["tcp"]),
        ("tcp, shm", ["tcp", "shm"]),
        ("tcp,tcp,shm", ["tcp", "shm"]),
        ("^cma", ["loopback", "shm", "tcp"]),
        ("^cma,shm", ["loopback", "tcp"]),
        ("fault+shm", ["fault+shm"]),
        ("fault+shm,tcp", ["fault+shm", "tcp"]),
    ],
)
def test_select(spec: str, chosen: list[str]) -> None:
    assert select(spec, BUILT_IN) == chosen


@pytest.mark.parametrize(
    "spec", ["smh", "fault", "fault+", "fault+smh", "^smh", "^fault+shm", "shm,^tcp", "^all"]
)
def test_select_refuses_names_that_are_none(spec: str) -> None:
    with pytest.raises(ConfigError, match="loopback, shm, cma, tcp"):
        select(spec, BUILT_IN)


def test_select_refuses_to_forbid_everything() -> None:
    with pytest.raises(ConfigError, match="every transport"):
        select("^loopback,shm,cma,tcp", BUILT_IN)


@pytest.mark.parametrize(
    ("text", "parts"), [("10.0.0.1:7400", ("10.0.0.1", 7400)), ("[::1]:80", ("::1", 80)), ("a:1", ("a", 1))]
)
def test_addresses_split(text: str, parts: tuple[str, int]) -> None:
    assert split_address(text) == parts


@pytest.mark.parametrize(
    "text", ["", "host", "host:", ":80", "host:0", "host:65536", "host:x", "host:²", "h:-1"]
)
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_address(text)


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        ("", NicNames(False, ())),
        ("  ", NicNames(False, ())),
        ("mlx5_0", NicNames(False, (("mlx5_0", None),))),
        ("mlx5_1:2, mlx5_0", NicNames(False, (("mlx5_1", 2), ("mlx5_0", None)))),
        ("mlx5_0,mlx5_0", NicNames(False, (("mlx5_0", None),))),
        ("^mlx5_2", NicNames(True, (("mlx5_2", None),))),
        (" ^mlx5_2:1,bnxt_re-bond0", NicNames(True, (("mlx5_2", 1), ("bnxt_re-bond0", None)))),
    ],
)
def test_nic_lists(spec: str, names: NicNames) -> None:
    assert parse_nics(spec) == {"": names}


@pytest.mark.parametrize(
    "spec",
    [
        "^",
        ",",
        "mlx5_0,",
        "mlx5_0:",
        "mlx5_0:0",
        "mlx5_0:01",
        "mlx5_0:1:1",
        "mlx5_0 mlx5_1",
        "a,^b",
        "ä",
        "0000:1b:00.0=",
    ],
)
def test_nic_lists_that_are_none(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"KVLINK_NICS=.*mlx5_0:1,mlx5_1"):
        parse_nics(spec)


def test_nic_lists_of_gpus() -> None:
    ports = NicNames(False, (("mlx5_0", None),)), NicNames(True, (("mlx5_1", 2),))
    assert parse_nics("0000:1b:00.0=mlx5_0; 43:00.0=^mlx5_1:2") == dict(
        zip(("0000:1b:00.0", "43:00.0"), ports, strict=True)
    )
    assert parse_nics("mlx5_0;00000000:43:00.0=^mlx5_1:2") == dict(
        zip(("", "00000000:43:00.0"), ports, strict=True)
    )


@pytest.mark.parametrize(
    "spec", ["=a", "gpu0=a", "a;b", "0000:1b:00.0=a;0000:1b:00.0=b", "0000:1b:00=a", "a=b=c", "1b:00.0=a;"]
)
def test_nic_lists_of_no_gpu(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"KVLINK_NICS=.*one list for each GPU|is no list of NICs"):
        parse_nics(spec)


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


def test_zero_is_given() -> None:
    assert given_or(0, 30.0) == 0
    assert given_or(0.0, 30.0) == 0
    assert given_or(None, 30.0) == 30
    assert checked(float("inf")) == float("inf")


@pytest.mark.parametrize("timeout_s", [-1, -1e-9, float("-inf"), float("nan")])
def test_less_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="0 means now"):
        given_or(timeout_s, 30.0)


NANOSECONDS = st.lists(st.integers(0, 2**40), max_size=50)


def of(durations: list[int]) -> Durations:
    counted = Durations()
    for ns in durations:
        counted.add(ns)
    return counted


@given(NANOSECONDS)
def test_every_duration_is_in_the_bucket_that_ends_at_or_above_it(durations: list[int]) -> None:
    counted = of(durations)
    for bucket, bound in enumerate([*BOUNDS_S, math.inf]):
        assert sum(counted.buckets[: bucket + 1]) == sum(ns <= round(bound * 1e9, 3) for ns in durations)
    assert (counted.count, counted.sum_ns) == (len(durations), sum(durations))


@given(NANOSECONDS, NANOSECONDS)
def test_what_came_later_is_the_difference(first: list[int], later: list[int]) -> None:
    both = of(first) + of(later)
    assert both.buckets == of(first + later).buckets
    assert both.since(of(first)).buckets == of(later).buckets
    assert both.since(of(first)).sum_ns == sum(later)


@given(st.lists(st.integers(1, 2**34), min_size=1, max_size=50), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_bucket(durations: list[int], share: float) -> None:
    found_ns = of(durations).quantile_s(share) * 1e9
    true_ns = sorted(durations)[math.ceil(share * len(durations)) - 1]
    assert true_ns / 2.001 <= found_ns or true_ns <= 512
    assert found_ns <= max(2 * true_ns, 512) + 1e-3


def test_without_durations_there_is_no_quantile() -> None:
    assert Durations().quantile_s(0.99) == 0.0
