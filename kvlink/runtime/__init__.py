# SPDX-License-Identifier: Apache-2.0
"""Runs what works in the background of a process."""
