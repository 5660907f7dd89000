// SPDX-License-Identifier: Apache-2.0
// Calls of a driver that may take seconds, on threads of their own.
#pragma once

#include <chrono>
#include <future>
#include <system_error>
#include <utility>

namespace kvlink::verbs {

template <typename T>
bool is_running(const std::future<T>& job) {
  return job.valid() && job.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
}

/// Runs `job` on another thread. Returns an invalid future, and drops `job`, if no thread is available.
template <typename Job>
auto aside(Job job) -> std::future<decltype(job())> {
  try {
    return std::async(std::launch::async, std::move(job));
  } catch (const std::system_error&) {
    return {};
  }
}

}  // namespace kvlink::verbs
