# SPDX-License-Identifier: Apache-2.0
"""Commands of routers and of the servers behind them."""
