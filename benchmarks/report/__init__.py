# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink report`: benchmark results on one page that opens anywhere, without a network.

measures.py reads rows, comparison.py compares two files, charts.py draws (matplotlib), page.py writes.
"""
