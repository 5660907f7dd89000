# SPDX-License-Identifier: Apache-2.0
"""Models, traces, arrivals and allocations that measurements replay."""
