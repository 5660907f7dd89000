# SPDX-License-Identifier: Apache-2.0
"""Makes the typed calls to a coordinator's directory of prefixes."""

from __future__ import annotations

from kvlink.config.timeouts import given_or
from kvlink.control.codec import CoordinatorCalls
from kvlink.control.prefix_values import FoundPrefix, PrefixChanges, PrefixQuery
from kvlink.control.rpc.client import Client


class PrefixCalls(Client):
    """The part of a CoordinatorClient that publishes and finds prefixes.

    An older coordinator has no directory, and each call raises CoordinatorError that names the missing method.
    """

    async def publish_prefixes(self, changes: PrefixChanges, timeout_s: float | None = None) -> int:
        """Publishes and withdraws prefixes of a joined worker, and returns the directory's id.

        `PrefixPublisher` calls it, and publishes all again when the id has changed.
        """
        timeout_s = given_or(timeout_s, self._timeout_s)
        return await self._channel.call(CoordinatorCalls.PUBLISH_PREFIXES, changes, timeout_s)

    async def find_prefix(self, query: PrefixQuery, timeout_s: float | None = None) -> list[FoundPrefix]:
        """Returns servers that have the longest prefix, best first. Does not retry, because computing is as good."""
        timeout_s = given_or(timeout_s, self._timeout_s)
        return await self._channel.attempt(CoordinatorCalls.FIND_PREFIX, query, timeout_s)
