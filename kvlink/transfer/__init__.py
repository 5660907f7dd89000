# SPDX-License-Identifier: Apache-2.0
"""The data plane: the engine, pools of blocks, offers, and pulls from peers. It knows no coordinator."""
