// What a store holds for an intent.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/time.hpp"
#include "core/fingerprint.hpp"
#include "core/key.hpp"

namespace semel::core {

using base::StoreTime;
using std::chrono::milliseconds;

enum class Status : std::uint8_t {
    processing = 1,  ///< An owner works, or its lease is dead and nobody noticed yet.
    completed = 2,   ///< Immutable until it expires.
    failed = 3,      ///< May be submitted again, unless `final`.
    unknown = 4,     ///< The effect may have happened; held until somebody decides.
    dead = 5,        ///< Attempts used up.
};

/// Grows with each grant of one key: max(previous + 1, store time in us). Stays below 2^53.
struct FencingToken {
    std::uint64_t value = 0;
    friend auto operator<=>(FencingToken, FencingToken) = default;
};

/// Made anew by the caller for each acquire, so that a lost reply can be asked for again. Together with the token it
/// fences even if the store's clock fell back so far that a token came again.
struct Nonce {
    std::array<std::uint8_t, 16> bytes{};
    friend auto operator<=>(const Nonce&, const Nonce&) = default;
};

/// Keyed hash of the tenant, shortened: names the data key that its bodies are sealed under. Zero: none (messages, plain stores).
struct TenantTag {
    std::array<std::uint8_t, 16> bytes{};
    friend auto operator<=>(const TenantTag&, const TenantTag&) = default;
};

struct Owner {
    std::string id;    ///< Of the process, random at its start.
    std::string peer;  ///< host:port where other gateways can follow a stream; empty on the embedded store.
    friend bool operator==(const Owner&, const Owner&) = default;
};

enum class OnUnknown : std::uint8_t { rerun = 1, probe = 2, hold = 3 };
enum class OnFailed : std::uint8_t { rerun = 1, replay = 2 };
/// Messages have delays and are never purged before they are decided; an HTTP intent's FAILED is due at once.
enum class IntentKind : std::uint8_t { http = 1, message = 2 };

/// What the intent was granted under; kept in the record because the sweeper has nothing else to go by.
struct Policy {
    IntentKind kind = IntentKind::http;
    OnUnknown on_unknown = OnUnknown::rerun;
    OnFailed on_failed = OnFailed::rerun;
    std::uint32_t max_attempts = 0;  ///< Charged attempts; 0 = no limit.
    std::uint32_t max_crashes = 0;   ///< 0 = no limit.
    milliseconds retention_completed{std::chrono::hours{24}};  ///< Also of final failures.
    milliseconds retention_failed{std::chrono::hours{1}};
    milliseconds retention_dead{std::chrono::hours{24 * 7}};
    friend bool operator==(const Policy&, const Policy&) = default;
};

/// Tokens as the upstream counted them. -1: it did not say.
struct Usage {
    std::string model;
    std::int64_t input_tokens = -1;
    std::int64_t output_tokens = -1;
    std::int64_t cached_tokens = -1;
    std::int64_t reasoning_tokens = -1;
    std::vector<std::string> upstream_ids;  ///< Request ids the upstream gave (its header), at most 4.
    friend bool operator==(const Usage&, const Usage&) = default;
};

enum class BodyKind : std::uint8_t {
    inline_body = 1,  ///< In the record itself.
    chunks = 2,       ///< Written before complete under (key, token, n).
    not_kept = 3,     ///< Larger than record.max_bytes: duplicates get 409 answer-not-kept.
};

/// The recorded answer.
struct Answer {
    std::uint16_t http_status = 0;
    std::string content_type;
    std::vector<std::pair<std::string, std::string>> headers;  ///< Kept ones only, names as the upstream spelled them.
    bool stream = false;                                       ///< Server-sent events.
    BodyKind body_kind = BodyKind::inline_body;
    std::shared_ptr<const std::string> body;  ///< Null unless inline. Shared: a replay copies no bytes.
    std::uint32_t chunk_count = 0;
    std::uint64_t body_bytes = 0;  ///< Of the whole body, whatever its kind.
    base::Digest body_digest;      ///< SHA-256 of the whole body; checked when chunks are read back.
    /// Data key under which `body` and the chunks are sealed; 0: they are plain. Without that key the answer is not kept.
    std::uint64_t sealed_under = 0;
};

/// Answers up to this size lie in the record, larger ones in chunks of this size.
inline constexpr std::size_t inline_body_max_bytes = 256 * 1024;

/// Why the last attempt failed, in words without prompt, answer or credential.
struct Failure {
    std::string code;     ///< Slug, e.g. `upstream-status`, `upstream-reset`, `stream-cut`, `lease-lost`, `released`.
    std::string message;  ///< For people.
    std::uint16_t http_status = 0;  ///< Of the upstream, 0 if it gave none.
    friend bool operator==(const Failure&, const Failure&) = default;
};

/// One turn of a conversation, written in the step that decides its intent, once per intent.
struct Append {
    StoredKey conversation;  ///< Key of (tenant, user, session).
    std::string request_id;  ///< The client's id; shown to the same tenant and user only.
    std::string user_content;
    std::string answer_content;
    bool late = false;  ///< Resolved by a person: appended at the end, marked.
    friend bool operator==(const Append&, const Append&) = default;
};

struct Record {
    Status status = Status::processing;
    bool final = false;  ///< FAILED that is replayed or cancelled: complete and fail are refused.
    bool cancelled = false;
    Fingerprint fingerprint;
    std::uint32_t attempt = 0;             ///< From 1; never falls.
    std::uint32_t uncharged_attempts = 0;  ///< Released, or provably not processed. Limits compare the difference.
    std::uint32_t crashes_charged = 0;
    std::uint32_t possible_second_payments = 0;  ///< Started attempts whose outcome was unknown and that were followed by another.
    bool follows_unknown = false;  ///< This attempt was granted although an earlier call's outcome was unknown (counted above).
    std::uint32_t generation = 1;
    StoreTime due;                ///< FAILED of a message: not before.
    bool scheduled_copy = false;  ///< A copy of the message is already scheduled at the broker.
    FencingToken token;
    Nonce nonce;
    Owner owner;
    StoreTime lease_end;
    bool call_started = false;  ///< The paid call may have left.
    StoreTime created;
    StoreTime completed;  ///< 0 until decided.
    StoreTime expires;    ///< 0 = never (undecided).
    Policy policy;
    std::optional<Answer> answer;
    Failure failure;
    Usage usage;
    bool letter_published = false;  ///< DEAD of a message: its dead letter is durable.
    std::string label;              ///< Readable, optional: operation. Never id, user or credential.
    TenantTag tenant;               ///< Whose it is; set by the first grant.
    /// What the user said, while a person may still have to decide: set by each grant of a turn, gone once COMPLETED or final.
    /// Its answer_content is empty. Shared: a renewal copies no bytes.
    std::shared_ptr<const Append> turn;
};

/// Undecided records are never purged and have no expiry: PROCESSING, UNKNOWN, a message's FAILED whose retry is to come, a
/// message's DEAD whose letter is not yet published.
bool undecided(const Record& record);

/// How a record contradicts itself, in words; null: it does not. What decide() asserts of every record that it writes: read
/// from a store it is damage.
const char* contradiction(const Record& record);

using RecordPtr = std::shared_ptr<const Record>;

}  // namespace semel::core
