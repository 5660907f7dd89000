# SPDX-License-Identifier: Apache-2.0
"""This package holds statistics and reports of workers and coordinators, metrics, and the status page."""
