# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt another server computes: what decode awaits, loads and renews."""
