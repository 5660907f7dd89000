// SPDX-License-Identifier: Apache-2.0
// Checks of what the code takes for granted. A broken one ends the call by an exception, and leaves the
// process to the caller: a lane breaks, a worker stops offering, Python gets a RuntimeError.
#pragma once

#include <stdexcept>
#include <string>

namespace kvlink {

/// A caller or this library broke a contract. Its text names the condition and the function.
class BrokenContract : public std::logic_error {
 public:
  using std::logic_error::logic_error;
};
#ifdef KVLINK_SIMULATED_SYNC
[[noreturn]] void broken_contract(const char* condition, const char* function);  // ends the run
#else
[[noreturn, gnu::noinline]] inline void broken_contract(const char* condition, const char* function) {
  throw BrokenContract(std::string("kvlink has a bug, or was called in a way that it forbids: ") + function +
                       "() needs " + condition);
}
#endif

}  // namespace kvlink

/// For conditions that cost less than what follows them.
#define KVLINK_CHECK(condition) \
  (__builtin_expect(!(condition), 0) ? ::kvlink::broken_contract(#condition, __func__) : void())
/// For others: in builds with assertions, under sanitizers, and in the simulation.
#if !defined(NDEBUG) || defined(KVLINK_SIMULATED_SYNC)
#define KVLINK_DCHECK(condition) KVLINK_CHECK(condition)
#else
#define KVLINK_DCHECK(condition) static_cast<void>(sizeof(!(condition)))
#endif
