# SPDX-License-Identifier: Apache-2.0
"""Runs LMCache's command line with kvlink's transfer channel: `python -m kvlink.integrations.lmcache server …`."""

from __future__ import annotations

from lmcache.cli.main import main

from kvlink import WorkerConfig, log

from . import register

if __name__ == "__main__":
    config = WorkerConfig.from_env(defaults={"log": "info"})
    log.setup(config.log, config.log_json)
    register()
    main()
