# SPDX-License-Identifier: Apache-2.0
"""Holds models, traces, arrivals and allocations that measurements replay."""
