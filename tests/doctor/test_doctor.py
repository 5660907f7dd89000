# SPDX-License-Identifier: Apache-2.0
"""kvlink doctor: its checks, its report, installed stacks, and the first day's file."""

from __future__ import annotations

import resource
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hardware.fake_root import FakeRoot
from typer.testing import CliRunner

from kvlink.cli.commands import app
from kvlink.doctor import Check, Verdict, examine, host, network, software, stacks, worst
from kvlink.doctor.day_one import Result, Step, report, run, steps
from kvlink.doctor.day_one import write as write_report
from kvlink.errors import ConfigError
from kvlink.hardware.topology import discover

PASS, WARN, FAIL = Verdict.PASS, Verdict.WARN, Verdict.FAIL


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def lowered_limit() -> Iterator[None]:
    """The soft limits that the doctor checks, lowered; the hard ones stay."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK)
    before = {kind: resource.getrlimit(kind) for kind in kinds}
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[resource.RLIMIT_NOFILE][1]))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, before[resource.RLIMIT_MEMLOCK][1]))
    yield
    for kind, limits in before.items():
        resource.setrlimit(kind, limits)


def test_this_machine_gets_a_verdict_on_everything() -> None:
    checks = list(examine(Path("/"), {}))
    names = [check.name for check in checks]
    assert len(set(names)) == len(names) >= 15
    assert all(check.evidence for check in checks)
    assert all(check.fix for check in checks if check.verdict is FAIL)


def test_an_empty_tree_breaks_no_check(tmp_path: Path) -> None:
    assert len(list(host.checks(tmp_path))) == 10


def test_the_worst_verdict_decides() -> None:
    def of(*verdicts: Verdict) -> Verdict:
        return worst([Check("c", verdict, "seen") for verdict in verdicts])

    assert (of(), of(PASS, PASS), of(PASS, WARN), of(FAIL, WARN, PASS)) == (PASS, PASS, WARN, FAIL)


@pytest.mark.parametrize(
    ("scope", "capabilities", "verdict", "fix"),
    [
        (None, "0", PASS, ""),
        ("0\n", "0", PASS, ""),
        ("1\n", "0", WARN, "sudo sysctl kernel.yama.ptrace_scope=0"),
        ("1\n", "80000", PASS, ""),
        ("2\n", "fffff", PASS, ""),
        ("2\n", "7ffff", WARN, "sudo sysctl kernel.yama.ptrace_scope=0"),
        ("3\n", "fffff", WARN, "reboot without it"),
    ],
)
def test_ptrace_scope(
    tmp_path: Path, scope: str | None, capabilities: str, verdict: Verdict, fix: str
) -> None:
    if scope is not None:
        write(tmp_path, "proc/sys/kernel/yama/ptrace_scope", scope)
    write(tmp_path, "proc/self/status", f"CapEff:\t{capabilities}\n")
    check = host.ptrace_scope(tmp_path)
    assert (check.verdict, check.fix) == (verdict, fix)


@pytest.mark.parametrize(("shmem", "verdict"), [("advise", PASS), ("always", PASS), ("never", WARN)])
def test_huge_pages(tmp_path: Path, shmem: str, verdict: Verdict) -> None:
    at = "sys/kernel/mm/transparent_hugepage"
    write(tmp_path, f"{at}/enabled", "always [madvise] never\n")
    write(tmp_path, f"{at}/shmem_enabled", f"something [{shmem}] else\n")
    check = host.huge_pages(tmp_path)
    assert check.verdict is verdict
    assert f"enabled=madvise, shmem_enabled={shmem}" in check.evidence


def test_shared_memory_that_is_absent(tmp_path: Path) -> None:
    assert host.shared_memory(tmp_path).verdict is WARN


def test_seccomp_is_named(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/status", "Name:\tpython\nSeccomp:\t2\nSeccomp_filters:\t1\n")
    assert "filter is on" in host.seccomp(tmp_path).evidence


def test_namespaces_of_a_container(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532000]")
    (tmp_path / "proc/self/ns/net").symlink_to("net:[4026532001]")
    check = host.namespaces(tmp_path)
    assert "pid:[4026532000] (a container's" in check.evidence
    assert "net:[4026532001]" in check.evidence


@pytest.mark.usefixtures("lowered_limit")
def test_limits_that_are_too_low(tmp_path: Path) -> None:
    files = host.open_files()
    assert files.verdict is WARN
    assert "256" in files.evidence
    assert files.fix.startswith("ulimit -n ")
    assert host.locked_memory(tmp_path).verdict is PASS, "without RDMA nothing is pinned"
    (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    write(tmp_path, "proc/meminfo", "MemTotal:  67108864 kB\n")
    locked = host.locked_memory(tmp_path)
    assert locked.verdict is WARN
    assert locked.evidence == "limit 0.1 MiB of the machine's 64.0 GiB; RDMA cannot register more host memory"
    assert "LimitMEMLOCK=infinity" in locked.fix
    write(tmp_path, "proc/self/status", "CapEff:\t0000000000004000\n")
    assert host.locked_memory(tmp_path).verdict is PASS


@pytest.mark.parametrize(
    ("flags", "says"), [("sse2 avx2 avx512f", "avx512f"), ("sse2", "sse2"), ("neon", "plain copies")]
)
def test_streaming_stores(tmp_path: Path, flags: str, says: str) -> None:
    write(tmp_path, "proc/cpuinfo", f"processor\t: 0\nflags\t\t: fpu {flags}\n")
    assert says in host.streaming_stores(tmp_path).evidence


def test_tcp_buffers(tmp_path: Path) -> None:
    write(tmp_path, "proc/sys/net/ipv4/tcp_rmem", "4096\t131072\t6291456\n")
    write(tmp_path, "proc/sys/net/ipv4/tcp_wmem", "4096\t16384\t212992\n")
    check = network.tcp_buffers(tmp_path)
    assert check.verdict is WARN
    assert "tcp_wmem" in check.fix
    assert "tcp_rmem" not in check.fix


def test_the_listen_address() -> None:
    assert network.listen_address("127.0.0.1").verdict is PASS
    check = network.listen_address("192.0.2.1")  # set aside for documentation: nobody has it
    assert check.verdict is FAIL
    assert "KVLINK_HOST" in check.fix


def test_the_coordinator() -> None:
    assert network.coordinator("").verdict is PASS
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert network.coordinator(address).verdict is PASS
    check = network.coordinator(address)
    assert check.verdict is FAIL
    assert "kvlink coordinator --port" in check.fix


def test_an_extension_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvlink._core", None)
    core, check = software.extension()
    assert core is None
    assert check.verdict is FAIL
    assert "pip install" in check.fix


def test_a_transport_says_why_not() -> None:
    assert software.transport("cma", "one copy", 1, "", "").verdict is PASS
    reason = "kvlink was built without RDMA (-DKVLINK_VERBS=OFF)"
    assert f'"{reason}"' in (Path(__file__).parents[2] / "csrc" / "transports" / "registry.cc").read_text()
    assert software.transport("verbs", "RDMA", 4, reason, "").verdict is FAIL
    check = software.transport("cma", "one copy", 1, "seccomp forbids it", "docker run --cap-add SYS_PTRACE")
    assert (check.verdict, check.evidence) == (WARN, "seccomp forbids it")
    assert check.fix == "docker run --cap-add SYS_PTRACE"


def test_options() -> None:
    assert software.options({}, ["shm"]) == Check("options", PASS, "all defaults")
    assert software.options({"KVLINK_PORT": "x"}, ["shm"]).verdict is FAIL
    assert software.options({"KVLINK_TRANSPORTS": "tcp"}, ["shm"]).verdict is FAIL
    assert "KVLINK_PROT" in software.options({"KVLINK_PROT": "1"}, ["shm"]).fix
    assert software.options({"KVLINK_PORT": "1"}, ["shm"]).evidence == "KVLINK_PORT=1"


def test_the_driver(tmp_path: Path) -> None:
    assert "absent" in software.gpu(tmp_path).evidence
    write(tmp_path, "proc/driver/nvidia/version", "NVRM version: 550.1\nGCC version: 12\n")
    assert software.gpu(tmp_path).evidence == "NVRM version: 550.1"


def titles(num_gpus: int, *nics: str) -> list[str]:
    return [step.title for step in steps(num_gpus, nics)]


def test_the_steps_follow_the_hardware() -> None:
    bare = titles(0)
    assert bare[-1] == "transports"
    assert "GPUDirect, compared byte by byte" not in {*titles(2), *titles(0, "mlx5_0")}
    assert set(titles(2, "mlx5_0")) - set(titles(1, "mlx5_0")) == {"GPU pulls between two GPUs"}
    assert titles(1, "mlx5_0")[-1] == titles(0, "mlx5_0")[-1] == "RDMA statistics after"


def test_every_command_of_kvlink_parses() -> None:
    for step in steps(2, ["mlx5_0"]):
        if step.command[0] == sys.executable:
            done = CliRunner().invoke(app, [*step.command[3:], "--help"])
            assert done.exit_code == 0, step


@pytest.mark.parametrize(
    ("command", "status", "says"),
    [
        (("sh", "-c", "echo out; echo err >&2; exit 3"), 3, "out\nerr"),
        (("no-such-program",), None, "not installed"),
        (("cat", "/"), 1, "cat: /: Is a directory"),
    ],
)
def test_a_step_that_fails_is_a_result(command: tuple[str, ...], status: int | None, says: str) -> None:
    result = run(Step("step", command))
    assert (result.status, result.output) == (status, says)


@pytest.mark.verify
def test_a_step_that_hangs_is_ended() -> None:
    result = run(Step("step", ("sh", "-c", "echo begun; exec sleep 60"), limit_s=0.5))
    assert (result.status, result.output) == (None, "begun\n\nended after its time limit")


def test_the_report_has_every_step_and_its_output(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    found = [Step("first", ("true",)), Step("second", (sys.executable, "-m", "kvlink", "doctor"))]
    done = [Result(found[0], 0, 0.1, "fine"), Result(found[1], 1, 2.0, "fail  memlock")]
    lines = list(write_report(path, found, lambda step: done[found.index(step)]))
    assert lines[-1] == f"{path} has 2 steps, of which 1 failed. Please send it back."
    text = path.read_text()
    assert text == report(done)
    assert "| second | 1 | 2.0 |" in text
    assert "`kvlink doctor`\n\n````\nfail  memlock\n````" in text


def test_an_interrupted_run_leaves_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "report.md"
    found = [Step("first", ("true",)), Step("second", ("true",)), Step("third", ("true",))]
    seen: list[str] = []

    def run(step: Step) -> Result:
        seen.append(path.read_text())
        if step.title == "second":
            raise KeyboardInterrupt
        return Result(step, 0, 0.1, "fine")

    with pytest.raises(KeyboardInterrupt):
        list(write_report(path, found, run))
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
    assert path.read_text() == seen[-1]
    assert 'Not complete: the run was interrupted in the step "first".' in seen[0]
    assert 'Not complete: the run was interrupted in the step "second".' in seen[1]
    assert "| first | 0 | 0.1 |" in seen[1]
    assert "Not complete" not in report([])
    with pytest.raises(ConfigError, match="name another file"):
        list(write_report(path, found, run))


def test_a_report_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "report.md").write_text("another host's")
    with pytest.raises(ConfigError, match=r"report.md: File exists; name another file by --report"):
        list(write_report(tmp_path / "report.md", []))
    assert (tmp_path / "report.md").read_text() == "another host's"


@pytest.fixture
def root(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


def found(root: FakeRoot, **env: str) -> list[tuple[str, Verdict, str]]:
    checks = stacks.checks(root.path, discover(root.path).nics, env)
    return [(check.name, check.verdict, f"{check.evidence}; {check.fix}") for check in checks]


def test_a_machine_without_stacks_gets_no_line(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.write("sys/module/mlx5_core/parameters/prof_sel", "2")
    root.write("proc/devices", "195 nvidia")
    assert found(root) == []


@pytest.mark.parametrize(
    ("files", "name", "verdict", "says"),
    [
        ({"sys/module/mlx5_core/version": "24.10-2.1.8"}, "ofed", PASS, "mlx5_core 24.10-2.1.8: DOCA-OFED or MLNX"),
        ({"sys/module/nv_peer_mem/version": "1.3"}, "nv_peer_mem", WARN, "1.3 is loaded and is obsolete; sudo rmmod"),
        ({"sys/module/gdrdrv/version": "2.4"}, "gdrcopy", PASS, "gdrdrv 2.4: kvlink does not use"),
        ({"sys/module/nvidia_fs/initstate": "live"}, "gpudirect storage", PASS, "nvidia_fs: GPUDirect Storage"),
        (
            {"sys/bus/pci/drivers/nvidia-nvswitch/0000:85:00.0/vendor": "0x10de", "proc/731/comm": "nv-fabricmanager"},
            "fabric manager", PASS, "NVLink between the GPUs of this host works",
        ),
        (
            {"sys/bus/pci/drivers/nvidia-nvswitch/0000:85:00.0/vendor": "0x10de", "proc/731/comm": "bash"},
            "fabric manager", WARN, "systemctl start nvidia-fabricmanager",
        ),
        (
            {"proc/devices": "234 nvidia-caps-imex-channels", "dev/nvidia-caps-imex-channels/channel0": ""},
            "imex", PASS, "1 IMEX channels are visible",
        ),
    ],
)  # fmt: skip
def test_a_stack_is_named_with_its_version(
    root: FakeRoot, files: dict[str, str], name: str, verdict: Verdict, says: str
) -> None:
    for path, text in files.items():
        root.write(path, text)
    ((shown, judged, sentence),) = found(root)
    assert (shown, judged) == (name, verdict)
    assert says in sentence


def test_a_dpu_and_how_to_see_its_mode(root: FakeRoot) -> None:
    root.nic("mlx5_0")
    root.write("sys/bus/pci/devices/0000:41:00.0/device", "0xa2dc")
    root.write("sys/class/infiniband/mlx5_0/fw_ver", "32.42.1000")
    ((name, _, sentence),) = found(root)
    assert name == "dpu mlx5_0"
    assert "BlueField-3, firmware 32.42.1000: `sudo mlxconfig -d 0000:41:00.0 q INTERNAL_CPU_" in sentence


def test_what_device_plugins_gave_a_pod(root: FakeRoot) -> None:
    env = {"PCIDEVICE_NVIDIA_COM_RDMA": "0000:41:00.0", "PCIDEVICE_NVIDIA_COM_RDMA_INFO": "{}"}
    ((name, _, sentence),) = found(root, **env)
    assert (name, sentence.partition(":00.0: ")[0]) == ("pod resources", "PCIDEVICE_NVIDIA_COM_RDMA=0000:41")
