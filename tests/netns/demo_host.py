# SPDX-License-Identifier: Apache-2.0
"""A role that moves a process of the demo to a host."""

from __future__ import annotations

import os

from netns.lan import enter

from kvlink.coordinator.coordinator import Coordinator
from kvlink.demo.processes import Reply
from kvlink.runtime.background import ControlThread


class DemoHost:
    """Open it first: threads that run already stay where they are. The demo's workers get the options in `env`."""

    def __init__(self, namespace: str, env: dict[str, str]) -> None:
        enter(namespace)
        os.environ.update(env)

    def coordinator(self) -> Reply:
        """Starts a coordinator on this host."""
        return {"address": ControlThread.shared().run(Coordinator().start(os.environ["KVLINK_HOST"]))}
