#include "engine/vault.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace semel::engine {

using base::AesKey;
using base::Error;
using base::ErrorCode;

namespace {

constexpr std::string_view mark_name = "erasures";
constexpr std::size_t mark_bytes = 16;
/// Of a wrapped key: version, nonce, then id and key sealed.
constexpr char wrapping_version = 1;
constexpr std::size_t id_bytes = 8;
constexpr std::size_t wrapped_bytes =
    1 + AesKey::nonce_bytes + id_bytes + DataKey::secret_bytes + AesKey::tag_bytes;

std::string derived(std::string_view secret, std::string_view purpose) {
    return std::string(base::Hmac(secret)(purpose).view());
}

std::string_view view(const core::TenantTag& tag) {
    return {reinterpret_cast<const char*>(tag.bytes.data()), tag.bytes.size()};
}

std::string value_name(const core::TenantTag& tenant) {
    return "data-key:" + base::hex(view(tenant));
}

std::int64_t ns(base::SteadyTime time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}
std::int64_t ns(std::chrono::milliseconds d) { return std::chrono::nanoseconds(d).count(); }

/// Long ago, and still far enough from the end of the numbers to be subtracted from.
constexpr std::int64_t never_ns = INT64_MIN / 2;

}  // namespace

Vault::Vault(std::string_view secret, HotRecords* hot)
    : ids_(derived(secret, "ids of turns")),
      wrapping_(std::make_unique<const AesKey>(derived(secret, "wrapping of data keys"))),
      hot_(hot),
      shards_(std::make_unique<Shard[]>(shard_count)),
      looked_at_ns_(never_ns),
      look_begun_ns_(never_ns) {}
Vault::~Vault() = default;

std::size_t Vault::TagHash::operator()(const core::TenantTag& tag) const noexcept {
    std::size_t hash = 0;
    std::memcpy(&hash, tag.bytes.data(), sizeof hash);
    return hash;
}

Vault::Shard& Vault::shard_of(const core::TenantTag& tenant) const {
    return shards_[tenant.bytes.back() % shard_count];
}

DataKeyPtr Vault::find(const core::TenantTag& tenant) const {
    Shard& shard = shard_of(tenant);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.keys.find(tenant);
    return found == shard.keys.end() ? nullptr : found->second.key;
}

bool Vault::is_current(const core::TenantTag& tenant, std::uint64_t key_id) const {
    Shard& shard = shard_of(tenant);
    const std::lock_guard lock(shard.mutex);
    const auto found = shard.keys.find(tenant);
    return found != shard.keys.end() && found->second.key->id() == key_id;
}

std::string Vault::wrapped(const core::TenantTag& tenant, std::uint64_t id,
                           std::string_view secret) const {
    AesKey::Nonce nonce{};
    const std::string random = base::random_bytes(nonce.size());
    std::memcpy(nonce.data(), random.data(), nonce.size());
    std::string plain;
    for (int shift = 0; shift < 64; shift += 8)
        plain.push_back(static_cast<char>(id >> shift & 0xff));
    plain += secret;
    std::string out(1, wrapping_version);
    out += random;
    wrapping_->seal(nonce, value_name(tenant), plain, out);
    base::wipe(plain);
    return out;
}

std::string Vault::fresh_wrapped(const core::TenantTag& tenant) const {
    std::string secret = base::random_bytes(DataKey::secret_bytes);
    std::uint64_t id = 0;
    while (id == 0) {
        const std::string random = base::random_bytes(sizeof id);
        std::memcpy(&id, random.data(), sizeof id);
    }
    std::string out = wrapped(tenant, id, secret);
    base::wipe(secret);
    return out;
}

Vault::KeyWanted Vault::key_wanted(const core::TenantTag& tenant) const {
    KeyWanted wanted{.operation = {.name = value_name(tenant), .value_if_absent = {}},
                     .generation = generation_.load()};
    {
        Shard& shard = shard_of(tenant);
        const std::lock_guard lock(shard.mutex);
        const auto known = shard.keys.find(tenant);
        if (known != shard.keys.end()) wanted.operation.value_if_absent = known->second.wrapped;
    }
    if (wanted.operation.value_if_absent.empty())
        wanted.operation.value_if_absent = fresh_wrapped(tenant);
    return wanted;
}

base::Result<DataKeyPtr> Vault::take_key(const core::TenantTag& tenant, const std::string& wrapped,
                                         std::uint64_t generation, base::SteadyTime asked_at) {
    const auto unreadable = [&] {
        return Error{.code = ErrorCode::store_corrupt,
                     .detail = "the data key of a tenant (" + value_name(tenant) +
                               ") was not written by this deployment, or was damaged: check "
                               "engine.secret_env; without the "
                               "right one the tenant's answers cannot be read"};
    };
    if (wrapped.size() != wrapped_bytes || wrapped.front() != wrapping_version) return unreadable();
    const std::string_view bytes = wrapped;
    AesKey::Nonce nonce{};
    std::memcpy(nonce.data(), bytes.data() + 1, nonce.size());
    std::string plain;
    if (!wrapping_->open(nonce, value_name(tenant), bytes.substr(1 + nonce.size()), plain))
        return unreadable();
    std::uint64_t id = 0;
    for (std::size_t i = id_bytes; i-- > 0;) id = id << 8 | static_cast<unsigned char>(plain[i]);
    if (id == 0) return unreadable();
    auto key =
        std::make_shared<const DataKey>(tenant, id, std::string_view(plain).substr(id_bytes));
    base::wipe(plain);
    Shard& shard = shard_of(tenant);
    const std::lock_guard lock(shard.mutex);
    // Under the lock: who forgets the keys counts first, so that an old one cannot come back.
    if (generation_.load() != generation) return DataKeyPtr{};
    const auto known = shard.keys.find(tenant);
    if (known != shard.keys.end() && known->second.key->id() == id) {
        known->second.read_at_ns = std::max(known->second.read_at_ns, ns(asked_at));
        return known->second.key;
    }
    if (shard.keys.size() >= shard_keys_max) shard.keys.clear();
    shard.keys.insert_or_assign(tenant, Known{key, wrapped, ns(asked_at)});
    return DataKeyPtr(std::move(key));
}

bool Vault::begin_reading_again(const core::TenantTag& tenant, base::SteadyTime now) {
    Shard& shard = shard_of(tenant);
    const std::lock_guard lock(shard.mutex);
    const auto known = shard.keys.find(tenant);
    if (known == shard.keys.end() || ns(now) - known->second.read_at_ns <= ns(read_again_after))
        return false;
    known->second.read_at_ns = ns(now);
    return true;
}

bool Vault::fresh(base::SteadyTime now) const {
    return ns(now) - looked_at_ns_.load() <= ns(usable_for);
}

bool Vault::may_replay(base::SteadyTime now) const { return fresh(now) || unanswered_.load(); }

bool Vault::begin_look(base::SteadyTime now) {
    const std::int64_t at = ns(now);
    if (at - looked_at_ns_.load() <= ns(look_after)) return false;
    std::int64_t begun = look_begun_ns_.load();
    return at - begun > ns(look_again_after) && look_begun_ns_.compare_exchange_strong(begun, at);
}

// Never the same twice: a store that forgot everything, data keys included, gets another mark, and
// whoever still holds the forgotten keys asks for new ones.
core::ClaimValue Vault::mark_wanted() {
    return {.name = std::string(mark_name), .value_if_absent = base::random_bytes(mark_bytes)};
}

void Vault::take_mark(const std::string& mark, base::SteadyTime asked_at) {
    const std::lock_guard lock(mark_mutex_);
    if (ns(asked_at) < looked_at_ns_.load()) return;  // overtaken by a later look
    if (mark != mark_) {
        mark_ = mark;
        ++generation_;
        for (std::size_t i = 0; i < shard_count; ++i) {
            const std::lock_guard shard_lock(shards_[i].mutex);
            shards_[i].keys.clear();
        }
        if (hot_ != nullptr) hot_->clear();
    }
    looked_at_ns_ = ns(asked_at);
    unanswered_ = false;
}

void Vault::no_mark() { unanswered_ = true; }

core::ReplaceValue Vault::fresh_key(const core::TenantTag& tenant) const {
    return {.name = value_name(tenant), .value = fresh_wrapped(tenant)};
}

core::ReplaceValue Vault::fresh_mark() {
    return {.name = std::string(mark_name), .value = base::random_bytes(mark_bytes)};
}

std::string Vault::stored_id(const core::StoredKey& conversation,
                             std::string_view request_id) const {
    constexpr std::size_t kept_bytes = 18;
    std::string text(conversation.view());
    text += request_id;
    return base::base64url(ids_(text).view().substr(0, kept_bytes));
}

}  // namespace semel::engine
