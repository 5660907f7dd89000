// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <algorithm>

namespace kvlink::memory_model {
namespace {

bool acquires(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_release;
}
bool releases(std::memory_order order) {
  return order != std::memory_order_relaxed && order != std::memory_order_acquire;
}

}  // namespace

void join(View& into, const View& other) {
  for (size_t at = 0; at < into.size(); ++at) into[at] = std::max(into[at], other[at]);
}

size_t Memory::first_of(size_t thread, size_t location, std::memory_order order) const {
  const size_t seen = threads_[thread].now[location];
  return order == std::memory_order_seq_cst ? std::max<size_t>(seen, sequential_[location]) : seen;
}

size_t Memory::num_candidates(size_t thread, size_t location, std::memory_order order) const {
  return locations_[location].size() - first_of(thread, location, order);
}

uint64_t Memory::load(size_t thread, size_t location, std::memory_order order, size_t choice) {
  Thread& self = threads_[thread];
  const size_t index = locations_[location].size() - 1 - choice;
  const Value& taken = locations_[location][index];
  self.now[location] = std::max(self.now[location], static_cast<uint8_t>(index));
  join(acquires(order) ? self.now : self.acquirable, taken.view);
  return taken.value;
}

void Memory::store(size_t thread, size_t location, uint64_t value, std::memory_order order) {
  Thread& self = threads_[thread];
  std::vector<Value>& values = locations_[location];
  const auto index = static_cast<uint8_t>(values.size());
  self.now[location] = index;
  values.push_back({value, releases(order) ? self.now : self.released});
  values.back().view[location] = index;
  if (order == std::memory_order_seq_cst) sequential_[location] = index;
}

uint64_t Memory::exchange(size_t thread, size_t location, uint64_t value, std::memory_order order) {
  const View before = locations_[location].back().view;
  const uint64_t taken = load(thread, location, order, 0);
  store(thread, location, value, order);
  join(locations_[location].back().view, before);  // of one release sequence
  return taken;
}

void Memory::fence(size_t thread, std::memory_order order) {
  Thread& self = threads_[thread];
  if (acquires(order)) join(self.now, self.acquirable);
  if (order == std::memory_order_seq_cst) {
    join(self.now, sequential_);
    sequential_ = self.now;
  }
  if (releases(order)) self.released = self.now;
}

template <typename Change>
void Memory::for_each_view(Change change) {
  for (Thread& one : threads_) {
    for (View* view : {&one.now, &one.acquirable, &one.released}) change(*view);
  }
  for (View& view : locks_) change(view);
  change(sequential_);
  for (auto& values : locations_) {
    for (Value& one : values) change(one.view);
  }
}

void Memory::tidy() {
  for (size_t at = 0; at < locations_.size(); ++at) {
    size_t first = locations_[at].size() - 1;
    for (const Thread& one : threads_) {
      if (one.loads >> at & 1) first = std::min<size_t>(first, one.now[at]);
    }
    if (first == 0) continue;
    locations_[at].erase(locations_[at].begin(), locations_[at].begin() + static_cast<ptrdiff_t>(first));
    for_each_view(
        [&](View& view) { view[at] = static_cast<uint8_t>(view[at] - std::min<size_t>(view[at], first)); });
  }
}

void Memory::add_to(std::string& key) const {
  const auto add = [this, &key](const View& view) {
    key.append(reinterpret_cast<const char*>(view.data()), locations_.size());
  };
  for (const auto& values : locations_) {
    key += static_cast<char>(values.size());
    for (const Value& one : values) {
      for (const int byte : {0, 1, 4}) key += static_cast<char>(one.value >> 8 * byte);
      if (values.size() > 1 || true) add(one.view);
    }
  }
  for (const Thread& one : threads_) {
    add(one.now), add(one.acquirable), add(one.released);
  }
  for (const View& view : locks_) add(view);
  add(sequential_);
}

Run& Run::the() {
  static Run run;
  return run;
}

bool Run::step(Memory& memory, size_t thread, Log& log, size_t choice, const std::function<void()>& call) {
  mode_ = Mode::kStep;
  memory_ = &memory, thread_ = thread, log_ = &log, choice_ = choice;
  at_ = 0, num_choices_ = 1, stepped_ = false;
  bool ended = true;
  try {
    call();
  } catch (const Paused&) {
    ended = false;
  }
  mode_ = Mode::kIdle;
  return ended;
}

void Run::at_once(Memory& memory, size_t thread, const std::function<void()>& call) {
  mode_ = Mode::kAtOnce;
  memory_ = &memory, thread_ = thread;
  call();
  mode_ = Mode::kIdle;
}

void Run::silently(const Memory& memory, const std::function<void()>& call) {
  mode_ = Mode::kSilent;
  silent_ = &memory;
  call();
  mode_ = Mode::kIdle;
}

/// Takes the result from the log, or makes the access.
template <typename Access>
uint64_t Run::access(bool observable, Access access) {
  if (mode_ == Mode::kIdle || mode_ == Mode::kSilent) return 0;
  if (mode_ == Mode::kAtOnce) return access();
  if (at_ < log_->size()) return (*log_)[at_++];
  if (observable && stepped_) throw Paused();
  stepped_ |= observable;
  ++at_;
  return log_->emplace_back(access());
}

uint64_t Run::load(const void* at, std::memory_order order) {
  const size_t location = shared_.at(at);
  if (mode_ == Mode::kSilent) return silent_->latest(location);
  if (mode_ == Mode::kIdle) return 0;
  const bool owned = owned_ >> location & 1;
  const size_t candidates =
      mode_ == Mode::kStep && at_ >= log_->size() ? memory_->num_candidates(thread_, location, order) : 1;
  return access(!owned || candidates > 1, [&] {
    num_choices_ = std::max(num_choices_, candidates);
    return memory_->load(thread_, location, order, candidates > 1 ? choice_ : 0);
  });
}

void Run::store(const void* at, uint64_t value, std::memory_order order) {
  const size_t location = shared_.at(at);
  access(true, [&] {
    if (on_store_ && mode_ == Mode::kStep) on_store_(location, memory_->latest(location), value);
    memory_->store(thread_, location, value, order);
    return uint64_t{0};
  });
}

uint64_t Run::exchange(const void* at, uint64_t value, std::memory_order order) {
  return access(true, [&] { return memory_->exchange(thread_, shared_.at(at), value, order); });
}

void Run::fence(std::memory_order order) {
  access(false, [&] { return memory_->fence(thread_, order), uint64_t{0}; });
}

void Run::lock() {
  access(false, [&] { return memory_->lock(thread_, 0), uint64_t{0}; });
}

void Run::unlock() {
  access(false, [&] { return memory_->unlock(thread_, 0), uint64_t{0}; });
}

}  // namespace kvlink::memory_model
