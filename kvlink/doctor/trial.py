# SPDX-License-Identifier: Apache-2.0
"""Tests GPUDirect for `kvlink doctor --gpudirect`: registers GPU memory with each NIC, reads it through the NIC,
compares.

Two workers of this process are the two ends. Every byte leaves one queue pair and enters another of the same port.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvlink.config.rdma_config import Way
from kvlink.doctor.software import extension
from kvlink.doctor.verdict import Check, Verdict
from kvlink.errors import KVLinkError, TransportUnavailable
from kvlink.hardware.gpudirect import CudaDriver, Driver, decide, inspect
from kvlink.hardware.nics import MemoryPlace, NicSelection, choose, port_name
from kvlink.hardware.topology import PciDevice, PortState, RdmaDevice, Topology, discover
from kvlink.layout import Geometry, dense

_BLOCKS = 64
_TIMEOUT_S = 20.0
_LAYOUT = dense(
    Geometry(
        num_layers=2, total_heads=8, row_bytes=256, num_blocks=_BLOCKS, model="kvlink doctor --gpudirect"
    )
)


def trial(root: Path = Path("/")) -> Iterator[Check]:
    """Yields checks of the required parts, then one per GPU, NIC and way. GPUDirect does not work if any is FAIL.

    Each GPU is tested with the NICs that a worker chooses for it. KVLINK_* variables are ignored.
    """
    machine = discover(root)
    parts = [gpu(machine.gpus), torch_gpu(), cuda_python(), nic(machine.nics), verbs()]
    yield from parts
    if any(part.verdict is Verdict.FAIL for part in parts):
        return
    driver = CudaDriver()
    for device, selection in chosen(driver, machine):
        if not selection.chosen:
            reasons = "; ".join(map(str, selection.refused))
            yield Check(
                f"cuda:{device}", Verdict.FAIL, f"no NIC serves this GPU: {reasons}", "kvlink topology"
            )
        if selection.warning:
            yield Check(
                f"cuda:{device}", Verdict.WARN, selection.warning, "use a slot beside the GPU's switch"
            )
        for port in selection.chosen:
            for way in (Way.DMA_BUF, Way.PEERMEM):
                yield through(driver, port_name(port.device, port.port), way, device)


def gpu(gpus: Sequence[PciDevice]) -> Check:
    """Checks for a GPU on the PCI bus."""
    if not gpus:
        fix = "run on a machine with an NVIDIA GPU; in a container: docker run --gpus all"
        return Check("part: gpu", Verdict.FAIL, "no NVIDIA GPU on the PCI bus", fix)
    return Check("part: gpu", Verdict.PASS, ", ".join(each.address for each in gpus))


def torch_gpu() -> Check:
    """Checks for a torch built for CUDA that sees a device."""
    fix = "pip install torch (a CUDA build; nvidia-smi names the driver's CUDA)"
    try:
        import torch
    except ImportError as error:
        return Check("part: torch", Verdict.FAIL, str(error), fix)
    if not torch.cuda.is_available():
        return Check("part: torch", Verdict.FAIL, f"torch {torch.__version__} sees no CUDA device", fix)
    return Check("part: torch", Verdict.PASS, f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}")


def cuda_python(make: Callable[[], Driver] = CudaDriver) -> Check:
    """Checks cuda-python and the CUDA driver, and shows what device 0 can do."""
    try:
        device = make().gpu(0)
    except TransportUnavailable as error:
        return Check("part: cuda-python", Verdict.FAIL, error.reason, error.fix)
    return Check("part: cuda-python", Verdict.PASS, str(device))


def active_ports(nics: Sequence[RdmaDevice]) -> list[str]:
    """Returns the active ports in the format of KVLINK_NICS."""
    return [
        f"{nic.name}:{port.number}" for nic in nics for port in nic.ports if port.state is PortState.ACTIVE
    ]


def nic(nics: Sequence[RdmaDevice]) -> Check:
    """Checks for an active port."""
    if ports := active_ports(nics):
        return Check("part: nic", Verdict.PASS, ", ".join(ports))
    names = ", ".join(each.name for each in nics)
    fix = "kvlink doctor says how to bring it up" if nics else "run on a machine with an RDMA NIC"
    return Check("part: nic", Verdict.FAIL, f"no active port of {names}" if nics else "no RDMA device", fix)


def verbs() -> Check:
    """Checks kvlink's verbs transport."""
    core, check = extension()
    if core is None:
        return check
    rows = {name: (why_not, fix) for name, _, _, why_not, fix in core.transports()}
    if "verbs" not in rows:
        fix = "install a wheel of a checkout that has it: make release-wheel"
        return Check("part: verbs", Verdict.FAIL, f"this build has only {', '.join(rows)}", fix)
    why_not, fix = rows["verbs"]
    if why_not:
        return Check("part: verbs", Verdict.FAIL, why_not, fix)
    return Check("part: verbs", Verdict.PASS, "the transport is ready")


def chosen(driver: Driver, machine: Topology) -> Iterator[tuple[int, NicSelection]]:
    """Yields CUDA's number of each visible GPU, and the ports that a worker chooses for it."""
    import torch

    for number in range(torch.cuda.device_count()):
        yield number, choose(machine, MemoryPlace(gpu=driver.gpu(number).bus_id))


def through(driver: Driver, port: str, way: Way, device: int) -> Check:
    """Moves data from GPU to host and back over one port of a NIC. A way that the facts rule out is skipped."""
    name = f"{port} cuda:{device} {way.value}"
    memory = gpu_memory(device)
    try:
        facts, _, _ = inspect(driver, memory.data_ptr(), memory.numel())
        decide(facts, (way,))
    except TransportUnavailable as error:
        return Check(name, Verdict.WARN, f"not tried: {error.reason}", error.fix)
    options = {
        "KVLINK_NICS": port,
        "KVLINK_GPUDIRECT": way.value,
        "KVLINK_TRANSPORTS": "verbs",
        "KVLINK_RDMA_READ_CHECK": "0",  # this is the more thorough one
    }
    return read_back(name, memory, options)


def gpu_memory(device: int) -> Any:
    """Allocates the GPU memory of the layout, by cudaMalloc or (PYTORCH_CUDA_ALLOC_CONF) expandable segments."""
    import torch

    return torch.empty(pool_bytes(), dtype=torch.uint8, device=f"cuda:{device}")


def pool_bytes() -> int:
    """Returns how many bytes move in each direction."""
    return _LAYOUT.region_bytes[0]


def read_back(name: str, memory: Any, options: Mapping[str, str]) -> Check:
    """Moves random bytes from `memory` (a torch tensor) to the host, then other bytes back, and compares both ends."""
    try:
        sent = secrets.token_bytes(memory.numel())
        _store(memory, sent)
        landed, out = _pulled(memory, bytes(memory.numel()), options, to_host=True)
        if landed != sent:
            return _differs(name, "read from the GPU", sent, landed, out)
        sent = secrets.token_bytes(memory.numel())
        landed, back = _pulled(memory, sent, options, to_host=False)
        if landed != sent:
            return _differs(name, "written into the GPU", sent, landed, back)
    except KVLinkError as error:
        fix = error.fix if isinstance(error, TransportUnavailable) else ""
        return Check(name, Verdict.FAIL, str(error), fix or "kvlink doctor checks the parts")
    evidence = f"{len(sent)} bytes equal each way, {memory.device}; {out}; {back}"
    return Check(name, Verdict.PASS, evidence)


def _differs(name: str, what: str, sent: bytes, landed: bytes, path: str) -> Check:
    from kvlink.transfer.gpu_read_check import difference

    evidence = f"{difference(sent, landed, what)}; {path}"
    return Check(
        name, Verdict.FAIL, evidence, "do not serve with this NIC and way; report it with kvlink doctor"
    )


def _pulled(memory: Any, host: bytes, options: Mapping[str, str], *, to_host: bool) -> tuple[bytes, str]:
    """Pulls the whole pool from one end into the other. Returns the destination's bytes and the path taken."""
    from kvlink.config import WorkerConfig
    from kvlink.transfer.pool import BlockPool
    from kvlink.worker import Worker

    config = WorkerConfig.from_env(options)
    on_gpu, on_host = BlockPool.from_tensors([memory], _LAYOUT), BlockPool.allocate(_LAYOUT)
    on_host.torch().copy_(_tensor(host))
    owner_pool, reader_pool = (on_gpu, on_host) if to_host else (on_host, on_gpu)
    with (
        Worker(owner_pool, "doctor-owner", config=config) as owner,
        Worker(reader_pool, "doctor-reader", config=config) as reader,
    ):
        ticket = owner.offer("gpudirect", range(_BLOCKS))
        pull = reader.pull(ticket, range(_BLOCKS), timeout_s=_TIMEOUT_S)
        pull.wait()
        path = "; ".join(map(str, pull.explain()))
    landed = on_host.torch() if to_host else memory.cpu()
    return landed.numpy().tobytes(), path


def _store(memory: Any, data: bytes) -> None:
    memory.copy_(_tensor(data))
    if memory.is_cuda:
        import torch

        torch.cuda.synchronize(memory.device)  # the NIC does not wait for streams


def _tensor(data: bytes) -> Any:
    import torch

    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
