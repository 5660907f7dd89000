# SPDX-License-Identifier: Apache-2.0
"""What a coordinator shows by HTTP, read-only: /metrics for Prometheus, and a page for people."""
