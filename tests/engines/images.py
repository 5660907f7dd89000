# SPDX-License-Identifier: Apache-2.0
"""Images that tests make, and chat completions about them."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from pair import NUM_NEW, Answer, Tokens
from servers import post

PIXELS = 112

Parts = Sequence[Tokens | str]
"""A message: lists of token ids, and names of images."""


def image(name: str, pixels: int = PIXELS) -> bytes:
    """Returns a square of random pixels as PNG, the same for the same name and size."""
    chosen = random.Random(name)
    rows = b"".join(b"\0" + chosen.randbytes(3 * pixels) for _ in range(pixels))
    header = struct.pack(">IIBBBBB", pixels, pixels, 8, 2, 0, 0, 0)  # eight bits for each of three colours
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks
    )


def chat(
    url: str, model: str, parts: Parts, num_new: int = NUM_NEW, pixels: int = PIXELS, **extra: Any
) -> Answer:
    """One greedy chat completion, at a server or a router."""
    body = {
        "model": model,
        "messages": messages(parts, pixels),
        "max_tokens": num_new,
        "temperature": 0,
        "return_token_ids": True,
    }
    status, answer = post(f"{url}/v1/chat/completions", body | extra)
    return Answer(status, answer["choices"][0]["token_ids"] if status == 200 else None, answer)


def messages(parts: Parts, pixels: int = PIXELS) -> list[dict[str, Any]]:
    """Returns the messages of a chat with one message."""
    return [{"role": "user", "content": [_content(part, pixels) for part in parts]}]


def _content(part: Tokens | str, pixels: int) -> dict[str, Any]:
    if isinstance(part, str):
        encoded = base64.b64encode(image(part, pixels)).decode()
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}}
    return {"type": "text", "text": " ".join(f"t{token}" for token in part)}
