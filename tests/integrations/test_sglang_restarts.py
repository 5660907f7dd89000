# SPDX-License-Identifier: Apache-2.0
"""A prefill server that is back before SGLang's heartbeat gives it up has other sockets than before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvlink.integrations.sglang.restarts import was_restarted, with_route

ADDRESS = "10.0.0.1:8998"
RANKS = {0: ("10.0.0.1", 7000), 1: ("10.0.0.2", 7001)}


class Session:
    """Answers for a bootstrap server whose ranks of data rank 0 are these."""

    def __init__(self, ranks: dict[int, tuple[str, int]]) -> None:
        self.ranks = ranks
        self.asked: list[str] = []

    def get(self, url: str, timeout: Any) -> Any:
        self.asked.append(url)
        rank = int(url.partition("target_tp_rank=")[2].partition("&")[0])
        if rank not in self.ranks:
            return SimpleNamespace(status_code=503, json=dict)
        ip, port = self.ranks[rank]
        return SimpleNamespace(status_code=200, json=lambda: {"rank_ip": ip, "rank_port": port})


def known() -> list[dict[str, Any]]:
    infos = [
        with_route({"rank_ip": ip, "rank_port": str(port)}, (0, 0, rank, 0))
        for rank, (ip, port) in RANKS.items()
    ]
    return [info for info in infos if info is not None]


@pytest.mark.parametrize(
    ("ranks", "restarted"),
    [
        (RANKS, False),
        (RANKS | {1: ("10.0.0.2", 7002)}, True),
        (RANKS | {0: ("10.0.0.3", 7000)}, True),
        ({}, True),
    ],
    ids=["the same", "another port", "another host", "not registered yet"],
)
def test_other_ranks_at_one_address_are_another_server(
    ranks: dict[int, tuple[str, int]], restarted: bool
) -> None:
    session = Session(ranks)
    assert was_restarted(session, ADDRESS, known()) is restarted
    assert session.asked[0] == (
        f"http://{ADDRESS}/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0"
    )


def test_a_server_of_which_nothing_is_known_is_not_asked() -> None:
    session = Session({})
    assert with_route(None, (0, 0, 0, 0)) is None
    assert not was_restarted(session, ADDRESS, [])
    assert not session.asked
