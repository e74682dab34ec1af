// The reference store: everything core::Store promises, in this process's memory only. For tests,
// the simulation and trying out.
#pragma once

#include <memory>

#include "core/store.hpp"

namespace semel::stores {

/// A store without files: what it holds is gone when it is destroyed. Its clock is the wall clock
/// at this moment plus the steady time that passed since, so it never jumps. Synchronous: `done` is
/// called before submit returns, on the caller's thread and outside the store's lock. `clock` must
/// outlive the store.
std::unique_ptr<core::Store> make_memory_store(base::Clock& clock);

}  // namespace semel::stores
