# SPDX-License-Identifier: Apache-2.0
"""One module for each thing that `kvlink bench` measures."""
