# SPDX-License-Identifier: Apache-2.0
"""Moves encoder outputs between vLLM servers: `--ec-transfer-config '{"ec_connector":"KVLinkEncoderConnector",…}'`.

- `connector`: the class that vLLM loads, in the scheduler's process and in each worker's
- `scheduler`: decides what is saved, offered, pulled and loaded, with `offers`, `pulls` and the `cache` of both
- `commands`: what a step copies, and the workers that copy it
- `memory`: the memory that these processes share
- `items`: what `ec_transfer_params` carries
"""
