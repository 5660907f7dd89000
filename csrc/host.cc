// SPDX-License-Identifier: Apache-2.0
#include "host.h"

#include <sys/random.h>
#include <sys/stat.h>

#include <cstdlib>
#include <cstring>
#include <fstream>

namespace kvlink {

std::string boot_id() {
  std::string id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), id);
  return id;
}

uint64_t namespace_inode(const char* kind) {
  struct stat found{};
  return ::stat((std::string("/proc/self/ns/") + kind).c_str(), &found) == 0 ? found.st_ino : 0;
}

std::string random_bytes(size_t bytes) {
  std::string drawn(bytes, '\0');
  for (size_t at = 0; at < bytes;) {
    const ssize_t got = ::getrandom(drawn.data() + at, bytes - at, 0);
    if (got > 0)
      at += static_cast<size_t>(got);
    else if (errno != EINTR)
      std::abort();  // no kernel that runs C++20 binaries lacks it
  }
  return drawn;
}

uint64_t random_u64() {
  uint64_t value;
  std::memcpy(&value, random_bytes(sizeof value).data(), sizeof value);
  return value;
}

bool same_secret(std::string_view a, std::string_view b) {
  if (a.size() != b.size()) return false;
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference = difference | static_cast<unsigned char>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace kvlink
