# SPDX-License-Identifier: Apache-2.0
"""Requests that vLLM's API server did not admit, or whose clients left before: how it tells connectors of them."""

from __future__ import annotations

from typing import Any

_NO_PROMPT = [0]


def is_rejection(request: Any) -> bool:
    """Whether this is vLLM's notice of a request that it did not admit: one with a prompt of its own, [0], that is
    aborted as soon as it was added. Its kv_transfer_params are those of the request."""
    told = getattr(request, "abort_immediately", None)
    return request.prompt_token_ids == _NO_PROMPT if told is None else bool(told)
