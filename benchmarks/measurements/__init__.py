# SPDX-License-Identifier: Apache-2.0
"""Has one module for each measurement of `kvlink bench`."""
