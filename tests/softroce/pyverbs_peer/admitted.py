# SPDX-License-Identifier: Apache-2.0
"""Shows an agent on loopback the token of its user, as a caller that is not kvlink must."""

from __future__ import annotations

import os

from kvlink.control.security.own_file import folders, tokens


def shown_token() -> tuple[tuple[str, str], ...]:
    """Metadata for a call, after the agent's process has started."""
    uid = os.geteuid()
    shown = next(iter(tokens(folders(os.environ, uid), uid).values()))
    return (("authorization", f"Bearer {shown}"),)
