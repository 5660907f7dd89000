# SPDX-License-Identifier: Apache-2.0
"""What this machine has: topology, NICs, GPUDirect and the GPU kernels."""
