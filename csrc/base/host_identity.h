// SPDX-License-Identifier: Apache-2.0
// What identifies this machine and its namespaces to same-host transports, and the kernel's random bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kvlink {

/// The kernel's id of this boot, the same in every container of the machine; empty without /proc.
std::string boot_id();
/// False for an empty one: hosts that do not tell are not the same host.
bool is_this_boot(std::string_view id);
/// Inode of /proc/self/ns/`kind` ("net", "pid"); 0 without /proc.
uint64_t namespace_inode(const char* kind);
/// False for 0: a hidden namespace equals no other.
bool is_own_namespace(const char* kind, uint64_t inode);
/// Cryptographically random, so fit for secrets. kConfig where the kernel or a seccomp profile refuses.
Status fill_random(void* into, size_t bytes);
/// REQUIRES that fill_random() works here.
std::string random_bytes(size_t bytes);
uint64_t random_u64();
/// Takes the same time wherever the two differ.
bool same_secret(std::string_view a, std::string_view b);

}  // namespace kvlink
