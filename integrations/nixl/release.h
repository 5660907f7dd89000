// SPDX-License-Identifier: Apache-2.0
// Which release of NIXL has loaded this plugin. Its plugin API has the number 1 in all of them, also where
// classes changed.
#pragma once

#include <string>
#include <string_view>

#include "base/status.h"

namespace kvlink::nixl {

inline constexpr char kOldestRelease[] = "1.0.0", kNewestRelease[] = "1.5.1";
/// Says which release of NIXL this is, where no package's metadata says it.
inline constexpr char kReleaseVariable[] = "KVLINK_NIXL_RELEASE";

/// Returns the release of the NIXL whose libnixl.so has this path: of the package that it lies in.
std::string release_at(const std::string& library);
/// Returns kOk for the releases whose binaries this plugin was compared with.
Status check_release(std::string_view release);
/// The same for the NIXL that this process has loaded.
Status check_loaded_release();

}  // namespace kvlink::nixl
