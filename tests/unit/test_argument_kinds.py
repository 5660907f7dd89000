# SPDX-License-Identifier: Apache-2.0
"""An argument of another type is refused with one sentence that names it, and not by an error of Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvlink import BlockPool, Geometry, Ticket, Worker, WorkerConfig, dense
from kvlink.errors import ConfigError

LAYOUT = dense(Geometry(1, 1, 64, 8))


def make(**given: Any) -> Worker:
    """A worker, if it is not refused."""
    return Worker(given.pop("pool", None) or BlockPool.allocate(LAYOUT, huge_pages=False), "w", **given)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: Ticket.from_text(b"KVT1"), "a ticket's text must be text, not bytes"),
        (lambda: Ticket.from_text(None), "a ticket's text must be text, not NoneType"),
        (lambda: Ticket.from_bytes("KVT1"), "a ticket must be bytes, not str"),
        (lambda: make(pool="x"), "pool must be a BlockPool, not str"),
        (lambda: make(pool=LAYOUT), "pool must be a BlockPool, not KVLayout"),
        (lambda: make(config={"port": 1}), "config must be a WorkerConfig, not dict"),
        (lambda: make(transports=["shm", "tcp"]), r"transports \(KVLINK_TRANSPORTS\) must be text, not list"),
        (lambda: make(coordinator=7400), r"coordinator \(KVLINK_COORDINATOR\) must be text, not int"),
        (lambda: WorkerConfig(port="7400"), r"port \(KVLINK_PORT\) must be a whole number, not str"),
        (lambda: WorkerConfig(lease_s="5"), r"lease_s \(KVLINK_LEASE_S\) must be a number, not str"),
        (lambda: Geometry("1", 1, 64, 8), "num_layers must be a whole number, not str"),
        (lambda: Geometry(1, 1, 64.0, 8), "row_bytes must be a whole number, not float"),
        (lambda: dense("x"), "the first argument must be a Geometry, not str"),
        (lambda: WorkerConfig.from_env({"KVLINK_PORT": "tcp://10.96.0.1:7400"}),
         "comes from a Kubernetes Service that is called kvlink; set enableServiceLinks: false"),
    ],
)  # fmt: skip
def test_another_type_is_refused_by_name(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        call()


def test_whole_numbers_of_numpy_are_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert dense(Geometry(*numpy.array([1, 1, 64, 8]))) == LAYOUT
    assert WorkerConfig(port=numpy.int64(7400), lease_s=5).port == 7400


def test_messages_of_a_pull_name_its_arguments() -> None:
    with (
        Worker(BlockPool.allocate(LAYOUT, huge_pages=False), "owner", transports="loopback") as owner,
        Worker(BlockPool.allocate(LAYOUT, huge_pages=False), "reader", transports="loopback") as reader,
    ):
        with pytest.raises(ConfigError, match="17 tokens do not fit 1 blocks of 16 tokens"):
            owner.offer("r", [7], num_tokens=17)
        ticket = owner.offer("r", [1, 2])
        for into, says in (
            ([0], "into has 1 blocks of 16 tokens: 32 tokens do not fit"),
            ([0, 0], "into names a block twice: 0, again at index 1"),
            ([0, 99], "into names block 99 but there are 8: see index 1"),
        ):
            with pytest.raises(ConfigError, match=says):
                reader.pull(ticket, into=into).wait()
        with pytest.raises(ConfigError, match="timeout_s must be a number of seconds, not str"):
            reader.pull(ticket, into=[3, 4], timeout_s="3")  # type: ignore[arg-type]
        pull = reader.pull(ticket, into=[3, 4])
        pull.wait()
        (path,) = pull.explain()
        assert path.brief == f"owner over loopback: 4096 bytes in {path.measured_us:.0f} us"
