# SPDX-License-Identifier: Apache-2.0
"""Recognizes requests that vLLM's API server did not admit, or whose clients left before."""

from __future__ import annotations

from typing import Any

_NO_PROMPT = [0]


def is_rejection(request: Any) -> bool:
    """Returns whether this is vLLM's notice of a request that it did not admit.

    Such a notice is a request with the prompt [0] that is aborted as soon as it was added. Its kv_transfer_params are
    those of the request.
    """
    aborted = getattr(request, "abort_immediately", None)
    return request.prompt_token_ids == _NO_PROMPT if aborted is None else bool(aborted)
