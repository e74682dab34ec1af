// Two questions about this machine that only system calls answer.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.hpp"
#include "config/config.hpp"

namespace semel::cli {

/// Error io: the address cannot be listened on now, with the reason. With SO_REUSEPORT two processes of one user would share a
/// port without a word, so this asks without it.
base::Result<void> can_listen(const config::Address& address);

/// Raises the limit of open files to what the system allows; the limit now.
std::uint64_t raise_open_files_limit();

}  // namespace semel::cli
