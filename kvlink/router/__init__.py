# SPDX-License-Identifier: Apache-2.0
"""A small prefill/decode router for demos and tests: OpenAI's API in front of servers that hand requests over.

Needs the extra `kvlink[router]`. Production has llm-d, Dynamo and vLLM's production stack, which also balance load,
know prefix caches and scale; all of them treat the hand-off as this one does, as a dictionary to carry along.
"""
