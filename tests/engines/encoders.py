# SPDX-License-Identifier: Apache-2.0
"""Launches of an encoder server, of servers that pull its outputs, and of a plain server of the same model."""

from __future__ import annotations

import json
from typing import Any

from images import Parts, chat
from pair import Answer, flags
from servers import Launch, Server, vllm

MODEL = "idefics3"


def launch(role: str, *more: str, model: str = MODEL, **extra: Any) -> Launch:
    """Returns the launch of a server with this `ec_role`, or without a connector if it is empty.

    `extra` are settings of the connector. No server has a prefix cache, so that every image needs its embeddings.
    """
    transfer = {
        "ec_connector": "KVLinkEncoderConnector",
        "ec_role": role,
        "ec_connector_extra_config": extra,
    }
    given = ("--ec-transfer-config", json.dumps(transfer)) if role else ()
    return vllm(
        f"encoder-{role or 'plain'}",
        model,
        None,
        (*flags("llama"), "--no-enable-prefix-caching", *given, *more),
    )


def asked(server: Server, parts: Parts, model: str = MODEL, **extra: Any) -> Answer:
    """Asks for an answer to a message, and checks that it came."""
    answer = chat(server.url, model, parts, **extra)
    assert answer.status == 200, answer.body
    return answer


def encode(encoder: Server, parts: Parts, model: str = MODEL, **extra: Any) -> dict[str, Any]:
    """Asks the encoder server for a message's images, and returns what a server needs to pull them."""
    answer = asked(encoder, parts, model, num_new=1, **extra)
    params = answer.body.get("ec_transfer_params")
    assert params, answer.body
    return dict(params)


def items(server: Server, result: str) -> float:
    """Returns how many encoder outputs a server has counted with this result."""
    samples = server.samples().items()
    return sum(
        value for name, value in samples if "kvlink_encoder_items_total" in name and f'"{result}"' in name
    )
