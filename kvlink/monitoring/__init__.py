# SPDX-License-Identifier: Apache-2.0
"""Statistics and reports of workers and coordinators, metrics, and the status page."""
