// SPDX-License-Identifier: Apache-2.0
// Explains why the kernel does not let this process read another one's memory, and the fix.
#pragma once

#include <sys/types.h>

#include "base/status.h"

namespace kvlink {

/// Returns the reason for EPERM from process_vm_readv or _writev on process `owner`, which reported to run as
/// `owner_uid`.
Status why_cma_refused(pid_t owner, uid_t owner_uid);

}  // namespace kvlink
