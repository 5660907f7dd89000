# SPDX-License-Identifier: Apache-2.0
"""Serves OpenAI's API in front of prefill and decode servers: a demo, and the reference for a router's messages.

docs/design/decisions/router.md says what it lacks for production. It needs the extra `kvlink[router]`.
"""
