// Who calls: from the credential to the tenant, and the names under which an intent is stored.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <variant>

#include "base/hash.hpp"
#include "config/config.hpp"
#include "core/key.hpp"
#include "core/record.hpp"
#include "http/message.hpp"

namespace semel::gateway {

/// The tenant of a caller named in `clients:`.
std::string tenant_of_client(std::string_view name);
/// The tenant of a caller without `clients:`: a keyed hash of the credential, so that the
/// credential itself is stored nowhere.
std::string tenant_of_credential(const base::Hmac& secret, std::string_view credential);
/// The tenant shared by all callers without a credential.
inline constexpr std::string_view anonymous_tenant = "anonymous";

/// Names the tenant's data key; the tenant's own name is stored nowhere.
core::TenantTag tenant_tag(const base::Hmac& secret, std::string_view tenant);

/// What stores index by: the keyed hash of the injective encoding. `key`'s parts must each be <=
/// 255 bytes (asserted).
core::StoredKey stored_key(const base::Hmac& secret, const core::IntentKey& key);
/// Key of a conversation, and of the lease record that orders its turns. Never equal to an
/// intent's.
core::StoredKey conversation_key(const base::Hmac& secret, std::string_view tenant,
                                 std::string_view user, std::string_view session);
core::StoredKey turn_key(const base::Hmac& secret, std::string_view tenant, std::string_view user,
                         std::string_view session);

/// Tenants of the credentials seen lately, so that a busy client's is not hashed for each request.
/// Of one loop; holds credentials in memory only, and few.
class TenantCache {
  public:
    const std::string& tenant(const base::Hmac& secret, std::string_view credential);

  private:
    static constexpr std::size_t entries_max = 256;
    static constexpr std::size_t credential_max_bytes = 512;
    std::unordered_map<std::string, std::string> tenants_;
    std::string uncached_;
    std::string looked_up_;  ///< Reused: a look-up allocates nothing.
};

struct Caller {
    std::string tenant;
    bool may_name_users = false;  ///< X-User-Id counts.
    /// Of a turn asked from within this process: instead of /api/chat's dials, and answered as it
    /// is recorded. Outlives the call. Null: over HTTP.
    const config::RouteConfig* inner_route = nullptr;
};
/// Why a request is refused before anything else happens.
struct Refusal {
    int status = 401;
    std::string slug;
    std::string message;
};

/// Immutable after construction; thread-safe.
class Identity {
  public:
    Identity(const config::Config& config, const base::Hmac& secret);

    /// With `clients:` the token must be one of theirs. Without, the credential is its own tenant,
    /// and on loopback the request must be one that no foreign web page could have sent.
    [[nodiscard]] std::variant<Caller, Refusal> identify(const http::RequestHead& head,
                                                         TenantCache& cache) const;
    /// False: the caller's credential is for Semel only and must not go upstream.
    [[nodiscard]] bool credential_goes_upstream() const { return clients_.empty(); }

  private:
    struct Client {
        std::string tenant;
        bool may_name_users = false;
    };
    const base::Hmac& secret_;
    bool loopback_ = true;
    bool allow_anonymous_ = false;
    std::unordered_map<base::Digest, Client, base::DigestHash>
        clients_;  ///< By keyed hash of the token.
};

/// The credential a request carries: the token of `Authorization: Bearer`, else `x-api-key`, else
/// `api-key`; empty: none. For a scheme other than Bearer the whole value.
std::string_view credential_of(const http::RequestHead& head);
bool is_credential_header(std::string_view name);

}  // namespace semel::gateway
