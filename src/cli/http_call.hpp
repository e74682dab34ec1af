// One small HTTP exchange, waited for: how the command line talks to a running server.
#pragma once

#include <string>

#include "base/result.hpp"
#include "config/config.hpp"

namespace semel::cli {

struct HttpAnswer {
    int status = 0;
    std::string content_type;
    std::string body;
};

/// Sends a request to `base_url` ("http://host:port") and waits, at most 15 s. Error io: no connection or no whole answer.
base::Result<HttpAnswer> http_call(const std::string& base_url, const std::string& method, const std::string& target,
                                   const std::string& body);

/// Error io: no connection (and TLS session) can be made, with the reason. Nothing is asked that anybody pays for: a HEAD of
/// "/" without a credential, whatever its answer. `ca_file` as in the upstream's configuration; may be empty.
base::Result<void> can_connect(const std::string& base_url, const std::string& ca_file);

/// host:port, an IPv6 address in brackets.
std::string authority(const config::Address& address);

}  // namespace semel::cli
