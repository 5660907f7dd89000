# SPDX-License-Identifier: Apache-2.0
"""Is the regression gate: instructions to plan, post and settle on fixed inputs, compared with a committed baseline."""
