// SPDX-License-Identifier: Apache-2.0
#include "base/host_identity.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "base/check.h"
#include "base/read_file.h"
#include "base/sys.h"

namespace kvlink {

std::string boot_id() {
  // Read before descriptors can run out, and again only while it is not known.
  static std::mutex mutex;
  static std::string id;
  std::lock_guard lock(mutex);
  if (id.empty()) {
    const std::string read = read_file("/proc/sys/kernel/random/boot_id").value_or("");
    std::string_view text = read;
    id = take_line(text);
  }
  return id;
}

bool is_this_boot(std::string_view id) { return !id.empty() && id == boot_id(); }

uint64_t namespace_inode(const char* kind) {
  struct stat found{};
  return ::stat((std::string("/proc/self/ns/") + kind).c_str(), &found) == 0 ? found.st_ino : 0;
}

bool is_own_namespace(const char* kind, uint64_t inode) {
  return inode != 0 && inode == namespace_inode(kind);
}

Status fill_random(void* into, size_t bytes) {
  auto* const at = static_cast<char*>(into);
  for (size_t drawn = 0; drawn < bytes;) {
    const ssize_t got = sys::draw_random(at + drawn, bytes - drawn);
    if (got > 0) {
      drawn += static_cast<size_t>(got);
    } else if (errno != EINTR) {
      return sys::failed(Code::kConfig, "cannot draw random numbers for secrets", "getrandom", errno);
    }
  }
  return {};
}

std::string random_bytes(size_t bytes) {
  std::string drawn(bytes, '\0');
  // Engine::make() has tried it. Nothing continues with a secret that is not random.
  KVLINK_CHECK(fill_random(drawn.data(), bytes).ok());
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
