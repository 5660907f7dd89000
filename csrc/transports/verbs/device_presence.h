// SPDX-License-Identifier: Apache-2.0
// Checks whether the kernel still has a device. Drivers that cannot take a device away from its users
// (soft-RoCE's) send no event when it is removed: its node goes at once, and the removal waits until every
// user has closed it.
#pragma once

#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>

namespace kvlink::verbs {

class DeviceNode {
 public:
  DeviceNode() = default;
  /// `path` is in sysfs. If it is not visible, its removal is not either.
  explicit DeviceNode(std::string path) : path_(std::move(path)), inode_(poll()) {}

  /// Another device may have the same name by now.
  bool removed() const {
    if (inode_ == 0) return false;
    const ino_t now = poll();
    return now != inode_ && (now != 0 || errno == ENOENT);
  }

 private:
  ino_t poll() const {
    struct stat found{};
    return ::stat(path_.c_str(), &found) == 0 ? found.st_ino : 0;
  }

  std::string path_;
  ino_t inode_ = 0;
};

}  // namespace kvlink::verbs
