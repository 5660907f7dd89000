// SPDX-License-Identifier: Apache-2.0
// What libmlx5 has beyond libibverbs. Its header is newer than the systems that kvlink is built on.
#pragma once

#include <infiniband/verbs.h>

namespace kvlink::verbs {

/// MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT: a NIC reaches the memory through its own PCIe function beside the
/// GPU, instead of through the CPU.
inline constexpr int kDataDirect = 1;

/// Names without `mlx5dv_`; see the manual pages of rdma-core 54.
struct Mlx5Api {
  ibv_mr* (*reg_dmabuf_mr)(ibv_pd*, uint64_t offset, size_t bytes, uint64_t iova, int fd, int access,
                           int mlx5_access);
  /// Returns 0 if the device has such a function.
  int (*get_data_direct_sysfs_path)(ibv_context*, char* path, size_t bytes);
};

/// Opens the library once. Returns null if it is absent or older.
const Mlx5Api* mlx5_api();

}  // namespace kvlink::verbs
