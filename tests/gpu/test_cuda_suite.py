# SPDX-License-Identifier: Apache-2.0
"""The suite over all transports with pools on a real GPU, between processes, over the transport `cuda`."""

from __future__ import annotations

import pytest
from transports.gpus import SUITES_BETWEEN_GPUS, run_suite


@pytest.mark.timeout(1800)
@SUITES_BETWEEN_GPUS
def test_it_passes_between_gpus(staging: str, which: str, least: int) -> None:
    run_suite(staging, which, least, 1700)
