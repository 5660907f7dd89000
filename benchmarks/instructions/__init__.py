# SPDX-License-Identifier: Apache-2.0
"""The regression gate: instructions that plan, post and settle take on fixed inputs, against a committed baseline."""
