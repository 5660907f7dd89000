# SPDX-License-Identifier: Apache-2.0
"""Checks the kernel: memory that can be shared, rights between processes, limits, CPUs."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from kvlink.doctor.verdict import Check, Verdict
from kvlink.hardware.sysfs import parse_size, read, read_field, read_int
from kvlink.hardware.topology import discover

# This suffices for the connections, eventfds and pool descriptors of a few hundred peers.
_ENOUGH_FILES = 4096
# The initial pid namespace has this inode (the kernel's PROC_PID_INIT_INO). A container's has another.
_HOST_PID_NAMESPACE = "pid:[4026531836]"
_CAP_IPC_LOCK, _CAP_SYS_PTRACE = 14, 19
_YAMA = {
    0: "0: processes of one user may read each other",
    1: "1: reading a process that is not a child takes CAP_SYS_PTRACE",
    2: "2: reading another process takes CAP_SYS_PTRACE",
    3: "3: no process may read another until the next boot",
}


def checks(root: Path) -> Iterator[Check]:
    """Yields every check of this module, in the order in which they are shown."""
    yield shared_memory(root)
    yield memfd(root)
    yield ptrace_scope(root)
    yield seccomp(root)
    yield namespaces(root)
    yield open_files()
    yield locked_memory(root)
    yield huge_pages(root)
    yield cores(root)
    yield streaming_stores(root)


def shared_memory(root: Path) -> Check:
    """Checks the space in /dev/shm, which torch and CUDA IPC use. kvlink's own pools are memfds."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as error:
        fix = "mount -t tmpfs tmpfs /dev/shm"
        return Check("/dev/shm", Verdict.WARN, f"absent ({error.strerror}); torch workers need it", fix)
    free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    evidence = f"{gib(free)} of {gib(size)} free"
    if size < 1 << 30:  # the default of container runtimes is 64 MiB
        return Check("/dev/shm", Verdict.WARN, evidence, "start the container with --shm-size=8g")
    return Check("/dev/shm", Verdict.PASS, evidence)


def memfd(root: Path) -> Check:
    """Checks whether this process can create memfds, which hold the pools."""
    try:
        os.close(os.memfd_create("kvlink-doctor"))
    except OSError as error:
        fix = "allow memfd_create in the seccomp profile, or: sysctl vm.memfd_noexec=0"
        return Check("memfd", Verdict.FAIL, f"memfd_create: {error.strerror}", fix)
    limit = read(root, "sys/fs/cgroup/memory.max") or "max"
    room = "no limit but the machine's memory" if limit == "max" else f"cgroup limit {gib(int(limit))}"
    return Check("memfd", Verdict.PASS, f"works, {room}")


def ptrace_scope(root: Path) -> Check:
    """Checks the Yama security module's rule for process_vm_readv (cma)."""
    scope = read_int(root, "proc/sys/kernel/yama/ptrace_scope")
    if scope is None:
        return Check("ptrace_scope", Verdict.PASS, "no Yama in this kernel")
    evidence = _YAMA.get(scope, f"{scope}: unknown")
    if scope == 0 or (scope < 3 and has_capability(root, _CAP_SYS_PTRACE)):
        return Check("ptrace_scope", Verdict.PASS, evidence + (", which this process has" if scope else ""))
    fix = "reboot without it" if scope == 3 else "sudo sysctl kernel.yama.ptrace_scope=0"
    return Check("ptrace_scope", Verdict.WARN, f"{evidence}; cma cannot read peers", fix)


def has_capability(root: Path, number: int) -> bool:
    """Returns whether this process may use a capability of capabilities(7), given by its number."""
    effective = int(read_field(root, "proc/self/status", "CapEff") or "0", 16)
    return bool(effective >> number & 1)


def may_pin_all(root: Path) -> bool:
    """Returns whether CAP_IPC_LOCK lifts the limit on locked memory (in the initial user namespace)."""
    return has_capability(root, _CAP_IPC_LOCK)


def seccomp(root: Path) -> Check:
    """Checks whether a system call filter is on; the cma line above shows if it blocks process_vm_readv."""
    mode = read_field(root, "proc/self/status", "Seccomp")
    modes = {"0": "no system call filter", "1": "strict mode", "2": "a system call filter is on; see cma"}
    return Check("seccomp", Verdict.PASS, modes.get(mode, "unknown"))


def namespaces(root: Path) -> Check:
    """Shows the namespaces. shm and cma connect two processes only inside one pid namespace."""
    try:
        found = {kind: str((root / f"proc/self/ns/{kind}").readlink()) for kind in ("pid", "net")}
    except OSError as error:
        return Check("namespaces", Verdict.WARN, f"{error.filename} is absent", "mount -t proc proc /proc")
    whose = (
        "the machine's" if found["pid"] == _HOST_PID_NAMESPACE else "a container's; shm and cma stay inside"
    )
    return Check("namespaces", Verdict.PASS, f"{found['pid']} ({whose}), {found['net']}")


def open_files() -> Check:
    """Checks the limit of open files. Each connection, pool and completion queue takes a descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _ENOUGH_FILES
    fix = "" if enough else f"ulimit -n {_ENOUGH_FILES if hard == -1 else min(hard, 65536)}"
    return Check("open files", Verdict.PASS if enough else Verdict.WARN, f"limit {_limit(soft)}", fix)


def locked_memory(root: Path) -> Check:
    """Checks the limit of locked memory.

    RDMA pins the host pools that it registers. The host transports pin nothing, and GPU pools do not count.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    evidence = f"limit {_limit(soft) if soft == resource.RLIM_INFINITY else gib(soft)}"
    if soft == resource.RLIM_INFINITY or not (root / "sys/class/infiniband").is_dir():
        return Check("locked memory", Verdict.PASS, evidence)
    if may_pin_all(root):
        return Check("locked memory", Verdict.PASS, f"{evidence}, which CAP_IPC_LOCK lifts")
    memory = parse_size(read_field(root, "proc/meminfo", "MemTotal"))
    of_all = f" of the machine's {gib(memory)}" if memory else ""
    fix = (
        "ulimit -l unlimited; systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1; Kubernetes has no "
        "such field: set it on the node's container runtime"
    )
    return Check(
        "locked memory", Verdict.WARN, f"{evidence}{of_all}; RDMA cannot register more host memory", fix
    )


def huge_pages(root: Path) -> Check:
    """Checks transparent huge pages of memfds, which save TLB misses on scattered blocks."""
    at = "sys/kernel/mm/transparent_hugepage"
    chosen = {name: _bracketed(read(root, f"{at}/{name}")) for name in ("enabled", "shmem_enabled")}
    evidence = ", ".join(f"{name}={value or 'absent'}" for name, value in chosen.items())
    if chosen["shmem_enabled"] in ("", "never", "deny"):
        fix = f"echo advise | sudo tee /{at}/shmem_enabled"
        return Check("huge pages", Verdict.WARN, f"{evidence}; pools use 4 KiB pages", fix)
    return Check("huge pages", Verdict.PASS, evidence)


def cores(root: Path) -> Check:
    """Counts the CPUs. Owner, reader and their progress threads run at the same time."""
    usable, found = len(os.sched_getaffinity(0)), discover(root)
    evidence = (
        f"{usable} usable of {found.num_threads} threads, {found.num_cores} cores, {len(found.nodes)} node(s)"
    )
    if usable < 2:
        return Check(
            "cores", Verdict.WARN, f"{evidence}; both ends share one", "give the process two CPUs or more"
        )
    return Check("cores", Verdict.PASS, evidence)


def streaming_stores(root: Path) -> Check:
    """Shows which instructions copy past the cache."""
    flags = read_field(root, "proc/cpuinfo", "flags").split()
    widest = next((flag for flag in ("avx512f", "avx2", "sse2") if flag in flags), "")
    evidence = f"{widest} (non-temporal copies)" if widest else "none known on this CPU; plain copies"
    return Check("streaming stores", Verdict.PASS, evidence)


def gib(num_bytes: int) -> str:
    """Formats a size in GiB, or in MiB if it is small."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / 2**20:.1f} MiB"


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _bracketed(text: str) -> str:
    """Returns the chosen word: "madvise" of "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]
