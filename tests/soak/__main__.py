# SPDX-License-Identifier: Apache-2.0
"""Owners and readers in several processes do everything that the API has to each other, and every byte is compared.

PYTHONPATH=tests python -m soak [--seconds 600] [--seed N]. Prints counts. Exits with 1 when a byte was wrong, foreign
or late, when something leaked or hung, or when a pull failed to which nothing was done.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time

from soak.fleet import Fleet


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=int(os.environ.get("KVLINK_TEST_SEED") or 0))
    parser.add_argument("--fault", default="", help="plan of the fault transport, as KVLINK_FAULT has it")
    parser.add_argument("--calm", action="store_true", help="no process is killed or stopped")
    given = parser.parse_args()
    seed = given.seed or random.SystemRandom().getrandbits(31)
    print(f"soak for {given.seconds:.0f} s, seed {seed}", flush=True)
    fleet = Fleet(seed, given.fault, given.calm)
    until, next_line = time.monotonic() + given.seconds, time.monotonic() + 10.0
    try:
        while time.monotonic() < until:
            fleet.turn()
            if time.monotonic() >= next_line:
                next_line += 10.0
                print(
                    f"{until - time.monotonic():6.0f} s left, {fleet.ledger.counts['good']} good", flush=True
                )
        fleet.finish()
    finally:
        fleet.kill_all()
    print("\n".join(fleet.ledger.lines()))
    print("soak is good" if fleet.ledger.is_good else "soak FAILED")
    return 0 if fleet.ledger.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
