#include "gateway/identity.hpp"

#include <algorithm>

#include "base/assert.hpp"

namespace semel::gateway {
namespace {

core::StoredKey keyed(const base::Hmac& secret, std::string_view kind, const core::IntentKey& key) {
    std::optional<std::string> encoded = core::encode(key);
    SEMEL_ASSERT(encoded.has_value(), "parts of a key are checked where they are read");
    encoded->append(kind);  // after the self-delimiting encoding, so kinds cannot collide
    return secret(*encoded);
}

/// host[:port] names this machine.
bool is_loopback_host(std::string_view host) {
    if (!host.empty() && host.front() == '[') {
        const auto end = host.find(']');
        return end != std::string_view::npos && host.substr(0, end + 1) == "[::1]";
    }
    host = host.substr(0, host.find(':'));
    if (http::name_is(host, "localhost")) return true;
    if (!host.starts_with("127.")) return false;
    return host.find_first_not_of("0123456789.") == std::string_view::npos;
}

/// The host of an Origin header, or empty.
std::string_view origin_host(std::string_view origin) {
    const auto scheme = origin.find("://");
    return scheme == std::string_view::npos ? std::string_view{} : origin.substr(scheme + 3);
}

}  // namespace

std::string tenant_of_client(std::string_view name) { return "client:" + std::string(name); }

std::string tenant_of_credential(const base::Hmac& secret, std::string_view credential) {
    std::string text = "tenant:";
    text += credential;
    return "credential:" + base::base64url(secret(text).view().substr(0, 18));
}

core::TenantTag tenant_tag(const base::Hmac& secret, std::string_view tenant) {
    std::string text = "tag of a tenant:";
    text += tenant;
    const base::Digest digest = secret(text);
    core::TenantTag tag;
    std::copy_n(digest.bytes.begin(), tag.bytes.size(), tag.bytes.begin());
    return tag;
}

core::StoredKey stored_key(const base::Hmac& secret, const core::IntentKey& key) {
    core::StoredKey stored = keyed(secret, "intent", key);
    if (!key.session.empty()) {
        core::join_bucket(stored, conversation_key(secret, key.tenant, key.user, key.session));
    }
    return stored;
}

core::StoredKey conversation_key(const base::Hmac& secret, std::string_view tenant,
                                 std::string_view user, std::string_view session) {
    return keyed(
        secret, "conversation",
        {.tenant = tenant, .operation = "chat", .user = user, .session = session, .id = {}});
}

core::StoredKey turn_key(const base::Hmac& secret, std::string_view tenant, std::string_view user,
                         std::string_view session) {
    core::StoredKey stored = keyed(
        secret, "turn",
        {.tenant = tenant, .operation = "chat", .user = user, .session = session, .id = {}});
    core::join_bucket(stored, conversation_key(secret, tenant, user, session));
    return stored;
}

bool is_credential_header(std::string_view name) {
    return http::name_is(name, "authorization") || http::name_is(name, "x-api-key") ||
           http::name_is(name, "api-key");
}

std::string_view credential_of(const http::RequestHead& head) {
    if (const auto authorization = head.header("authorization")) {
        constexpr std::size_t scheme = 7;  // "Bearer "
        if (authorization->size() > scheme &&
            http::name_is(authorization->substr(0, scheme - 1), "bearer") &&
            (*authorization)[scheme - 1] == ' ') {
            return authorization->substr(scheme);
        }
        return *authorization;
    }
    if (const auto key = head.header("x-api-key")) return *key;
    return head.header("api-key").value_or(std::string_view{});
}

Identity::Identity(const config::Config& config, const base::Hmac& secret)
    : secret_(secret),
      loopback_(config.listen.loopback()),
      allow_anonymous_(config.allow_anonymous) {
    for (const config::ClientConfig& client : config.clients) {
        for (const std::string& token : client.tokens) {
            clients_.emplace(secret_(token),
                             Client{tenant_of_client(client.name), client.may_name_users});
        }
    }
}

const std::string& TenantCache::tenant(const base::Hmac& secret, std::string_view credential) {
    if (credential.size() > credential_max_bytes) {
        uncached_ = tenant_of_credential(secret, credential);
        return uncached_;
    }
    looked_up_ = credential;
    const auto found = tenants_.find(looked_up_);
    if (found != tenants_.end()) return found->second;
    if (tenants_.size() >= entries_max) tenants_.clear();
    return tenants_.emplace(looked_up_, tenant_of_credential(secret, credential)).first->second;
}

std::variant<Caller, Refusal> Identity::identify(const http::RequestHead& head,
                                                 TenantCache& cache) const {
    const std::string_view credential = credential_of(head);
    if (!clients_.empty()) {
        const auto found = credential.empty() ? clients_.end() : clients_.find(secret_(credential));
        if (found == clients_.end()) {
            return Refusal{401, "unauthorized",
                           "The token is missing or is none of the configured clients'. Send it as "
                           "'Authorization: Bearer <token>'."};
        }
        return Caller{found->second.tenant, found->second.may_name_users};
    }
    if (loopback_) {
        // Nothing but the address protects a loopback listener without clients, so a page in the
        // user's browser must not be able to use it: neither by DNS rebinding (Host) nor by a
        // simple cross-origin POST (Origin, content type).
        if (!is_loopback_host(head.header("host").value_or(std::string_view{}))) {
            return Refusal{403, "host-refused",
                           "Without 'clients:' this address answers only requests whose Host is "
                           "localhost or a loopback address."};
        }
        const auto origin = head.header("origin");
        if (origin && !is_loopback_host(origin_host(*origin))) {
            return Refusal{403, "origin-refused",
                           "Without 'clients:' this address refuses requests from web pages of "
                           "other origins."};
        }
        if (head.has_body()) {
            std::string_view type = head.header("content-type").value_or(std::string_view{});
            type = type.substr(0, type.find(';'));
            while (!type.empty() && (type.back() == ' ' || type.back() == '\t'))
                type.remove_suffix(1);
            if (type.empty() || http::name_is(type, "text/plain") ||
                http::name_is(type, "application/x-www-form-urlencoded")) {
                return Refusal{415, "content-type-refused",
                               "Without 'clients:' a body needs a Content-Type that a foreign web "
                               "page cannot send unasked, "
                               "such as application/json."};
            }
        }
    }
    if (credential.empty()) {
        if (!loopback_ && !allow_anonymous_) {
            return Refusal{401, "unauthorized",
                           "No credential was sent. Callers without one are refused on this "
                           "address ('allow_anonymous: true' admits them)."};
        }
        return Caller{std::string(anonymous_tenant), true};
    }
    return Caller{cache.tenant(secret_, credential), true};
}

}  // namespace semel::gateway
