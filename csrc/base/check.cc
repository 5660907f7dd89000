// SPDX-License-Identifier: Apache-2.0
#include "base/check.h"

#include <string>

namespace kvlink {

void broken_contract(const char* condition, const char* function) {
  throw BrokenContract(std::string("kvlink has a bug, or was called in a way that it forbids: ") + function +
                       "() needs " + condition);
}

}  // namespace kvlink
