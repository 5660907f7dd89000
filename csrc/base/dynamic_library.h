// SPDX-License-Identifier: Apache-2.0
// Libraries that are opened at run time, so that kvlink imports where they are absent.
#pragma once

#include <initializer_list>
#include <string>

#include "base/status.h"

namespace kvlink {

/// A shared library, open until the process ends.
class Library {
 public:
  /// Takes the first of `names` that there is. `fix` is what the refusal recommends.
  static Result<Library> open(std::initializer_list<const char*> names, const std::string& fix);

  /// False, and the name in missing(), when the library has no such symbol.
  template <typename Function>
  bool load(Function*& into, const char* symbol) {
    into = reinterpret_cast<Function*>(find(symbol));
    return into != nullptr;
  }
  const std::string& name() const { return name_; }
  const std::string& missing() const { return missing_; }

 private:
  Library(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* find(const char* symbol);

  void* handle_;
  std::string name_, missing_;
};

}  // namespace kvlink
