# SPDX-License-Identifier: Apache-2.0
"""A demo of a prefill/decode router, and the reference for its messages: OpenAI's API in front of servers.

Not for production, which has vLLM's router, llm-d, Dynamo and vLLM's production stack: they also balance load, know
prefix caches and scale, and carry the handoff as this one does, as a dictionary. What is missing here, and why:
docs/design/decisions/router.md. Needs the extra `kvlink[router]`.
"""
