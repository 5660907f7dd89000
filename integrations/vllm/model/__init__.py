# SPDX-License-Identifier: Apache-2.0
"""Facts about the model and the engine's configuration that the connector depends on."""
