# SPDX-License-Identifier: Apache-2.0
"""Reads GPU memory through each NIC port once before a pool is published, so that no request makes the first such read.

Reads between PCIe devices are fragile: on some hosts a NIC writes into a GPU, and its reads fail or return other bytes.
Both ends of the check are in this process, in memory of the pool's GPU that is not the pool's.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol

from kvlink import _core
from kvlink.config import WorkerConfig
from kvlink.config.addresses import numeric
from kvlink.config.rdma_config import Way
from kvlink.errors import KVLinkError
from kvlink.hardware.gpudirect import Driver, export
from kvlink.transfer.nic_registration import rdma_options

_log = logging.getLogger("kvlink.registration")

_BYTES = 1 << 20
_TIMEOUT_S = 5.0
_LEASE_SLOTS = 64
_EPOCH = 1

Port = tuple[str, int]
"""Name and Mb/s."""


class Buffer(NamedTuple):
    """Memory to read from or into. `add` makes it the pool of an engine."""

    address: int
    num_bytes: int
    add: Callable[[_core.Engine], object]
    store: Callable[[bytes], object]
    load: Callable[[], bytes]


class Memory(Protocol):
    """Memory that its object keeps allocated."""

    @property
    def address(self) -> int:
        """Returns the first address."""

    @property
    def bytes(self) -> int:
        """Returns the size."""


class NotTriedError(Exception):
    """A port or the memory could not be set up for the check, which says nothing about reads."""


def unreadable_ports(
    ports: Sequence[Port],
    gpu: int,
    way: Way,
    driver: Driver,
    *,
    config: WorkerConfig,
    root: Path = Path("/"),
    allocate: Callable[[int, int], Memory] = _core.CudaMemory,
    read: Callable[[Port, Buffer, Buffer, WorkerConfig], str] | None = None,
) -> dict[str, str]:
    """Returns the ports through which memory of this GPU cannot be read, each with the reason.

    What cannot be tried is not refused: the registration of the pool shows whether it works.
    """
    failed: dict[str, str] = {}
    try:
        with _gpu_buffers(gpu, way, driver, root, allocate) as (source, target):
            for port in ports:
                if why := _tried(port, gpu, source, target, config, read or read_through):
                    failed[port[0]] = why
    except KVLinkError as error:
        _log.warning("NICs were not tried before use device=cuda:%d error=%s", gpu, error)
    return failed


def _tried(
    port: Port,
    gpu: int,
    source: Buffer,
    target: Buffer,
    config: WorkerConfig,
    read: Callable[[Port, Buffer, Buffer, WorkerConfig], str],
) -> str:
    try:
        return read(port, source, target, config)
    except NotTriedError as error:
        why_not = str(error)  # a log record must not keep the buffers by the exception's frames
    _log.info("NIC was not tried before use nic=%s device=cuda:%d reason=%s", port[0], gpu, why_not)
    return ""


def read_through(
    port: Port, source: Buffer, target: Buffer, config: WorkerConfig, transport: str = "verbs"
) -> str:
    """Reads `source` into `target` through a port, and returns why that fails, or "". Raises NotTriedError.

    Without a NIC, another transport takes the place of verbs.
    """
    sent = secrets.token_bytes(source.num_bytes)
    source.store(sent)
    target.store(bytes(target.num_bytes))
    with (
        _opened(source, port, config, transport) as owner,
        _opened(target, port, config, transport) as reader,
    ):
        try:
            _read(owner, reader, target, transport)
        except KVLinkError as error:
            return str(error)
    return difference(sent, target.load())


def difference(sent: bytes, landed: bytes, moved: str = "read") -> str:
    """Says how many bytes differ and where the first is, or returns "" if none does."""
    if landed == sent:
        return ""
    wrong = [at for at, (a, b) in enumerate(zip(sent, landed, strict=True)) if a != b]
    return f"{len(wrong)} of {len(sent)} bytes {moved} differ, the first at {wrong[0]}"


def _read(owner: _core.Engine, reader: _core.Engine, target: Buffer, transport: str) -> None:
    ((_, address, pool_keys, lease_keys, _, _),) = owner.access()
    connection = reader.open(transport, address, _core.PathStats(transport))
    try:
        number, replies, new_pool_keys, new_lease_keys = owner.accept(transport, connection.hellos(), True, 0)
        (region,) = connection.establish(
            number, replies, new_pool_keys or pool_keys, new_lease_keys or lease_keys, _EPOCH, _TIMEOUT_S
        )
        connection.time_read(region, 0, target.address, target.num_bytes)
    finally:
        connection.close()


@contextmanager
def _opened(memory: Buffer, port: Port, config: WorkerConfig, transport: str) -> Iterator[_core.Engine]:
    """Starts an engine with `memory` registered. Raises NotTriedError if that is refused."""
    core = _core.Engine(
        epoch=_EPOCH,
        transports=[transport],
        host=config.host,
        port=0,
        fault="",
        num_lease_slots=_LEASE_SLOTS,
        num_progress_threads=1,
        inline_us=0,
        num_lanes=1,
        nics=[port],
        rdma=rdma_options(config),
        advertise=numeric(config.advertise, "KVLINK_ADVERTISE", config.host) if config.advertise else "",
    )
    try:
        try:
            memory.add(core)
            core.start()
        except KVLinkError as error:
            raise NotTriedError(str(error)) from error
        if refused := core.access()[0][4]:
            raise NotTriedError(refused)
        yield core
    finally:
        core.close()


@contextmanager
def _gpu_buffers(
    gpu: int, way: Way, driver: Driver, root: Path, allocate: Callable[[int, int], Memory]
) -> Iterator[tuple[Buffer, Buffer]]:
    """Allocates a source and a target. Raises ConfigError without memory, TransportUnavailable out of reach."""
    with ExitStack() as stack:
        source, target = (_gpu_buffer(gpu, way, driver, root, allocate(_BYTES, gpu), stack) for _ in range(2))
        yield source, target


def _gpu_buffer(gpu: int, way: Way, driver: Driver, root: Path, memory: Memory, stack: ExitStack) -> Buffer:
    exported = stack.enter_context(export(driver, memory.address, memory.bytes, allowed=(way,), root=root))

    def add(core: _core.Engine) -> None:
        core.add_foreign_region(
            memory.address,
            memory.bytes,
            memory,
            device=True,
            dmabuf_fds=exported.fds,
            dmabuf_offset=exported.offset,
            pcie_dmabuf_fds=exported.pcie_fds,
        )

    def load() -> bytes:
        exported.flush_writes()
        return driver.load(gpu, memory.address, memory.bytes)

    return Buffer(
        memory.address, memory.bytes, add, lambda data: driver.store(gpu, memory.address, data), load
    )
