// Upstreams: which one a request goes to, with which headers, and what of its answer's headers
// comes back.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "config/config.hpp"
#include "gateway/journal.hpp"
#include "http/client.hpp"
#include "http/message.hpp"

namespace semel::gateway {

struct Upstream {
    const config::UpstreamConfig* config = nullptr;
    http::Origin origin;
    http::Timeouts timeouts;
};

/// Immutable after construction.
class Upstreams {
  public:
    /// base_url's are checked by config::parse (asserted here).
    explicit Upstreams(const config::Config& config);
    /// The first whose patterns match the model; for an empty model the first of all. Null: none.
    [[nodiscard]] const Upstream* choose(std::string_view model) const;
    [[nodiscard]] const Upstream* first() const { return all_.empty() ? nullptr : &all_.front(); }
    [[nodiscard]] std::size_t size() const { return all_.size(); }

  private:
    std::vector<Upstream> all_;
};

struct ForwardRules {
    bool credential_goes_upstream = true;
    bool protected_route =
        false;  ///< Ask for identity, drop the client's key, give the attempt an id of its own.
};
/// Ready header lines for the upstream.
std::string upstream_headers(const http::RequestHead& head, const Upstream& upstream,
                             const ForwardRules& rules);

/// The answer's end-to-end headers as name and value, without those of one hop, framing, CORS, our
/// own names, and caching.
struct SortedHeaders {
    std::string content_type;
    std::string content_encoding;
    std::vector<std::pair<std::string, std::string>>
        kept;                ///< May be stored and given to duplicates.
    std::string live_lines;  ///< For the client that caused the call only.
    std::vector<std::string> upstream_ids;
    std::string retry_after;
};
SortedHeaders sort_headers(const std::vector<http::Header>& headers);
std::string lines_of(const std::vector<std::pair<std::string, std::string>>& headers);

}  // namespace semel::gateway
