# SPDX-License-Identifier: Apache-2.0
"""Integrates kvlink into inference servers. It is installed as `kvlink.integrations`; nothing in kvlink imports it."""
