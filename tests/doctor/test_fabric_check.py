# SPDX-License-Identifier: Apache-2.0
"""Providers of libfabric are shown where fabric is named, and libfabric is not loaded otherwise."""

from __future__ import annotations

from kvlink.doctor import fabric
from kvlink.doctor.verdict import Verdict
from kvlink.errors import TransportUnavailable

Rows = list[tuple[str, str, str]]
BUILT_IN = ["shm", "tcp"]


def two(host: str) -> Rows:
    assert host == "127.0.0.1"
    return [("sockets", "drives itself", ""), ("shm", "", "does not compare keys")]


def never(host: str) -> Rows:
    raise AssertionError(host)


def absent(host: str) -> Rows:
    raise TransportUnavailable("no libfabric.so.1", fix="apt-get install libfabric1")


def test_it_is_silent_unless_named() -> None:
    for env in ({}, {"KVLINK_TRANSPORTS": "shm,tcp"}, {"KVLINK_PORT": "x"}):
        assert not list(fabric.checks(env, BUILT_IN, never))


def test_it_lists_providers() -> None:
    for transports in ("fabric", "shm, fault+fabric"):
        sockets, shm = fabric.checks({"KVLINK_TRANSPORTS": transports}, BUILT_IN, two)
        assert (sockets.name, sockets.evidence) == ("fabric sockets", "drives itself")
        assert shm.evidence == "not used: does not compare keys"


def test_the_chosen_provider_has_to_be_there() -> None:
    env = {"KVLINK_TRANSPORTS": "fabric", "KVLINK_FABRIC_PROVIDER": "efa"}
    assert list(fabric.checks(env, BUILT_IN, two))[-1].verdict is Verdict.FAIL
    env["KVLINK_FABRIC_PROVIDER"] = "shm"
    assert list(fabric.checks(env, BUILT_IN, two))[-1].verdict is Verdict.FAIL
    env["KVLINK_FABRIC_PROVIDER"] = "sockets"
    assert len(list(fabric.checks(env, BUILT_IN, two))) == 2


def test_no_library() -> None:
    (check,) = fabric.checks({"KVLINK_TRANSPORTS": "fabric"}, BUILT_IN, absent)
    assert (check.verdict, check.fix) == (Verdict.FAIL, "apt-get install libfabric1")
