// SPDX-License-Identifier: Apache-2.0
#include "capi/table.h"

#include <algorithm>
#include <atomic>
#include <limits>

#include "capi/worker.h"

namespace kvlink::capi {
namespace {

std::atomic<Table*> the_table{nullptr};

}  // namespace

void report(kvl_error* error, int32_t code, std::string_view what, std::string_view fix, StaleReason stale) {
  constexpr size_t kBeforeText = offsetof(kvl_error, text);
  if (!error || error->size <= kBeforeText || error->size > kMostStructBytes) return;
  error->code = code;
  error->stale = static_cast<uint32_t>(stale);
  const size_t room = std::min<size_t>(error->size, sizeof *error) - kBeforeText - 1;
  size_t at = 0;
  const auto append = [&](std::string_view text) {
    const size_t bytes = std::min(text.size(), room - at);
    std::memcpy(error->text + at, text.data(), bytes);
    at += bytes;
  };
  append(what);
  if (!fix.empty()) append(". ");
  append(fix);
  error->text[at] = '\0';
}

Table& Table::get() {
  static Table* const table = [] {
    auto* const made = new Table();  // never deleted
    the_table = made;
    return made;
  }();
  return *table;
}

bool Table::inherited() {
  const Table* const table = the_table.load(std::memory_order_acquire);
  return table && table->process_.inherited();
}

kvl_handle Table::reserve() {
  const std::lock_guard lock(mutex_);
  if (free_.empty()) {
    free_.reserve(entries_.size() + 1);
    entries_.emplace_back();
    free_.push_back(static_cast<uint32_t>(entries_.size() - 1));
  }
  const uint32_t index = free_.back();
  free_.pop_back();
  return kvl_handle{entries_[index].generation} << 32 | index;
}

Outcome Table::put(kvl_handle reserved, std::shared_ptr<Object> object) {
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<uint32_t>(reserved);
  if (object->worker() && object->worker()->closed()) {  // take_children() has been here, or comes yet
    drop(index);
    return Status::Cancelled("the worker was closed");
  }
  entries_[index].object = std::move(object);
  return {};
}

Outcome Table::add(std::shared_ptr<Object> object, kvl_handle& handle) {
  const kvl_handle reserved = reserve();
  Outcome outcome = put(reserved, std::move(object));
  if (outcome.ok()) handle = reserved;
  return outcome;
}

Table::Entry* Table::entry(kvl_handle handle) {
  const auto index = static_cast<uint32_t>(handle);
  if (index >= entries_.size()) return nullptr;
  Entry& found = entries_[index];
  return found.object && found.generation == handle >> 32 ? &found : nullptr;
}

std::shared_ptr<Object> Table::find(kvl_handle handle) {
  const std::lock_guard lock(mutex_);
  const Entry* const found = entry(handle);
  return found ? found->object : nullptr;
}

/// A place whose generations are used up is not used again.
void Table::drop(uint32_t index) {
  entries_[index].object.reset();
  if (entries_[index].generation++ < std::numeric_limits<uint32_t>::max()) free_.push_back(index);
}

void Table::remove(kvl_handle handle) {
  std::shared_ptr<Object> kept;  // its destructor must not run under the lock
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<uint32_t>(handle);
  if (index >= entries_.size() || entries_[index].generation != handle >> 32) return;
  kept = entries_[index].object;
  drop(index);
}

std::vector<std::shared_ptr<Object>> Table::take_children(const Worker& worker) {
  std::vector<std::shared_ptr<Object>> taken;
  const std::lock_guard lock(mutex_);
  for (uint32_t index = 0; index < entries_.size(); ++index) {
    const std::shared_ptr<Object>& object = entries_[index].object;
    if (!object || object->worker().get() != &worker) continue;
    taken.push_back(object);
    drop(index);
  }
  return taken;
}

}  // namespace kvlink::capi
