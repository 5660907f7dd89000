// SPDX-License-Identifier: Apache-2.0
#include "transports/verbs/mlx5_api.h"

#include <optional>

#include "base/dynamic_library.h"

namespace kvlink::verbs {

const Mlx5Api* mlx5_api() {
  static const std::optional<Mlx5Api> loaded = []() -> std::optional<Mlx5Api> {
    Result<Library> opened = Library::open({"libmlx5.so.1"}, "");
    if (!opened.ok()) return {};
    Mlx5Api api{};
    const bool complete = (*opened).load(api.reg_dmabuf_mr, "mlx5dv_reg_dmabuf_mr") &&
                          (*opened).load(api.get_data_direct_sysfs_path, "mlx5dv_get_data_direct_sysfs_path");
    return complete ? std::optional(api) : std::nullopt;
  }();
  return loaded ? &*loaded : nullptr;
}

}  // namespace kvlink::verbs
