# SPDX-License-Identifier: Apache-2.0
"""Implements `kvlink report` and `kvlink bench compare`: results on one page that needs no network, and their changes.

comparison.py compares runs, page.py decides what a page says, html.py writes it, summary.py draws the README's charts.
"""
