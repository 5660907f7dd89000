# SPDX-License-Identifier: Apache-2.0
"""Describes this machine: its topology, its NICs, GPUDirect, and the kernels that run on its GPUs."""
