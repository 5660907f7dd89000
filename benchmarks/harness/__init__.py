# SPDX-License-Identifier: Apache-2.0
"""Holds what measurements share: processes, contents, baselines, quantiles and the record of a run."""
