// What about this machine only system calls answer.
#pragma once

#include <cstdint>
#include <string>

#include "base/result.hpp"
#include "config/config.hpp"

namespace semel::cli {

/// Error io: the address cannot be listened on now, with the reason. With SO_REUSEPORT two processes of one user would share a
/// port without a word, so this asks without it.
base::Result<void> can_listen(const config::Address& address);

/// Where other gateways reach the peer address that listens on `port`. Error: auto was asked for, and this machine has no
/// address that is not loopback.
base::Result<config::Address> advertised(const config::PeerConfig& peer, std::uint16_t port);

/// Raises the limit of open files to what the system allows; the limit now.
std::uint64_t raise_open_files_limit();

}  // namespace semel::cli
