# SPDX-License-Identifier: Apache-2.0
"""Before a pool on a GPU is published, each NIC port reads that GPU's memory once, or is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from descriptors import descriptors, opened_since
from hardware import machines
from hardware.fake_cuda import HOPPER, FakeCuda, at

from kvlink import WorkerConfig, _core
from kvlink.config.rdma_config import Way
from kvlink.errors import ConfigError
from kvlink.hardware.gpudirect import Driver
from kvlink.layout import Geometry, dense
from kvlink.transfer import engine as engines
from kvlink.transfer.gpu_read_check import Buffer, NotTriedError, Port, read_through, unreadable_ports
from kvlink.transfer.nic_registration import NicRegistration, register_with_nics
from kvlink.transfer.pool import BlockPool, Region

CONFIG = WorkerConfig()
BASE = 0x7F0000000000
BYTES = 1 << 16
ONE, TWO, THREE = ("mlx5_0:1", 400_000), ("mlx5_4:1", 100_000), ("mlx5_8:1", 100_000)
LAYOUT = dense(Geometry(num_layers=1, total_heads=2, row_bytes=64, num_blocks=8, block_tokens=4))
SIZE = LAYOUT.region_bytes[0]


def in_host_memory(memory: _core.HostMemory) -> Buffer:
    driver = FakeCuda(HOPPER)
    return Buffer(
        memory.address,
        memory.bytes,
        lambda core: core.add_pool_region(memory),
        lambda data: driver.store(0, memory.address, data),
        lambda: driver.load(0, memory.address, memory.bytes),
    )


def buffer(num_bytes: int = BYTES) -> Buffer:
    return in_host_memory(_core.HostMemory(num_bytes, False))


read_over_shm = partial(read_through, ONE, config=CONFIG, transport="shm")


def test_equal_bytes_pass_and_every_wrong_byte_is_seen() -> None:
    before = descriptors()
    source, target = buffer(), buffer()
    assert read_over_shm(source, target) == ""
    assert source.load() == target.load() != bytes(BYTES)

    def wrong(load: Callable[[], bytes] = target.load) -> bytes:
        landed = bytearray(load())
        landed[7] ^= 1
        landed[-1] ^= 0x80
        return bytes(landed)

    said = read_over_shm(source, target._replace(load=wrong))
    assert said == f"2 of {BYTES} bytes read differ, the first at 7"
    del source, target, wrong
    assert not opened_since(before)


def test_bytes_of_an_earlier_read_do_not_pass() -> None:
    source, target = buffer(), buffer()
    assert read_over_shm(source, target) == ""
    stale = target.load()
    assert "differ" in read_over_shm(source, target._replace(load=lambda: stale))


def test_a_read_that_fails_is_a_reason() -> None:
    assert "leaves region 0" in read_over_shm(buffer(), buffer(2 * BYTES))


def test_memory_that_is_not_registered_is_not_a_failed_read() -> None:
    memory = _core.HostMemory(BYTES, False)
    on_gpu = in_host_memory(memory)._replace(
        add=lambda core: core.add_foreign_region(memory.address, BYTES, memory, device=True)
    )
    with pytest.raises(NotTriedError, match="shm reaches host memory"):
        read_over_shm(on_gpu, buffer())
    with pytest.raises(NotTriedError, match="shm reaches host memory"):
        read_over_shm(buffer(), on_gpu)


def test_memory_that_cannot_be_added_is_not_a_failed_read() -> None:
    def refuses(core: _core.Engine) -> None:
        raise ConfigError("no room for it")

    with pytest.raises(NotTriedError, match="no room for it"):
        read_over_shm(buffer()._replace(add=refuses), buffer())


class Scratch:
    """A GPU whose memory is host memory, with what the check allocates in it."""

    def __init__(self, folder: Path) -> None:
        machine = machines.hgx_h100(folder)
        machine.write("proc/sys/kernel/osrelease", "6.8.0-40-generic")
        self.root = folder
        self.driver = FakeCuda(replace(HOPPER, bus_id=machine.discover().gpus[0].address))
        self.memories: list[_core.HostMemory] = []

    def allocate(self, num_bytes: int, gpu: int) -> _core.HostMemory:
        assert gpu == 0
        self.memories.append(_core.HostMemory(num_bytes, False))
        self.driver.allocations += (at(self.memories[-1].address, num_bytes),)
        return self.memories[-1]

    def read(self, port: Port, source: Buffer, target: Buffer, config: WorkerConfig) -> str:
        """Reads over shm, through the driver's copies. TWO reads other bytes, and THREE registers nothing."""
        if port == THREE:
            raise NotTriedError("mlx5_8:1 cannot register: Operation not supported")
        source, target = (
            each._replace(add=lambda core, of=memory: core.add_pool_region(of))  # type: ignore[misc]
            for each, memory in zip((source, target), self.memories, strict=True)
        )
        if port == TWO:
            target = target._replace(load=lambda: bytes(target.num_bytes))
        return read_through(port, source, target, config, "shm")

    def failed(self, ports: Sequence[Port]) -> dict[str, str]:
        return unreadable_ports(
            ports,
            0,
            Way.DMA_BUF,
            self.driver,
            config=CONFIG,
            root=self.root,
            allocate=self.allocate,
            read=self.read,
        )


def test_only_ports_that_fail_to_read_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = descriptors()
    scratch = Scratch(tmp_path)
    with caplog.at_level("INFO"):
        failed = scratch.failed([THREE, ONE, TWO])
    assert list(failed) == ["mlx5_4:1"]
    assert f"of {1 << 20} bytes read differ" in failed["mlx5_4:1"]
    assert "NIC was not tried before use nic=mlx5_8:1" in caplog.text
    assert len(scratch.driver.exported) == 2
    scratch.memories.clear()
    assert not opened_since(before)


def test_without_memory_for_the_check_no_port_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scratch = Scratch(tmp_path)

    def none_left(_: int, __: int) -> _core.HostMemory:
        raise ConfigError("no memory is left")

    scratch.allocate = none_left  # type: ignore[method-assign]
    assert scratch.failed([ONE, TWO]) == {}
    assert "NICs were not tried before use device=cuda:0 error=no memory is left" in caplog.text


class Check:
    """Fails on some ports, and records what it was called with."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.calls: list[tuple[list[str], int, Way]] = []

    def __call__(self, ports: Sequence[Port], gpu: int, way: Way, driver: Driver) -> Mapping[str, str]:
        self.calls.append(([name for name, _ in ports], gpu, way))
        return dict.fromkeys(self.failing, "a bare read took longer than 200 ms")


def registered(
    folder: Path, check: Check, ways: str = "", nics: str = "mlx5_0:1,mlx5_4:1"
) -> NicRegistration:
    driver = Scratch(folder).driver
    driver.allocations = (at(BASE, 1 << 20),)
    return register_with_nics(
        BlockPool([Region(BASE, SIZE, None, None, gpu=0)], LAYOUT),
        WorkerConfig(nics=nics, gpudirect=ways),
        make_driver=lambda: driver,
        read_check=check,
        root=folder,
    )


def test_a_port_that_fails_is_left_out_and_the_others_are_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check = Check("mlx5_4:1")
    registration = registered(tmp_path, check)
    assert check.calls == [(["mlx5_0:1", "mlx5_4:1"], 0, Way.DMA_BUF)]
    assert [name for name, _ in registration.ports] == ["mlx5_0:1"]
    assert (registration.refused, len(registration.exported)) == ("", 1)
    (left_out,) = registration.left_out
    assert (left_out.device, left_out.port) == ("mlx5_4", 1)
    assert str(left_out).startswith(
        "mlx5_4:1 does not read GPU memory: a bare read took longer than 200 ms; "
    )
    assert f"left out device=cuda:0 nic={left_out}" in caplog.text
    assert "kvlink doctor --gpudirect" in caplog.text
    assert "KVLINK_RDMA_READ_CHECK=0" in caplog.text
    for each in registration.exported:
        each.close()


def test_verbs_is_refused_if_no_port_reads(tmp_path: Path) -> None:
    before = descriptors()
    registration = registered(tmp_path, Check("mlx5_0:1", "mlx5_4:1"))
    # Without ports, verbs would say why it has none, and not this.
    assert [name for name, _ in registration.ports] == ["mlx5_0:1", "mlx5_4:1"]
    assert (registration.exported, registration.bounced) == ((), "")
    assert registration.refused.startswith("no NIC reads this GPU: mlx5_0:1 does not read GPU memory: a bare")
    assert "mlx5_4:1 does not" in registration.refused
    assert [nic.device for nic in registration.left_out] == ["mlx5_0", "mlx5_4"]
    assert not opened_since(before)


def test_a_check_that_raises_leaves_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()

    class Raises(Check):
        def __call__(self, *_: object) -> Mapping[str, str]:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        registered(tmp_path, Raises())
    assert not opened_since(before)


def test_staged_bytes_are_not_checked(tmp_path: Path) -> None:
    check = Check("mlx5_0:1")
    assert registered(tmp_path, check, "bounce").bounced
    assert check.calls == []


def test_pools_in_host_memory_are_not_checked(tmp_path: Path) -> None:
    machines.hgx_h100(tmp_path)
    check = Check("mlx5_0:1")
    registration = register_with_nics(BlockPool.allocate(LAYOUT), CONFIG, read_check=check, root=tmp_path)
    assert (len(registration.ports), check.calls) == (8, [])


@pytest.mark.parametrize("wanted", [True, False])
def test_the_engine_checks_unless_the_setting_says_no(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    given: list[object] = []

    def register(*_: object, read_check: object, **__: object) -> NicRegistration:
        given.append(read_check)
        return NicRegistration(refused="there is no NIC in this test")

    monkeypatch.setattr(engines, "register_with_nics", register)
    config = WorkerConfig(transports="verbs,tcp", rdma_read_check=wanted)
    engines.Engine(BlockPool.allocate(LAYOUT), 1, config).close()
    assert [check is not None for check in given] == [wanted]
    if wanted:
        assert isinstance(given[0], partial)
        assert (given[0].func, given[0].keywords) == (unreadable_ports, {"config": config})
