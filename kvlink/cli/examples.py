# SPDX-License-Identifier: Apache-2.0
"""Holds the examples that end the help text of a command. A test parses each, and the reference shows them."""

from __future__ import annotations

EXAMPLES = {
    "kvlink": (
        "kvlink doctor    # what works on this machine",
        "kvlink demo      # a transfer between two processes",
        "kvlink config    # the options, which are KVLINK_* variables",
    ),
    "demo": (
        "kvlink demo",
        "kvlink demo --transport shm,tcp",
        "kvlink demo --engine transformers",
    ),
    "coordinator": (
        "kvlink coordinator --http-port 7480",
        "kvlink coordinator --host 0.0.0.0 --store etcd://10.0.0.1:2379,10.0.0.2:2379",
    ),
    "certs": (
        "kvlink certs --host 10.0.0.5 --host 10.0.0.21",
        "kvlink certs --tenant acme",
        "kvlink certs --renew --host 10.0.0.22",
        "kvlink certs --token observer.token --tenant acme",
    ),
    "status": (
        "kvlink status --coordinator 10.0.0.5:7400",
        "kvlink status --limit 0 --wide",
    ),
    "doctor": (
        "kvlink doctor",
        "kvlink doctor --gpudirect --json",
        "kvlink doctor --day-one --report host-7.md",
    ),
    "drain": (
        "kvlink drain http://10.0.0.7:8000 --router 8080",
        "kvlink drain prefill-0 --coordinator 10.0.0.5:7400",
        "kvlink drain --process 1 --notice-s 5 --grace-s 60",
    ),
    "replicate": (
        "kvlink replicate http://10.0.0.7:8000 http://10.0.0.8:8000 --model llama --prompt-file system-prompt.txt",
        "kvlink replicate http://10.0.0.7:8000 --model llama --chat messages.json --json",
    ),
    "router": ("kvlink router --prefill http://10.0.0.7:8000 --decode http://10.0.0.8:8000",),
}


def examples_of(command: str) -> str:
    """Returns the text for the end of a help text. Empty lines become line breaks there."""
    return "\n\n".join(("Examples:", *EXAMPLES[command]))
