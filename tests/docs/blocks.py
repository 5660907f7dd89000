# SPDX-License-Identifier: Apache-2.0
"""Every block of code on every page, and who runs it: a test of the newcomer lane, another test, or nobody and why."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```|((?:^    [^\n]*\n)+)", re.MULTILINE | re.DOTALL)
_CODE = ("sh", "console", "python", "indented")
"""Languages of what a reader runs. tests/docs/test_code_blocks.py parses JSON and YAML; the rest is text."""

RUNS, SERVED = "runs", "served"
"""As it stands, from the wheel; SERVED needs a coordinator at the default port."""
_FIRST = "tests/newcomer/test_first_screen.py"
_PAGES = "tests/newcomer/test_page_blocks.py"
_CODE_TESTS = "tests/docs/test_code_blocks.py"
_FRAGMENT = (
    "not run: part of a program; docs/examples has it whole, and tests/docs/test_examples.py runs that"
)
_ENGINES = "not run: needs an inference server and a model; make test-engines runs such servers"
_HOSTS = (
    "not run: names hosts of an example; kvlink's parser takes each line (tests/docs/test_command_lines.py)"
)
_CLUSTER = "not run: needs a cluster; tests/deploy checks the chart and the pods against Kubernetes' schemas"
_TRACE = "not run: needs a published trace, which the repository does not have"

HOW: dict[str, dict[str, str]] = {
    "README.md": {
        "make demo": _FIRST,
        "python3 -m venv": _FIRST,
        "pip install '.[router]'": _ENGINES,
        "import kvlink": "tests/docs/test_readme.py",
    },
    "docs/benchmarks/results.md": {"python tests/engines": _TRACE},
    "docs/getting-started/broadcast.md": {"seats = owner.split": _FRAGMENT},
    "docs/getting-started/cookbook.md": {"": _CODE_TESTS},
    "docs/getting-started/install.md": {
        "apt-get update": _FIRST,
        "python3 -m venv": _FIRST,
        "make release-wheel": "make release-wheel",
        "export PIP_FIND_LINKS": _PAGES,
    },
    "docs/getting-started/native.md": {"cmake -S": "tests/capi/test_example.py"},
    "docs/getting-started/prefixes.md": {"import kvlink": _CODE_TESTS},
    "docs/getting-started/quickstart.md": {
        "pip install .     # in a checkout, unless": RUNS,
        "kvlink bench pull": RUNS,
        "python docs/examples/two_processes.py": RUNS,
        "pip install '.[router]'": _ENGINES,
        "pip install .                 # in a checkout of kvlink": _ENGINES,
        "pip install '.[demo]'": "not run: tests/newcomer runs the same lines of transformers.md",
        "curl http": _ENGINES,
        "curl -s http": _ENGINES,
    },
    "docs/hardware/day-one.md": {"pip install": "not run: takes minutes, and is for hosts with a GPU or an RDMA NIC"},
    "docs/hardware/fabric.md": {"apt-get install": "not run: names an adapter; make test-fabric needs none"},
    "docs/hardware/gpudirect.md": {
        "kvlink doctor": "not run: its second line fails on a machine without a GPU and an RDMA NIC, as the page says",
        "docker run": "not run: needs docker, a GPU and an RDMA NIC",
    },
    "docs/hardware/rdma.md": {"kvlink doctor": RUNS},
    "docs/index.md": {"make demo": _FIRST},
    "docs/operate/compose.md": {"make image": "tests/deploy/test_compose.py"},
    "docs/operate/coordinator.md": {"# one coordinator": "tests/deploy/test_commands.py"},
    "docs/operate/drain.md": {"kvlink drain": _HOSTS, "with kvlink.Worker": _FRAGMENT},
    "docs/operate/etcd.md": {"kvlink coordinator": _HOSTS},
    "docs/operate/kubernetes.md": {
        "make image": _CLUSTER,
        "kubectl create namespace": _CLUSTER,
        "kubectl -n serving apply": _CLUSTER,
        "helm install kv": _CLUSTER,
        "kubectl get pods": _CLUSTER,
    },
    "docs/operate/monitoring.md": {
        "pip install '.[metrics]'": _PAGES,
        "from prometheus_client": _CODE_TESTS,
        "2026-": "not run: lines of a log",
        "pip install '.[otel]'": RUNS,
    },
    "docs/operate/runbook.md": {
        "kvlink status": SERVED,
        "export ETCDCTL_API": "tests/coordinator: etcd's runbook is tried with a real etcd",
    },
    "docs/operate/security.md": {"pip install '.[certs]'": RUNS, "kvlink coordinator": _HOSTS},
    "docs/operate/systemd.md": {
        "python3 -m venv": _PAGES,
        "/opt/kvlink/bin/kvlink certs": _PAGES,
        "ssh root@": "not run: copies files to other hosts",
        "cp integrations": _PAGES,
        "KVLINK_TLS_CA": _PAGES,
        "install -D": "not run: needs a running systemd; tests/deploy/test_unit.py verifies the drop-in",
    },
    "docs/reference/python-api.md": {"": _CODE_TESTS},
    "docs/servers/lmcache.md": {"pip install .": _ENGINES},
    "docs/servers/models.md": {"export KVLINK_SAME_MODEL": RUNS},
    "docs/servers/nixl.md": {"pip install packaging/nixl": "tests/nixl/test_plugin.py"},
    "docs/servers/routers.md": {
        "pip install .": _ENGINES,
        "pip install '.[router]'": _ENGINES,
        "kvlink drain": _HOSTS,
        "kvlink router": _HOSTS,
        "python toy_proxy": _ENGINES,
        "pip install vllm-router": _ENGINES,
        "vllm-router": _ENGINES,
        "python -m dynamo": _ENGINES,
    },
    "docs/servers/sglang.md": {"pip install .": _ENGINES},
    "docs/servers/transformers.md": {
        "pip install '.[demo]'": _PAGES,
        "from transformers.generation": _CODE_TESTS,
        "from kvlink.integrations": _CODE_TESTS,
    },
    "docs/servers/vllm.md": {"pip install .": _ENGINES, "export KVLINK_HOST": RUNS},
    "docs/servers/vllm-chats.md": {"vllm serve": _ENGINES},
    "docs/servers/vllm-encoders.md": {"vllm serve": _ENGINES},
    "docs/servers/vllm-prefixes.md": {"KVLINK_COORDINATOR": _ENGINES, "kvlink replicate": _ENGINES},
    "docs/servers/vllm-streaming.md": {"kvlink coordinator": _ENGINES},
    "docs/support.md": {"kvlink version": RUNS},
    "docs/troubleshooting.md": {"kvlink doctor": SERVED},
}  # fmt: skip


class Block(NamedTuple):
    """A block of code, its page below the repository's root, and its language."""

    page: str
    language: str
    text: str


def blocks() -> list[Block]:
    """Returns each block that a reader could run."""
    found = []
    for path in PAGES:
        for language, fenced, indented in _BLOCK.findall(path.read_text()):
            text = textwrap.dedent(indented) if indented else fenced
            found.append(Block(str(path.relative_to(ROOT)), "indented" if indented else language, text))
    return [block for block in found if block.language in _CODE]


def how(block: Block) -> str:
    """Returns who runs a block. Raises KeyError for one that the table does not have, or has twice."""
    found = [
        runner for beginning, runner in HOW.get(block.page, {}).items() if block.text.startswith(beginning)
    ]
    if len(found) != 1:
        raise KeyError(block.page, block.text.split("\n", 1)[0])
    return found[0]


def block(page: str, beginning: str) -> str:
    """Returns the text of the first block of a page that begins so."""
    return next(each.text for each in blocks() if each.page == page and each.text.startswith(beginning))
