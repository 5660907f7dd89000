// SPDX-License-Identifier: Apache-2.0
// Why the kernel would not let this process read another one's memory, and what to do about it.
#pragma once

#include <sys/types.h>

#include "base/status.h"

namespace kvlink {

/// process_vm_readv or _writev on process `owner`, which said to run as `owner_uid`, failed with EPERM.
Status why_cma_refused(pid_t owner, uid_t owner_uid);

}  // namespace kvlink
