# SPDX-License-Identifier: Apache-2.0
"""`kvlink report`: results of the benchmarks on one page that opens anywhere, without a network.

measures.py reads rows, comparison.py puts two files beside each other, charts.py draws (matplotlib), page.py writes.
"""
