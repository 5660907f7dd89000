// SPDX-License-Identifier: Apache-2.0
// The program's operator new, which counts what the engine allocates.
#include <cstdlib>
#include <new>

#include "scheduler.h"

void* operator new(std::size_t bytes) {
  kvlink::simulation::Work::note_allocation();
  if (void* const made = std::malloc(bytes == 0 ? 1 : bytes)) return made;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
