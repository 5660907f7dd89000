// SPDX-License-Identifier: Apache-2.0
// Converts seats of a lease: (slot, nonce, settle nonce).
#pragma once

#include "bindings/bindings.h"
#include "engine/stream_planner.h"

template <>
struct py::detail::type_caster<kvlink::LeaseSeat>
    : kvlink::TupleCaster<kvlink::LeaseSeat, &kvlink::LeaseSeat::slot, &kvlink::LeaseSeat::nonce,
                          &kvlink::LeaseSeat::settle_nonce> {};
