// SPDX-License-Identifier: Apache-2.0
// Opens libraries at run time, so that kvlink can be imported where they are absent.
#pragma once

#include <initializer_list>
#include <string>

#include "base/status.h"

namespace kvlink {

/// A shared library, open until the process ends.
class Library {
 public:
  /// Opens the first of `names` that exists. `fix` is what the refusal recommends.
  static Result<Library> open(std::initializer_list<const char*> names, const std::string& fix);

  /// Returns false, and missing() names the symbol, if the library does not have it.
  template <typename Function>
  bool load(Function*& into, const char* symbol) {
    into = reinterpret_cast<Function*>(find(symbol));
    return into != nullptr;
  }
  /// As above, of a version of the symbol: a library may have several.
  template <typename Function>
  bool load(Function*& into, const char* symbol, const char* version) {
    into = reinterpret_cast<Function*>(find(symbol, version));
    return into != nullptr;
  }
  const std::string& name() const { return name_; }
  const std::string& missing() const { return missing_; }

 private:
  Library(void* handle, std::string name) : handle_(handle), name_(std::move(name)) {}
  void* find(const char* symbol, const char* version = nullptr);

  void* handle_;
  std::string name_, missing_;
};

}  // namespace kvlink
