// Admin: the handler of the admin address: health, readiness, metrics, and the admin API for records and consumers.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "admin/consumers.hpp"
#include "admin/records.hpp"
#include "http/exchange.hpp"

namespace semel::admin {

/// What the process says about itself. Called on the admin loop; must not throw.
struct Probes {
    std::function<std::vector<std::string>()> not_alive;  ///< Why the process should be restarted; empty: it lives.
    std::function<std::vector<std::string>()> not_ready;  ///< Why no request should be sent to it now; empty: ready.
    std::function<std::string()> metrics;                 ///< Prometheus text.
    ConsumerControls consumers;
};

/// One per process, on a loop of its own: the admin API waits for the store.
class Admin final : public http::Handler {
  public:
    /// `store` and the tenants' vault must outlive it. `on_loopback`: the listener's address; elsewhere the admin API answers 403, because it knows no
    /// tokens: who reaches it may decide records.
    Admin(core::Store& store, IntentOf intent_of, Probes probes, bool on_loopback, Tenants tenants = {});
    runtime::Task<> handle(http::Exchange& exchange) override;

  private:
    /// Why this request may not use the admin API; empty if it may. A page in the operator's browser must not: neither by a
    /// foreign Origin nor by a name that it had resolved to 127.0.0.1 (Host).
    [[nodiscard]] std::string refused(const http::RequestHead& head) const;

    Records records_;
    Probes probes_;
    bool on_loopback_;
};

}  // namespace semel::admin
