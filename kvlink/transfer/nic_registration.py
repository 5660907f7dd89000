# SPDX-License-Identifier: Apache-2.0
"""Registers a pool with NICs: selects the ports near it, and for GPU memory the way that reaches it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from kvlink import _core
from kvlink.config import WorkerConfig
from kvlink.config.rdma_config import Way, parse_pkey, parse_ways
from kvlink.errors import TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver, Decision, Driver, ExportedMemory, export
from kvlink.hardware.nics import MemoryPlace, RefusedNic, select_ports
from kvlink.transfer.pool import BlockPool, Region

_log = logging.getLogger("kvlink.registration")

ReadCheck = Callable[[Sequence[tuple[str, int]], int, Way, Driver], Mapping[str, str]]
"""Reads memory of a GPU, exported by a way, through ports. Returns those that fail, each with the reason."""

_CHECK_FIX = "kvlink doctor --gpudirect tests it; KVLINK_RDMA_READ_CHECK=0 uses it untested"
_OUT_OF_REACH = "NICs do not reach this GPU memory"


@dataclass(frozen=True, slots=True)
class NicRegistration:
    """The registration of a pool with NICs.

    `refused` says why no NIC may use the pool, and is empty if NICs may use it. On a GPU, `exported` has one entry per
    region, then one for the staging buffer if there is one.
    """

    ports: Sequence[tuple[str, int]] = ()
    """Names and Mb/s of the ports, best first, as csrc/transport_api/options.h has them. No other port is opened."""
    left_out: tuple[RefusedNic, ...] = ()
    exported: tuple[ExportedMemory, ...] = ()
    refused: str = ""
    bounced: str = ""
    """The reason why NICs cannot reach the pool, which is on a GPU. Their transfers are staged in host memory."""

    @property
    def by_dma_buf(self) -> bool:
        """Whether memory is exported by dma-buf, which the NIC's driver may still refuse."""
        return any(each.decision.way is Way.DMA_BUF for each in self.exported)

    @property
    def flush(self) -> Callable[[], object] | None:
        """A function to call after the bytes of a pull have arrived and before the GPU reads them, or None."""
        one = next(iter(self.exported), None)  # all ranges are on the same GPU
        return one.flush_writes if one and one.needs_flush() else None

    def close(self) -> None:
        """Closes the dma-buf descriptors, which only registering uses. Idempotent."""
        _close(self.exported)

    @contextmanager
    def added(
        self,
        core: _core.Engine,
        pool: BlockPool,
        staging: _core.CudaMemory | None = None,
        *,
        always: bool = False,
    ) -> Iterator[None]:
        """Adds to `core` the pool's regions and the staging buffer, which is used where it is faster, or `always`.

        The dma-buf descriptors are open until the `with` block ends, so start `core` inside the block.
        """
        with ExitStack() as stack:
            exported = [stack.enter_context(each) for each in self.exported]
            for region, how in zip_longest(pool.regions, exported[: len(pool.regions)]):
                _add(core, region, how)
            if staging is not None and (exported or always):
                at = exported[-1] if exported else None
                core.set_staging(
                    staging, always, at.fds if at else (), at.offset if at else 0, at.pcie_fds if at else ()
                )
            yield


def rdma_options(config: WorkerConfig) -> _core.RdmaOptions:
    """Converts the options of RDMA connections to the form of the native engine."""
    return _core.RdmaOptions(
        connect=config.rdma_connect,
        gid=config.rdma_gid,
        pkey=parse_pkey(config.rdma_pkey),
        service_level=config.rdma_service_level,
        traffic_class=config.rdma_traffic_class,
        timeout=config.rdma_timeout,
        retries=config.rdma_retries,
        silence_s=config.rdma_silence_s,
        qps=config.rdma_qps,
    )


def register_with_nics(
    pool: BlockPool,
    config: WorkerConfig,
    *,
    staging: _core.CudaMemory | None = None,
    make_driver: Callable[[], Driver] = CudaDriver,
    nic_refuses_dma_buf: str = "",
    read_check: ReadCheck | None = None,
    root: Path = Path("/"),
) -> NicRegistration:
    """Selects ports by their distance to the pool, and exports the GPU memory of the pool and of `staging` to them.

    `nic_refuses_dma_buf` is the answer of a NIC to an earlier attempt. With `read_check`, ports that do not read GPU
    memory are left out. Raises ConfigError for a wrong KVLINK_NICS.
    """
    if pool.gpu is None:
        return _on_host(MemoryPlace(), config, root)
    ways = parse_ways(config.gpudirect)
    try:
        driver = make_driver()
    except TransportUnavailable as error:
        return _without_driver(pool.gpu, ways, config, error, root)
    ports: list[tuple[str, int]] = []
    left_out: tuple[RefusedNic, ...] = ()
    try:
        place = MemoryPlace(gpu=driver.gpu(pool.gpu).bus_id)
        if ways == (Way.BOUNCE,):
            return _bounced(place, config, root, _why_bounced(Decision(Way.BOUNCE, ())))
        ports, left_out, warning = select_ports(place, config.nics, root)
        if not ports and Way.BOUNCE in ways:
            return _bounced(place, config, root, _none_near(place, left_out))
        if not ports:
            raise TransportUnavailable(_none_near(place, left_out))
        ranges = [(region.address, region.num_bytes) for region in pool.regions]
        if staging is not None:
            ranges.append((staging.address, staging.bytes))
        exported, bounced = _export_all(driver, ranges, ways, nic_refuses_dma_buf, root)
    except TransportUnavailable as error:
        _log.warning("pool is not registered with NICs device=cuda:%d error=%s", pool.gpu, error)
        return NicRegistration(ports, left_out, refused=str(error))
    if bounced is not None:
        return _bounced(place, config, root, _why_bounced(bounced))
    if warning:
        _log.warning("far from its NIC device=cuda:%d reason=%s", pool.gpu, warning)
    for decision in dict.fromkeys(each.decision for each in exported):
        level = logging.WARNING if decision.refused else logging.INFO
        _log.log(level, "exported device=cuda:%d by=%s", pool.gpu, decision)
    registration = NicRegistration(ports, left_out, exported)
    return registration if read_check is None else _checked(registration, pool.gpu, driver, read_check)


def _checked(registration: NicRegistration, gpu: int, driver: Driver, check: ReadCheck) -> NicRegistration:
    """Returns the registration without the ports that do not read GPU memory, or a refusal if no port is left."""
    failed: dict[str, str] = {}
    try:
        for way in dict.fromkeys(each.decision.way for each in registration.exported):
            failed |= check(registration.ports, gpu, way, driver)
    except BaseException:
        _close(registration.exported)
        raise
    left_out = tuple(_unreadable(name, why) for name, why in failed.items())
    for nic in left_out:
        _log.warning("left out device=cuda:%d nic=%s", gpu, nic)
    ports = [port for port in registration.ports if port[0] not in failed]
    everyone = (*registration.left_out, *left_out)
    if ports:
        return replace(registration, ports=ports, left_out=everyone)
    _close(registration.exported)
    why = "no NIC reads this GPU: " + "; ".join(map(str, left_out))
    # Without ports, verbs would have a reason of its own.
    return NicRegistration(registration.ports, everyone, refused=why)


def _unreadable(port: str, why: str) -> RefusedNic:
    device, _, number = port.rpartition(":")
    return RefusedNic(device, int(number), f"does not read GPU memory: {why}", _CHECK_FIX)


def _close(exported: Sequence[ExportedMemory]) -> None:
    for each in exported:
        each.close()


def _without_driver(
    gpu: int, ways: Sequence[Way], config: WorkerConfig, why: TransportUnavailable, root: Path
) -> NicRegistration:
    """Returns the registration without a CUDA driver, which cannot register GPU memory or tell which NICs are near it.

    If the bounce buffer is allowed, it uses the NICs near host memory.
    """
    if Way.BOUNCE not in ways:
        _log.warning("pool is not registered with NICs device=cuda:%d error=%s", gpu, why)
        return NicRegistration(refused=str(why))
    return _on_host(MemoryPlace(), config, root, f"{_OUT_OF_REACH}: {why}")


def _bounced(place: MemoryPlace, config: WorkerConfig, root: Path, why: str) -> NicRegistration:
    return _on_host(replace(place, bounced=True), config, root, why)


def _on_host(place: MemoryPlace, config: WorkerConfig, root: Path, bounced: str = "") -> NicRegistration:
    """Returns the registration of host memory, which is the pool's own or what its blocks pass through."""
    ports, left_out, _ = select_ports(place, config.nics, root)
    refused = "" if ports else _none_near(place, left_out)
    return NicRegistration(ports, left_out, refused=refused, bounced=bounced)


def _export_all(
    driver: Driver,
    ranges: Sequence[tuple[int, int]],
    ways: Sequence[Way],
    nic_refuses_dma_buf: str,
    root: Path,
) -> tuple[tuple[ExportedMemory, ...], Decision | None]:
    """Returns the export of all ranges, or no export and the decision that says why. Raises TransportUnavailable."""
    exported: list[ExportedMemory] = []
    with ExitStack() as unless_all:
        for address, num_bytes in ranges:
            each = export(
                driver,
                address,
                num_bytes,
                allowed=ways,
                nic_refuses_dma_buf=nic_refuses_dma_buf,
                slice_bytes=_core.NIC_SLICE_BYTES,
                root=root,
            )
            exported.append(unless_all.enter_context(each))
            if each.decision.way is Way.BOUNCE:
                return (), each.decision
        unless_all.pop_all()
    return tuple(exported), None


def _why_bounced(decision: Decision) -> str:
    reasons = "".join(f"; not {each.way.value}: {each.reason}" for each in decision.refused)
    fixes = dict.fromkeys(each.fix for each in decision.refused)
    fix = "; or ".join(fixes) or "allow dma-buf or peermem in KVLINK_GPUDIRECT"
    return f"{_OUT_OF_REACH}{reasons}. {fix}"


def _none_near(place: MemoryPlace, left_out: Sequence[RefusedNic]) -> str:
    memory = f"GPU {place.gpu}" if place.gpu else "host memory"
    return f"no NIC serves {memory}: " + ("; ".join(map(str, left_out)) or "there is no RDMA device")


def _add(core: _core.Engine, region: Region, exported: ExportedMemory | None) -> None:
    if region.memory is not None:
        core.add_pool_region(region.memory)
        return
    core.add_foreign_region(
        region.address,
        region.num_bytes,
        region.keeper,
        device=region.gpu is not None,
        dmabuf_fds=exported.fds if exported else (),
        dmabuf_offset=exported.offset if exported else 0,
        pcie_dmabuf_fds=exported.pcie_fds if exported else (),
    )
