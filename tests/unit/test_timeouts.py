# SPDX-License-Identifier: Apache-2.0
"""0 is a timeout, and nothing below it is."""

from __future__ import annotations

import pytest

from kvlink.config.timeouts import checked, given_or
from kvlink.errors import ConfigError


def test_zero_is_given() -> None:
    assert given_or(0, 30.0) == 0
    assert given_or(0.0, 30.0) == 0
    assert given_or(None, 30.0) == 30
    assert checked(float("inf")) == float("inf")


@pytest.mark.parametrize("timeout_s", [-1, -1e-9, float("-inf"), float("nan")])
def test_less_is_refused(timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="0 means now"):
        given_or(timeout_s, 30.0)
