// The deployment's secret, and from an intent's name to the key under which it is stored.
#pragma once

#include <string>

#include "admin/records.hpp"
#include "base/result.hpp"
#include "config/config.hpp"

namespace semel::cli {

/// From a caller's name to its tenant, as the gateway makes it; from a consumer's, if it records
/// answers in the process's store.
admin::TenantOf tenant_of(const config::Config& config, const std::string& secret);

/// Under whose data key the answers of a consumer's handler are sealed: that of its scope, as its
/// records are. `secret`: of the store's keys.
core::TenantTag tenant_of_consumer(const config::ConsumerConfig& consumer,
                                   const base::Hmac& secret);

/// The configured secret, else the one that the store keeps (made at its first start). Blocks until the store has answered.
base::Result<std::string> secret_of(const config::Config& config, core::Store& store);
/// By which the gateways of one shared store prove themselves to each other; made once and kept in
/// the store. Blocks.
base::Result<std::string> peer_secret_of(core::Store& store);

/// By which consumers of a store that is not shared know each other's; made once and kept in the
/// store. Blocks.
base::Result<std::string> store_id_of(core::Store& store);

/// `config` is copied as far as it is needed.
admin::IntentOf intent_of(const config::Config& config, const std::string& secret);

}  // namespace semel::cli
