# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers with other page sizes than the rest of the lane, equal and unequal ones."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from servers import Server, free_port, post
from sglang_stack import (
    PREFILL,
    PYTHON,
    Stack,
    ask_and_forget,
    body,
    decode_flags,
    prompt,
    servers_of,
    sglang,
    wait_for,
)

SIZES = (16, 32)

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: run .ci/engines sglang"),
]


class Pages:
    """A prefill and a decode server of each page size, and a plain one."""

    def __init__(self, servers: list[Server], ports: dict[int, int]) -> None:
        self.servers, self.ports = servers, ports
        self.prefill = dict(zip(SIZES, servers[:2], strict=True))
        self.decode = dict(zip(SIZES, servers[2:4], strict=True))

    def stack(self, prefill: int, decode: int) -> Stack:
        servers = [self.prefill[prefill], self.decode[decode], self.decode[decode], self.servers[4]]
        return Stack(servers, self.ports[prefill])


@pytest.fixture(scope="module")
def pages() -> Iterator[Pages]:
    ports = {size: free_port() for size in SIZES}
    launches = [
        sglang(
            f"sglang-prefill-{size}",
            *(*PREFILL, "--page-size", str(size), "--disaggregation-bootstrap-port", str(ports[size])),
        )
        for size in SIZES
    ]
    launches += [
        sglang(f"sglang-decode-{size}", *decode_flags(ports[size]), "--page-size", str(size))
        for size in SIZES
    ]
    with servers_of([*launches, sglang("sglang-plain")]) as servers:
        yield Pages(servers, ports)


@pytest.mark.parametrize("size", SIZES)
def test_servers_of_one_page_size_hand_over(pages: Pages, size: int) -> None:
    stack = pages.stack(size, size)
    for length in (1, size - 1, size, size + 1, 300):
        tokens = prompt(length, seed=500)
        status, answer = stack.handed_off(tokens)
        assert (status, answer["output_ids"]) == (200, stack.expected(tokens))
    wait_for(stack.idle)


@pytest.mark.parametrize(("prefill", "decode"), [SIZES, SIZES[::-1]])
def test_different_page_sizes_are_refused(pages: Pages, prefill: int, decode: int) -> None:
    """The request fails with the reason, and both servers go on with those that fit them."""
    stack = pages.stack(prefill, decode)
    request = body(prompt(100, seed=501)) | stack.room()
    with ThreadPoolExecutor(1) as clients:
        clients.submit(ask_and_forget, stack.prefill, request)
        status, answer = post(stack.decode.url + "/generate", request)
        # Prefill's leg waits for decode until its client goes.
        post(stack.prefill.url + "/abort_request", {"abort_all": True})
    assert status == 500
    said = f"prefill server has page_size={prefill}, but decode server has page_size={decode}"
    assert said in str(answer)
    wait_for(stack.idle)
    for size in SIZES:
        tokens = prompt(60, seed=502)
        status, answer = pages.stack(size, size).handed_off(tokens)
        assert (status, answer["output_ids"]) == (200, stack.expected(tokens))
