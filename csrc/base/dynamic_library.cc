// SPDX-License-Identifier: Apache-2.0
#include "base/dynamic_library.h"

#include <dlfcn.h>

namespace kvlink {

Result<Library> Library::open(std::initializer_list<const char*> names, const std::string& fix) {
  std::string why;
  for (const char* name : names) {
    if (void* const handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return Library(handle, name);
    why += (why.empty() ? "" : "; ") + std::string(::dlerror());
  }
  return Status::Unavailable(why, fix);
}

void* Library::find(const char* symbol, const char* version) {
  void* const found = version ? ::dlvsym(handle_, symbol, version) : ::dlsym(handle_, symbol);
  if (!found) missing_ = symbol;
  return found;
}

}  // namespace kvlink
