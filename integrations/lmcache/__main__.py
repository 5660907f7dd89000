# SPDX-License-Identifier: Apache-2.0
"""Runs LMCache's command line with kvlink's transfer channel: `python -m kvlink.integrations.lmcache server …`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from lmcache.cli.main import main
from lmcache.v1.multiprocess.config import P2PConfig, add_p2p_args, parse_args_to_p2p_config

from kvlink import WorkerConfig
from kvlink.errors import ConfigError
from kvlink.runtime import log

from . import register


def p2p_config(arguments: Sequence[str]) -> P2PConfig | None:
    """Returns the settings of a server that will read through kvlink, or None for any other command of LMCache."""
    known, _ = add_p2p_args(argparse.ArgumentParser(add_help=False)).parse_known_args(arguments)
    config = parse_args_to_p2p_config(known)
    return config if config.enabled and config.transfer_engine == "kvlink" else None


if __name__ == "__main__":
    try:
        config = WorkerConfig.from_env(defaults={"log": "info"})
        log.setup(config.log, config.log_json)
        register(p2p_config(sys.argv[1:]))
    except ConfigError as error:
        sys.exit(f"kvlink: {error}")
    main()
