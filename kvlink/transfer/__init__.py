# SPDX-License-Identifier: Apache-2.0
"""Implements the data plane: the engine, pools of blocks, offers, and pulls from peers. It uses no coordinator."""
