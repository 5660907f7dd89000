# SPDX-License-Identifier: Apache-2.0
"""Requests whose prompt this server computes for another one: offers, announcements and leases."""
