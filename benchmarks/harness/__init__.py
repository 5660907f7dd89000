# SPDX-License-Identifier: Apache-2.0
"""What measurements share: processes, contents, baselines of the machine, quantiles and the record of a run."""
