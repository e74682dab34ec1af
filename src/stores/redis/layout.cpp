#include "stores/redis/layout.hpp"

#include <charconv>
#include <cstring>

#include "core/record_codec.hpp"
#include "stores/redis/client.hpp"

namespace semel::stores::redis {

namespace {

constexpr std::size_t tag_digits = 4;       // {b0417}
constexpr std::size_t key_text_bytes = 43;  // base64url of 32 bytes
constexpr char record_kind = 'r';
constexpr char conversation_kind = 's';
constexpr char chunk_kind = 'c';
constexpr char undecided_kind = 'u';
constexpr char parking_kind = 'p';
constexpr char places_kind = 'q';
constexpr std::string_view value_tag = "v";

std::string tag_of(std::uint16_t bucket) {
    std::string tag = "b0000";
    for (std::size_t digit = tag_digits; digit > 0; --digit, bucket /= 10)
        tag[digit] = static_cast<char>('0' + bucket % 10);
    return tag;
}

base::Error corrupt(std::string what) {
    return {.code = base::ErrorCode::store_corrupt,
            .detail = "redis: a record is damaged: " + std::move(what) +
                      "; restore it from a copy or remove it"};
}

template <class Bytes>
void put_raw(std::string& out, const Bytes& bytes) {
    out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}
template <class Bytes>
void get_raw(std::string_view from, Bytes& bytes) {
    if (from.size() == bytes.size()) std::memcpy(bytes.data(), from.data(), bytes.size());
}

/// A part that is not there takes no byte.
template <class Part>
std::string part_of(const Part& part, bool present) {
    std::string out;
    if (present) core::encode_part(part, out);
    return out;
}

}  // namespace

// -------------------------------------------------------------------- names

Names::Names(std::string prefix) : prefix_(std::move(prefix)) {
    for (std::uint16_t bucket = 0; bucket < core::key_buckets; ++bucket)
        slots_[bucket] = slot_of("{" + tag_of(bucket) + "}");
    value_slot_ = slot_of("{" + std::string(value_tag) + "}");
}

std::string Names::begin(std::uint16_t bucket, char kind) const {
    std::string name = prefix_;
    name += ":{";
    name += tag_of(bucket);
    name += "}:";
    name += kind;
    return name;
}

std::string Names::record(const core::StoredKey& key) const {
    return begin(core::bucket_of(key), record_kind) + ":" + base::base64url(key.view());
}
std::string Names::conversation(const core::StoredKey& key) const {
    return begin(core::bucket_of(key), conversation_kind) + ":" + base::base64url(key.view());
}
std::string Names::chunk(const core::StoredKey& key, core::FencingToken token,
                         std::uint32_t n) const {
    return begin(core::bucket_of(key), chunk_kind) + ":" + base::base64url(key.view()) + ":" +
           std::to_string(token.value) + ":" + std::to_string(n);
}
std::string Names::undecided(std::uint16_t bucket) const { return begin(bucket, undecided_kind); }
std::string Names::parking(const core::StoredKey& list) const {
    return begin(core::bucket_of(list), parking_kind) + ":" + base::base64url(list.view());
}
std::string Names::places(const core::StoredKey& list) const {
    return begin(core::bucket_of(list), places_kind) + ":" + base::base64url(list.view());
}
std::string Names::value(std::string_view name) const {
    return prefix_ + ":{" + std::string(value_tag) + "}:" + std::string(name);
}

std::string Names::pattern() const {
    std::string out;
    for (const char c : prefix_) {
        if (c == '*' || c == '?' || c == '[' || c == ']' || c == '\\') out += '\\';
        out += c;
    }
    return out + ":{b????}:[rcs]:*";
}

Names::Parsed Names::parse(std::string_view name) const {
    Parsed parsed;
    const std::size_t head =
        prefix_.size() + 2 + 1 + tag_digits + 2;  // prefix, ":{", "b0417", "}:"
    if (name.size() < head + 2 + key_text_bytes || !name.starts_with(prefix_) ||
        name[head + 1] != ':')
        return parsed;
    if (!base::digest_from_base64url(name.substr(head + 2, key_text_bytes), parsed.key))
        return parsed;
    std::string_view rest = name.substr(head + 2 + key_text_bytes);
    const char kind = name[head];
    if (kind == chunk_kind && rest.starts_with(':')) {
        rest.remove_prefix(1);
        const auto end = rest.find(':');
        if (end == std::string_view::npos) return parsed;
        const auto read = std::from_chars(rest.data(), rest.data() + end, parsed.token.value);
        if (read.ec != std::errc{} || read.ptr != rest.data() + end) return parsed;
        parsed.kind = Parsed::Kind::chunk;
    } else if (rest.empty() && kind == record_kind) {
        parsed.kind = Parsed::Kind::record;
    } else if (rest.empty() && kind == conversation_kind) {
        parsed.kind = Parsed::Kind::conversation;
    }
    return parsed;
}

// -------------------------------------------------------------------- numbers

void put8(std::string& out, std::uint8_t value) { out += static_cast<char>(value); }
void put32(std::string& out, std::uint32_t value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);  // x86-64 and arm64 are little-endian
    out.append(bytes, sizeof bytes);
}
void put64(std::string& out, std::uint64_t value) {
    char bytes[sizeof value];
    std::memcpy(bytes, &value, sizeof value);
    out.append(bytes, sizeof bytes);
}

std::string_view Cursor::take(std::size_t size) {
    if (!ok_ || bytes_.size() - at_ < size) {
        ok_ = false;
        return {};
    }
    at_ += size;
    return bytes_.substr(at_ - size, size);
}
std::uint8_t Cursor::u8() {
    const std::string_view bytes = take(1);
    return bytes.empty() ? std::uint8_t{0} : static_cast<std::uint8_t>(bytes[0]);
}
std::uint32_t Cursor::u32() {
    std::uint32_t value = 0;
    const std::string_view bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
}
std::uint64_t Cursor::u64() {
    std::uint64_t value = 0;
    const std::string_view bytes = take(sizeof value);
    if (!bytes.empty()) std::memcpy(&value, bytes.data(), sizeof value);
    return value;
}
std::string_view Cursor::rest() { return take(bytes_.size() - at_); }

// -------------------------------------------------------------------- records

void encode(const core::Record& record, std::string& out) {
    const std::string fields =
        part_of(record.fingerprint.fields, !record.fingerprint.fields.empty());
    const std::string owner = part_of(record.owner, true);
    const std::string failure = part_of(record.failure, record.failure != core::Failure{});
    const std::string usage = part_of(record.usage, record.usage != core::Usage{});
    const std::string turn = record.turn ? part_of(*record.turn, true) : std::string{};
    const std::string answer = record.answer ? part_of(*record.answer, true) : std::string{};
    const bool has_canonical = !record.fingerprint.canonical.empty();
    const auto flag = [&out](bool set) { put8(out, set ? 1 : 0); };
    const auto time = [&out](core::StoreTime at) { put64(out, static_cast<std::uint64_t>(at.us)); };
    const auto duration = [&out](core::milliseconds d) {
        put64(out, static_cast<std::uint64_t>(d.count()));
    };
    const auto length = [&out](std::size_t size) { put32(out, static_cast<std::uint32_t>(size)); };

    put64(out, record.token.value);
    time(record.lease_end);
    time(record.created);
    put8(out, layout_version);
    put8(out, static_cast<std::uint8_t>(record.status));
    flag(record.final);
    flag(record.cancelled);
    flag(record.call_started);
    flag(record.scheduled_copy);
    flag(record.letter_published);
    flag(record.follows_unknown);
    put8(out, static_cast<std::uint8_t>(record.policy.kind));
    put8(out, static_cast<std::uint8_t>(record.policy.on_unknown));
    put8(out, static_cast<std::uint8_t>(record.policy.on_failed));
    flag(record.turn != nullptr);
    flag(record.answer.has_value());
    out.append(3, '\0');
    put32(out, record.attempt);
    put32(out, record.uncharged_attempts);
    put32(out, record.crashes_charged);
    put32(out, record.possible_second_payments);
    put32(out, record.generation);
    time(record.due);
    time(record.completed);
    time(record.expires);
    put32(out, record.policy.max_attempts);
    put32(out, record.policy.max_crashes);
    duration(record.policy.retention_completed);
    duration(record.policy.retention_failed);
    duration(record.policy.retention_dead);
    length(has_canonical ? record.fingerprint.canonical.bytes.size() : 0);
    for (const std::string* part :
         {&fields, &owner, &record.label, &failure, &usage, &turn, &answer})
        length(part->size());
    put_raw(out, record.nonce.bytes);
    put_raw(out, record.tenant.bytes);
    put_raw(out, record.fingerprint.raw.bytes);
    if (has_canonical) put_raw(out, record.fingerprint.canonical.bytes);
    for (const std::string* part :
         {&fields, &owner, &record.label, &failure, &usage, &turn, &answer})
        out += *part;
}

base::Result<core::Record> decode(std::string_view bytes, bool* answer_elsewhere) {
    Cursor in(bytes);
    const auto time = [&in] { return core::StoreTime{static_cast<std::int64_t>(in.u64())}; };
    core::Record record;
    record.token.value = in.u64();
    record.lease_end = time();
    record.created = time();
    const std::uint8_t version = in.u8();
    if (version > layout_version) {
        return base::Error{.code = base::ErrorCode::store_version,
                           .detail = "redis: a record is of layout " + std::to_string(version) +
                                     ", this program reads up to " +
                                     std::to_string(layout_version) +
                                     "; start the version that wrote it"};
    }
    if (version != layout_version) return corrupt("its layout is " + std::to_string(version));
    const std::uint8_t status = in.u8();
    if (status < 1 || status > 5) return corrupt("its status is none of the five");
    record.status = static_cast<core::Status>(status);
    record.final = in.u8() != 0;
    record.cancelled = in.u8() != 0;
    record.call_started = in.u8() != 0;
    record.scheduled_copy = in.u8() != 0;
    record.letter_published = in.u8() != 0;
    record.follows_unknown = in.u8() != 0;
    const std::uint8_t kind = in.u8();
    const std::uint8_t on_unknown = in.u8();
    const std::uint8_t on_failed = in.u8();
    if (kind < 1 || kind > 2 || on_unknown < 1 || on_unknown > 3 || on_failed < 1 || on_failed > 2)
        return corrupt("its policy is none that this version knows");
    record.policy.kind = static_cast<core::IntentKind>(kind);
    record.policy.on_unknown = static_cast<core::OnUnknown>(on_unknown);
    record.policy.on_failed = static_cast<core::OnFailed>(on_failed);
    const bool has_turn = in.u8() != 0;
    const std::uint8_t has_answer = in.u8();
    in.take(3);
    record.attempt = in.u32();
    record.uncharged_attempts = in.u32();
    record.crashes_charged = in.u32();
    record.possible_second_payments = in.u32();
    record.generation = in.u32();
    const auto duration = [&in] { return core::milliseconds{static_cast<std::int64_t>(in.u64())}; };
    record.due = time();
    record.completed = time();
    record.expires = time();
    record.policy.max_attempts = in.u32();
    record.policy.max_crashes = in.u32();
    record.policy.retention_completed = duration();
    record.policy.retention_failed = duration();
    record.policy.retention_dead = duration();
    std::array<std::uint32_t, 8> lengths{};
    for (std::uint32_t& length : lengths) length = in.u32();
    get_raw(in.take(record.nonce.bytes.size()), record.nonce.bytes);
    get_raw(in.take(record.tenant.bytes.size()), record.tenant.bytes);
    get_raw(in.take(record.fingerprint.raw.bytes.size()), record.fingerprint.raw.bytes);
    get_raw(in.take(lengths[0]), record.fingerprint.canonical.bytes);
    const std::string_view fields = in.take(lengths[1]);
    const std::string_view owner = in.take(lengths[2]);
    record.label = std::string(in.take(lengths[3]));
    const std::string_view failure = in.take(lengths[4]);
    const std::string_view usage = in.take(lengths[5]);
    const std::string_view turn = in.take(lengths[6]);
    const std::string_view answer = in.take(lengths[7]);
    if (!in.ok() || !in.at_end()) return corrupt("its parts do not add up to its size");

    base::Result<void> read;
    if (!fields.empty()) read = core::decode_part(fields, record.fingerprint.fields);
    if (read && !owner.empty()) read = core::decode_part(owner, record.owner);
    if (read && !failure.empty()) read = core::decode_part(failure, record.failure);
    if (read && !usage.empty()) read = core::decode_part(usage, record.usage);
    if (read && has_turn) {
        core::Append said;
        read = core::decode_part(turn, said);
        record.turn = std::make_shared<const core::Append>(std::move(said));
    }
    constexpr std::uint8_t left_out = 2;
    if (read && has_answer != 0 && has_answer != left_out)
        read = core::decode_part(answer, record.answer.emplace());
    if (answer_elsewhere != nullptr) *answer_elsewhere = has_answer == left_out;
    if (!read) return read.error();
    if (const char* problem = core::contradiction(record)) return corrupt(problem);
    return record;
}

// -------------------------------------------------------------------- conversations

std::string encode_turn(const core::Append& turn) {
    std::string out;
    for (const std::string* text : {&turn.request_id, &turn.user_content, &turn.answer_content}) {
        put32(out, static_cast<std::uint32_t>(text->size()));
        out += *text;
    }
    return out;
}

base::Result<core::Turn> decode_turn(std::string_view bytes) {
    Cursor in(bytes);
    core::Turn turn;
    turn.number = in.u64();
    turn.at = {static_cast<std::int64_t>(in.u64())};
    turn.late = in.u8() != 0;
    for (std::string* text : {&turn.request_id, &turn.user_content, &turn.answer_content})
        *text = std::string(in.take(in.u32()));
    if (!in.ok() || !in.at_end()) return corrupt("a turn of a conversation");
    return turn;
}

// -------------------------------------------------------------------- parked messages

std::string place_name(std::uint64_t place) {
    std::string name(sizeof place, '\0');
    for (std::size_t i = name.size(); i > 0; --i, place >>= 8)
        name[i - 1] = static_cast<char>(place & 0xff);
    return name;
}

base::Result<std::uint64_t> place_in(std::string_view name) {
    std::uint64_t place = 0;
    if (name.size() != sizeof place)
        return base::Error{.code = base::ErrorCode::store_corrupt,
                           .detail = "redis: a list of parked messages has a place of " +
                                     std::to_string(name.size()) +
                                     " bytes; is another program writing to this server under the "
                                     "same prefix?"};
    for (const char byte : name) place = (place << 8) | static_cast<unsigned char>(byte);
    return place;
}

}  // namespace semel::stores::redis
