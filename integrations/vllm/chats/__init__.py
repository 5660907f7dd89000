# SPDX-License-Identifier: Apache-2.0
"""Later turns of chats and prefixes that other servers have in their caches."""
