# SPDX-License-Identifier: Apache-2.0
"""This package serves a coordinator's state by HTTP, read-only: /metrics for Prometheus, and a page for people."""
