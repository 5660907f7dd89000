// SPDX-License-Identifier: Apache-2.0
// Identifies this machine and its namespaces to same-host transports, and draws the kernel's random bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace kvlink {

/// Returns the kernel's id of this boot, the same in every container of the machine; empty without /proc.
std::string boot_id();
/// Returns false for an empty id, because hosts without one cannot be told apart.
bool is_this_boot(std::string_view id);
/// Returns the inode of /proc/self/ns/`kind` ("net", "pid"), or 0 without /proc.
uint64_t namespace_inode(const char* kind);
/// Returns false for 0: a hidden namespace equals no other.
bool is_own_namespace(const char* kind, uint64_t inode);
/// Draws cryptographic random bytes. Returns kConfig if the kernel or a seccomp profile refuses.
Status fill_random(void* into, size_t bytes);
/// REQUIRES that fill_random() works here.
std::string random_bytes(size_t bytes);
uint64_t random_u64();
/// Compares in constant time.
bool same_secret(std::string_view a, std::string_view b);

}  // namespace kvlink
