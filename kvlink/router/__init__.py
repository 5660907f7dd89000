# SPDX-License-Identifier: Apache-2.0
"""Serves OpenAI's API in front of prefill and decode servers: a demo, and the reference for a router's messages.

It is not for production. vLLM's router, llm-d, Dynamo and vLLM's production stack are: they also balance load, know
prefix caches and scale, and they too carry the handoff as a dictionary. docs/design/decisions/router.md says what is
missing here, and why. The router needs the extra `kvlink[router]`.
"""
