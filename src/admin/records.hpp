// Records: what an operator asks of a store and is told, as one function from a request to a reply. The admin address and
// `semel record` on a directory that no server uses give the same replies, because both are this.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "core/store.hpp"
#include "engine/vault.hpp"

namespace semel::admin {

/// A reply in HTTP's terms.
struct Reply {
    int status = 200;
    std::string content_type = "application/json";
    std::string body;
};

/// {"title", "status", "detail"} as application/problem+json. `detail` says what happened and what to do.
Reply problem(int status, std::string_view title, std::string_view detail);

/// The largest answer that can be given to a record by hand; it is kept in the record itself.
inline constexpr std::size_t resolve_body_max_bytes = 16 * 1024 * 1024;
/// Records of one page, unless fewer are asked for.
inline constexpr std::size_t page_max_records = 1000;
inline constexpr std::size_t page_default_records = 100;

/// Names an intent as its client did. Exactly one of client and credential says whose it is; neither: the callers without one.
struct IntentName {
    std::string operation;   ///< `/v1/chat/completions` or `chat`.
    std::string client;      ///< A name of `clients:`.
    std::string credential;  ///< Without `clients:`. Never kept, logged or answered.
    std::string user;
    std::string session;
    std::string id;
    std::string consumer;    ///< A name of `consumers:`. Says whose data is meant; names no intent.
};
/// The key under which an intent is stored, where the secret is known; nullopt: a part is too long, or nothing
/// says whose it is although clients are configured.
using IntentOf = std::function<std::optional<core::StoredKey>(const IntentName&)>;

/// The tag of the tenant that `consumer`, `client` or `credential` of a name say, or of the callers without one; nullopt: none does.
using TenantOf = std::function<std::optional<core::TenantTag>(const IntentName&)>;

/// What tells tenants apart and opens what is theirs. Without a vault nothing sealed can be read, and nobody erased.
struct Tenants {
    TenantOf tag_of;
    engine::Vault* vault = nullptr;
};

/// Thread-safe as far as the store is. Every call blocks until the store has answered, at most `store_patience`.
class Records {
  public:
    static constexpr std::chrono::seconds store_patience{10};

    /// `store` and the vault must outlive it.
    Records(core::Store& store, IntentOf intent_of, Tenants tenants = {})
        : store_(store), intent_of_(std::move(intent_of)), tenants_(std::move(tenants)) {}

    /// `path` is one of
    ///   GET  /admin/records                      query: status, limit, cursor
    ///   GET  /admin/records/{intent}             query: body=1 gives the recorded bytes instead of the description
    ///   POST /admin/records/{intent}/resolve     query: dry_run=1 checks everything and changes nothing
    ///   POST /admin/lookup                       from an intent's name to its {intent}
    ///   POST /admin/tenants/erase                query: dry_run=1 says whom it means and changes nothing
    /// with the members of docs/reference/admin-api.md. Everything else is 404, another method 405.
    Reply answer(std::string_view method, std::string_view path, std::string_view query, std::string_view body);

  private:
    Reply lookup(std::string_view body);
    Reply list(std::string_view query);
    Reply get(const core::StoredKey& intent, bool with_body);
    Reply resolve(const core::StoredKey& intent, std::string_view body, bool dry_run);
    Reply erase(std::string_view body, bool dry_run);
    /// The tenant that a request to erase means, or the reply that says why none.
    std::variant<core::TenantTag, Reply> tenant_meant(std::string_view body);
    base::Result<core::Decided> ask(core::Item item);
    base::Result<std::string> ask_value(core::StoreOperation operation);
    /// The tenant's present key. Null: there is no vault, or no tenant.
    base::Result<engine::DataKeyPtr> data_key_of(const core::TenantTag& tenant);
    /// The record as `found`, opened.
    base::Result<core::RecordPtr> opened(const core::StoredKey& intent, core::RecordPtr record);
    /// The body of an answer, from the opened record or its chunks.
    base::Result<std::string> body_of(const core::StoredKey& intent, const core::Record& record);

    core::Store& store_;
    IntentOf intent_of_;
    Tenants tenants_;
};

/// The description of a record: never a body, an id, a user or a credential.
std::string record_json(const core::StoredKey& intent, const core::Record& record, core::StoreTime now);

/// "2026-11-29T17:47:11.250Z"; empty for 0 (not yet, or never).
std::string rfc3339(core::StoreTime time);

/// Why `body` cannot be the whole answer of an intent of `operation` (the record's label); empty if it can. An answer that is
/// given by hand is replayed as it is, so it must be one that the client's SDK takes for whole.
std::string why_not_an_answer(std::string_view operation, std::string_view content_type, std::string_view body);

}  // namespace semel::admin
