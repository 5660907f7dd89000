# SPDX-License-Identifier: Apache-2.0
"""Real SGLang servers under pressure: queues much longer than the slots, and requests that decode retracts.

Every answer's tokens are compared with a plain server's, and afterwards nothing is held anywhere.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from servers import Server, free_port, running
from sglang_stack import (
    NEW_TOKENS,
    PREFILL,
    PYTHON,
    Stack,
    decode_flags,
    prompt,
    servers_of,
    sglang,
    wait_for,
)

NUM_REQUESTS = 48
FEW_TOKENS = 1024
"""The cache of a server that admits eight requests and cannot hold their answers."""
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}
"""SGLang's own switch for tests: every third step, decode retracts a running request."""

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="no SGLang: run .ci/engines sglang"),
]


@dataclass
class Queues(Stack):
    """All decode servers read from `prefill`, which computes three requests at a time.

    `decode` has two slots, `retracting` retracts every few steps, and `full` has a small cache.
    """

    metrics_port: int

    retracting = property(lambda self: self.servers[2])
    full = property(lambda self: self.servers[4])

    def idle(self) -> bool:
        """No server holds a page, and every lease was settled by its reader; none had to expire."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        counts = {
            line.partition("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("kvlink_")
        }
        granted, settled = (counts[f"kvlink_{how}_leases_total"] for how in ("granted", "settled"))
        return granted == settled and super().idle()


@pytest.fixture(scope="module")
def queues() -> Iterator[Queues]:
    port, metrics_port = free_port(), free_port()
    launches = [
        sglang(
            "sglang-queue-prefill",
            *(*PREFILL, "--disaggregation-bootstrap-port", str(port), "--max-running-requests", "3"),
            KVLINK_METRICS_PORT=str(metrics_port),
        ),
        sglang("sglang-queue-decode", *decode_flags(port), "--max-running-requests", "2"),
        sglang(
            "sglang-queue-retracting",
            *decode_flags(port, "cpu_tensor"),
            *("--max-running-requests", "4"),
            **RETRACTING,
        ),
        sglang("sglang-queue-plain"),
        sglang(
            "sglang-queue-full",
            *decode_flags(port, "cpu_tensor"),
            *("--max-total-tokens", str(FEW_TOKENS), "--max-running-requests", "8"),
            *("--num-reserved-decode-tokens", "16"),
        ),
    ]
    with servers_of(launches) as servers:
        yield Queues(servers, port, metrics_port)


def check_answers(
    queues: Queues, decode: Server, prompts: list[list[int]], num_new: int = NEW_TOKENS, refused: int = 200
) -> int:
    """Sends all at the same time. Returns how many got the status `refused`; all others get the right tokens."""
    expected = [queues.expected(tokens, num_new) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as clients:
        answers = list(clients.map(lambda tokens: queues.handed_off(tokens, decode, num_new), prompts))
    wrong = [answer for status, answer in answers if status not in (200, refused)]
    assert not wrong
    for (status, answer), tokens in zip(answers, expected, strict=True):
        assert status != 200 or answer["output_ids"] == tokens
    wait_for(queues.idle)
    return sum(status == refused for status, _ in answers)


def test_queues_much_longer_than_the_slots(queues: Queues) -> None:
    """Decode's queue of requests without pages and prefill's of requests without a decode server are both long."""
    prompts = [prompt(1 + 37 * (number % 10), seed=100 + number) for number in range(NUM_REQUESTS)]
    assert check_answers(queues, queues.decode, prompts) == NUM_REQUESTS
    queued = [queues.prefill.num_logged(f"#bootstrap-req: {number},") for number in range(16, NUM_REQUESTS)]
    assert sum(queued) > 0


def test_retracted_requests_go_on(queues: Queues) -> None:
    """Decode copies their caches away and back, while others' pages are pulled into the freed ones."""
    prompts = [prompt(1 + 37 * (number % 10), seed=200 + number) for number in range(NUM_REQUESTS)]
    assert check_answers(queues, queues.retracting, prompts) == NUM_REQUESTS
    assert queues.retracting.num_logged("Testing retraction. #retracted_reqs: 1") >= NUM_REQUESTS // 4


def test_a_full_cache_retracts(queues: Queues) -> None:
    prompts = [prompt(60 + number, seed=300 + number) for number in range(NUM_REQUESTS // 2)]
    assert check_answers(queues, queues.full, prompts, num_new=150) == len(prompts)
    assert queues.full.num_logged("KV cache pool is full. Retract requests") > 0


def test_retraction_without_a_backup_is_an_error_of_that_request(queues: Queues) -> None:
    flags = (*decode_flags(queues.bootstrap_port), "--max-running-requests", "4")
    with running([sglang("sglang-queue-aborting", *flags, **RETRACTING)]) as (decode,):
        prompts = [prompt(40 + number, seed=400 + number) for number in range(NUM_REQUESTS // 4)]
        aborted = check_answers(queues, decode, prompts, refused=503)
        assert 0 < aborted < len(prompts)
        assert decode.num_logged("Retracted under decode memory pressure without a KV backup") == aborted
