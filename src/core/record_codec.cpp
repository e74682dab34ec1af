// Record <-> bytes: docs/internals/record-format.md.
#include "core/record_codec.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/assert.hpp"

namespace semel::core {
namespace {

// Which optional parts follow; a bit that is not set costs nothing. The common ones come first: a
// varint of 14 bits is two bytes. The parts themselves are written in the order of read_record.
enum Part : std::uint64_t {
    part_message = 1 << 0,       // policy.kind; the bit is the value
    part_call_started = 1 << 1,  // the bit is the value
    part_nonce = 1 << 2,
    part_owner = 1 << 3,
    part_lease_end = 1 << 4,
    part_completed = 1 << 5,
    part_expires_by_policy = 1 << 6,  // expires = completed + policy.retention_completed
    part_expires = 1 << 7,
    part_policy = 1 << 8,  // other than the default but for its kind
    part_answer = 1 << 9,
    part_canonical = 1 << 10,
    part_fields = 1 << 11,
    part_usage = 1 << 12,
    part_due = 1 << 13,
    part_failure = 1 << 14,
    part_counters = 1 << 15,  // all but attempt
    part_final = 1 << 16,     // the bit is the value, as in the rest
    part_cancelled = 1 << 17,
    part_scheduled_copy = 1 << 18,
    part_letter_published = 1 << 19,
    part_follows_unknown = 1 << 20,
    part_label = 1 << 21,
    part_turn = 1 << 22,
    part_tenant = 1 << 23,
    parts_known = (1 << 24) - 1,
};

// The same for a policy's members that differ from the default.
enum PolicyPart : std::uint64_t {
    policy_choices = 1 << 0,  // on_unknown and on_failed
    policy_attempts = 1 << 1,
    policy_crashes = 1 << 2,
    policy_completed = 1 << 3,
    policy_failed = 1 << 4,
    policy_dead = 1 << 5,
    policy_parts_known = (1 << 6) - 1,
};

// The same for an answer; the two lowest bits are its BodyKind.
enum AnswerPart : std::uint64_t {
    answer_kind = 0b11,
    answer_status = 1 << 2,
    answer_type = 1 << 3,
    answer_headers = 1 << 4,
    answer_stream = 1 << 5,  // the bit is the value
    answer_body = 1 << 6,    // the bytes follow
    answer_body_bytes = 1 << 7,
    answer_digest = 1 << 8,
    answer_chunks = 1 << 9,
    answer_body_elsewhere = 1 << 10,  // inline, but the store keeps it beside the record
    answer_sealed = 1 << 11,
    answer_parts_known = (1 << 12) - 1,
};

std::uint64_t zigzag(std::int64_t value) {
    return (static_cast<std::uint64_t>(value) << 1) ^ static_cast<std::uint64_t>(value >> 63);
}
std::int64_t unzigzag(std::uint64_t value) {
    return static_cast<std::int64_t>((value >> 1) ^ (~(value & 1) + 1));
}
/// Times are near the token, which is one; differences are taken modulo 2^64, so no value can
/// overflow.
std::int64_t difference(std::uint64_t a, std::uint64_t b) {
    return static_cast<std::int64_t>(a - b);
}

class Writer {
  public:
    explicit Writer(std::string& out) : out_(out) {}

    void byte(std::uint8_t value) { out_ += static_cast<char>(value); }
    void varint(std::uint64_t value) {
        std::array<char, 10> bytes;  // seven bits each
        std::size_t size = 0;
        for (; value >= 0x80; value >>= 7) bytes[size++] = static_cast<char>(value | 0x80);
        bytes[size++] = static_cast<char>(value);
        out_.append(bytes.data(), size);
    }
    void signed_varint(std::int64_t value) { varint(zigzag(value)); }
    void text(std::string_view value) {
        varint(value.size());
        out_ += value;
    }
    template <std::size_t n>
    void raw(const std::array<std::uint8_t, n>& bytes) {
        out_.append(reinterpret_cast<const char*>(bytes.data()), n);
    }
    void fixed64(std::uint64_t value) {
        for (int shift = 0; shift < 64; shift += 8) byte(static_cast<std::uint8_t>(value >> shift));
    }

  private:
    std::string& out_;
};

/// Reads within bounds. After the first mistake every read gives zero, and `problem` stays at what
/// was first wrong.
class Reader {
  public:
    explicit Reader(std::string_view bytes) : bytes_(bytes) {}

    [[nodiscard]] bool ok() const { return problem_ == nullptr; }
    [[nodiscard]] const char* problem() const { return problem_; }
    [[nodiscard]] std::size_t problem_at() const { return problem_at_; }
    [[nodiscard]] std::size_t left() const { return bytes_.size() - at_; }

    void refuse(const char* problem) {
        if (problem_ != nullptr) return;
        problem_ = problem;
        problem_at_ = at_;
        at_ = bytes_.size();
    }
    std::uint8_t byte() {
        if (left() == 0) {
            refuse("ends too early");
            return 0;
        }
        return static_cast<std::uint8_t>(bytes_[at_++]);
    }
    std::uint64_t varint() {
        std::uint64_t value = 0;
        for (int shift = 0; shift < 64; shift += 7) {
            const std::uint8_t next = byte();
            if (!ok()) return 0;
            if (shift == 63 && next > 1) break;
            value |= static_cast<std::uint64_t>(next & 0x7f) << shift;
            if (next < 0x80) return value;
        }
        refuse("a number is longer than 64 bits");
        return 0;
    }
    std::int64_t signed_varint() { return unzigzag(varint()); }
    /// A number that must not be above `limit`.
    std::uint64_t at_most(std::uint64_t limit, const char* problem) {
        const std::uint64_t value = varint();
        if (value <= limit) return value;
        refuse(problem);
        return 0;
    }
    std::uint32_t count32() {
        return static_cast<std::uint32_t>(at_most(UINT32_MAX, "a counter is above 2^32"));
    }
    /// How many elements follow; each takes at least `min_bytes`, so a count that cannot be true is
    /// refused before anything is allocated.
    std::size_t elements(std::size_t min_bytes) {
        const std::uint64_t count = varint();
        if (count <= left() / min_bytes) return static_cast<std::size_t>(count);
        refuse("a count is above what the bytes can hold");
        return 0;
    }
    std::string_view view() {
        const std::size_t size = elements(1);
        const std::string_view value = bytes_.substr(at_, size);
        at_ += value.size();
        return value;
    }
    std::string text() { return std::string(view()); }
    template <std::size_t n>
    void raw(std::array<std::uint8_t, n>& out) {
        if (left() < n) return refuse("ends too early");
        std::memcpy(out.data(), bytes_.data() + at_, n);
        at_ += n;
    }
    std::uint64_t fixed64() {
        std::uint64_t value = 0;
        for (int shift = 0; shift < 64; shift += 8)
            value |= static_cast<std::uint64_t>(byte()) << shift;
        return value;
    }

  private:
    std::string_view bytes_;
    std::size_t at_ = 0;
    const char* problem_ = nullptr;
    std::size_t problem_at_ = 0;
};

// The least that an element of a list takes, for Reader::elements.
constexpr std::size_t field_mark_bytes = 16;
constexpr std::size_t header_min_bytes = 2;
constexpr std::size_t id_min_bytes = 1;

StoreTime expiry_by_policy(const Record& record) {
    // Modulo 2^64: the numbers may come from damaged bytes.
    const auto retention =
        static_cast<std::uint64_t>(record.policy.retention_completed.count()) * 1000;
    return {static_cast<std::int64_t>(static_cast<std::uint64_t>(record.completed.us) + retention)};
}

bool expires_by_policy(const Record& record) {
    return record.completed.us != 0 && record.expires.us != 0 &&
           record.expires == expiry_by_policy(record);
}

std::uint64_t parts_of(const Record& record) {
    Policy default_policy;
    default_policy.kind = record.policy.kind;
    std::uint64_t parts = 0;
    const auto set = [&](std::uint64_t part, bool present) { parts |= present ? part : 0; };
    set(part_final, record.final);
    set(part_cancelled, record.cancelled);
    set(part_call_started, record.call_started);
    set(part_scheduled_copy, record.scheduled_copy);
    set(part_letter_published, record.letter_published);
    set(part_follows_unknown, record.follows_unknown);
    set(part_message, record.policy.kind == IntentKind::message);
    set(part_canonical, !record.fingerprint.canonical.empty());
    set(part_fields, !record.fingerprint.fields.empty());
    set(part_nonce, record.nonce != Nonce{});
    set(part_owner, record.owner != Owner{});
    set(part_lease_end, record.lease_end.us != 0);
    set(part_due, record.due.us != 0);
    set(part_completed, record.completed.us != 0);
    const bool by_policy = expires_by_policy(record);
    set(part_expires_by_policy, by_policy);
    set(part_expires, record.expires.us != 0 && !by_policy);
    set(part_counters, record.uncharged_attempts != 0 || record.crashes_charged != 0 ||
                           record.possible_second_payments != 0 || record.generation != 1);
    set(part_policy, record.policy != default_policy);
    set(part_answer, record.answer.has_value());
    set(part_failure, record.failure != Failure{});
    set(part_usage, record.usage != Usage{});
    set(part_label, !record.label.empty());
    set(part_turn, record.turn != nullptr);
    set(part_tenant, record.tenant != TenantTag{});
    return parts;
}

void write_policy(Writer& writer, const Policy& policy) {
    const Policy usual;
    std::uint64_t parts = 0;
    const auto set = [&](std::uint64_t part, bool present) { parts |= present ? part : 0; };
    set(policy_choices,
        policy.on_unknown != usual.on_unknown || policy.on_failed != usual.on_failed);
    set(policy_attempts, policy.max_attempts != usual.max_attempts);
    set(policy_crashes, policy.max_crashes != usual.max_crashes);
    set(policy_completed, policy.retention_completed != usual.retention_completed);
    set(policy_failed, policy.retention_failed != usual.retention_failed);
    set(policy_dead, policy.retention_dead != usual.retention_dead);
    writer.varint(parts);
    if ((parts & policy_choices) != 0) {
        writer.byte(static_cast<std::uint8_t>(static_cast<unsigned>(policy.on_unknown) << 4 |
                                              static_cast<unsigned>(policy.on_failed)));
    }
    if ((parts & policy_attempts) != 0) writer.varint(policy.max_attempts);
    if ((parts & policy_crashes) != 0) writer.varint(policy.max_crashes);
    if ((parts & policy_completed) != 0) writer.signed_varint(policy.retention_completed.count());
    if ((parts & policy_failed) != 0) writer.signed_varint(policy.retention_failed.count());
    if ((parts & policy_dead) != 0) writer.signed_varint(policy.retention_dead.count());
}

void read_policy(Reader& reader, Policy& policy) {
    const std::uint64_t parts =
        reader.at_most(policy_parts_known, "the policy has a part that this version does not know");
    if ((parts & policy_choices) != 0) {
        const std::uint8_t choices = reader.byte();
        const unsigned on_unknown = choices >> 4;
        const unsigned on_failed = choices & 0xf;
        if (on_unknown < 1 || on_unknown > 3 || on_failed < 1 || on_failed > 2) {
            return reader.refuse("the policy is none that this version knows");
        }
        policy.on_unknown = static_cast<OnUnknown>(on_unknown);
        policy.on_failed = static_cast<OnFailed>(on_failed);
    }
    if ((parts & policy_attempts) != 0) policy.max_attempts = reader.count32();
    if ((parts & policy_crashes) != 0) policy.max_crashes = reader.count32();
    if ((parts & policy_completed) != 0)
        policy.retention_completed = milliseconds{reader.signed_varint()};
    if ((parts & policy_failed) != 0)
        policy.retention_failed = milliseconds{reader.signed_varint()};
    if ((parts & policy_dead) != 0) policy.retention_dead = milliseconds{reader.signed_varint()};
}

void write_answer(Writer& writer, const Answer& answer, bool with_body) {
    const bool has_body = answer.body_kind == BodyKind::inline_body && answer.body;
    auto parts = static_cast<std::uint64_t>(answer.body_kind);
    const auto set = [&](std::uint64_t part, bool present) { parts |= present ? part : 0; };
    set(answer_status, answer.http_status != 0);
    set(answer_type, !answer.content_type.empty());
    set(answer_headers, !answer.headers.empty());
    set(answer_stream, answer.stream);
    set(answer_body, has_body && with_body);
    set(answer_body_elsewhere, has_body && !with_body);
    set(answer_body_bytes, answer.body_bytes != 0);
    set(answer_digest, !answer.body_digest.empty());
    set(answer_chunks, answer.chunk_count != 0);
    set(answer_sealed, answer.sealed_under != 0);
    writer.varint(parts);
    if ((parts & answer_status) != 0) writer.varint(answer.http_status);
    if ((parts & answer_type) != 0) writer.text(answer.content_type);
    if ((parts & answer_headers) != 0) {
        writer.varint(answer.headers.size());
        for (const auto& [name, value] : answer.headers) {
            writer.text(name);
            writer.text(value);
        }
    }
    if ((parts & answer_body_bytes) != 0) writer.varint(answer.body_bytes);
    if ((parts & answer_digest) != 0) writer.raw(answer.body_digest.bytes);
    if ((parts & answer_chunks) != 0) writer.varint(answer.chunk_count);
    if ((parts & answer_sealed) != 0) writer.fixed64(answer.sealed_under);
    if ((parts & answer_body) != 0) writer.text(*answer.body);
}

void read_answer(Reader& reader, Answer& answer) {
    const std::uint64_t parts =
        reader.at_most(answer_parts_known, "the answer has a part that this version does not know");
    const std::uint64_t kind = parts & answer_kind;
    if (kind == 0) return reader.refuse("the answer's body is of no kind");
    answer.body_kind = static_cast<BodyKind>(kind);
    answer.stream = (parts & answer_stream) != 0;
    if ((parts & answer_status) != 0) {
        answer.http_status = static_cast<std::uint16_t>(
            reader.at_most(UINT16_MAX, "the answer's status is no HTTP status"));
    }
    if ((parts & answer_type) != 0) answer.content_type = reader.text();
    if ((parts & answer_headers) != 0) {
        const std::size_t headers = reader.elements(header_min_bytes);
        for (std::size_t i = 0; i < headers && reader.ok(); ++i) {
            std::string name = reader.text();
            answer.headers.emplace_back(std::move(name), reader.text());
        }
    }
    if ((parts & answer_body_bytes) != 0) answer.body_bytes = reader.varint();
    if ((parts & answer_digest) != 0) reader.raw(answer.body_digest.bytes);
    if ((parts & answer_chunks) != 0) answer.chunk_count = reader.count32();
    if ((parts & answer_sealed) != 0) answer.sealed_under = reader.fixed64();
    if ((parts & answer_body) != 0)
        answer.body = std::make_shared<const std::string>(reader.view());
}

void write_usage(Writer& writer, const Usage& usage) {
    writer.text(usage.model);
    writer.signed_varint(usage.input_tokens);
    writer.signed_varint(usage.output_tokens);
    writer.signed_varint(usage.cached_tokens);
    writer.signed_varint(usage.reasoning_tokens);
    writer.varint(usage.upstream_ids.size());
    for (const std::string& id : usage.upstream_ids) writer.text(id);
}

void read_usage(Reader& reader, Usage& usage) {
    usage.model = reader.text();
    usage.input_tokens = reader.signed_varint();
    usage.output_tokens = reader.signed_varint();
    usage.cached_tokens = reader.signed_varint();
    usage.reasoning_tokens = reader.signed_varint();
    const std::size_t ids = reader.elements(id_min_bytes);
    for (std::size_t i = 0; i < ids && reader.ok(); ++i)
        usage.upstream_ids.push_back(reader.text());
}

void write_owner(Writer& writer, const Owner& owner) {
    writer.text(owner.id);
    writer.text(owner.peer);
}

void read_owner(Reader& reader, Owner& owner) {
    owner.id = reader.text();
    owner.peer = reader.text();
}

void write_failure(Writer& writer, const Failure& failure) {
    writer.text(failure.code);
    writer.text(failure.message);
    writer.varint(failure.http_status);
}

void read_failure(Reader& reader, Failure& failure) {
    failure.code = reader.text();
    failure.message = reader.text();
    failure.http_status = static_cast<std::uint16_t>(
        reader.at_most(UINT16_MAX, "the failure's status is no HTTP status"));
}

void write_turn(Writer& writer, const Append& turn) {
    writer.raw(turn.conversation.bytes);
    writer.text(turn.request_id);
    writer.text(turn.user_content);
}

void read_turn(Reader& reader, Append& turn) {
    reader.raw(turn.conversation.bytes);
    turn.request_id = reader.text();
    turn.user_content = reader.text();
}

void write_fields(Writer& writer, const std::vector<FieldMark>& fields) {
    writer.varint(fields.size());
    for (const FieldMark& field : fields) {
        writer.fixed64(field.name);
        writer.fixed64(field.value);
    }
}

void read_fields(Reader& reader, std::vector<FieldMark>& marks) {
    const std::size_t fields = reader.elements(field_mark_bytes);
    marks.reserve(fields);
    for (std::size_t i = 0; i < fields && reader.ok(); ++i) {
        const std::uint64_t name = reader.fixed64();
        marks.push_back({name, reader.fixed64()});
    }
}

void read_record(Reader& reader, Record& record) {
    const std::uint8_t status = reader.byte();
    if (status < 1 || status > 5) return reader.refuse("the status is none of the five");
    record.status = static_cast<Status>(status);
    const std::uint64_t parts =
        reader.at_most(parts_known, "a part is marked that this version does not know");
    const auto has = [&](Part part) { return (parts & part) != 0; };
    record.final = has(part_final);
    record.cancelled = has(part_cancelled);
    record.call_started = has(part_call_started);
    record.scheduled_copy = has(part_scheduled_copy);
    record.letter_published = has(part_letter_published);
    record.follows_unknown = has(part_follows_unknown);
    record.policy.kind = has(part_message) ? IntentKind::message : IntentKind::http;

    record.attempt = reader.count32();
    record.token.value = reader.varint();
    const auto time = [&] {
        return StoreTime{static_cast<std::int64_t>(
            record.token.value + static_cast<std::uint64_t>(reader.signed_varint()))};
    };
    record.created = time();
    reader.raw(record.fingerprint.raw.bytes);
    if (has(part_canonical)) reader.raw(record.fingerprint.canonical.bytes);
    if (has(part_fields)) read_fields(reader, record.fingerprint.fields);
    if (has(part_nonce)) reader.raw(record.nonce.bytes);
    if (has(part_owner)) read_owner(reader, record.owner);
    if (has(part_lease_end)) record.lease_end = time();
    if (has(part_due)) record.due = time();
    if (has(part_completed)) record.completed = time();
    if (has(part_expires)) record.expires = time();
    if (has(part_counters)) {
        record.uncharged_attempts = reader.count32();
        record.crashes_charged = reader.count32();
        record.possible_second_payments = reader.count32();
        record.generation = reader.count32();
    }
    if (has(part_policy)) read_policy(reader, record.policy);
    if (has(part_expires_by_policy)) record.expires = expiry_by_policy(record);
    if (has(part_answer)) read_answer(reader, record.answer.emplace());
    if (has(part_failure)) read_failure(reader, record.failure);
    if (has(part_usage)) read_usage(reader, record.usage);
    if (has(part_label)) record.label = reader.text();
    if (has(part_turn)) {
        Append turn;
        read_turn(reader, turn);
        record.turn = std::make_shared<const Append>(std::move(turn));
    }
    if (has(part_tenant)) reader.raw(record.tenant.bytes);
    if (reader.left() != 0) return reader.refuse("bytes are left after the end");
    if (const char* problem = contradiction(record)) reader.refuse(problem);
}

}  // namespace

void encode_record(const Record& record, bool with_body, std::string& out) {
    Writer writer(out);
    const std::uint64_t parts = parts_of(record);
    const auto has = [&](Part part) { return (parts & part) != 0; };
    const auto time = [&](StoreTime value) {
        writer.signed_varint(difference(static_cast<std::uint64_t>(value.us), record.token.value));
    };
    writer.byte(record_format_version);
    writer.byte(static_cast<std::uint8_t>(record.status));
    writer.varint(parts);
    writer.varint(record.attempt);
    writer.varint(record.token.value);
    time(record.created);
    writer.raw(record.fingerprint.raw.bytes);
    if (has(part_canonical)) writer.raw(record.fingerprint.canonical.bytes);
    if (has(part_fields)) write_fields(writer, record.fingerprint.fields);
    if (has(part_nonce)) writer.raw(record.nonce.bytes);
    if (has(part_owner)) write_owner(writer, record.owner);
    if (has(part_lease_end)) time(record.lease_end);
    if (has(part_due)) time(record.due);
    if (has(part_completed)) time(record.completed);
    if (has(part_expires)) time(record.expires);
    if (has(part_counters)) {
        writer.varint(record.uncharged_attempts);
        writer.varint(record.crashes_charged);
        writer.varint(record.possible_second_payments);
        writer.varint(record.generation);
    }
    if (has(part_policy)) write_policy(writer, record.policy);
    if (has(part_answer)) write_answer(writer, *record.answer, with_body);
    if (has(part_failure)) write_failure(writer, record.failure);
    if (has(part_usage)) write_usage(writer, record.usage);
    if (has(part_label)) writer.text(record.label);
    if (has(part_turn)) write_turn(writer, *record.turn);
    if (has(part_tenant)) writer.raw(record.tenant.bytes);
}

namespace {

/// Reads one part that must take all of `bytes`.
template <class Part>
base::Result<void> decode_part(std::string_view bytes, const char* name, Part& part,
                               void (*read)(Reader&, Part&)) {
    Reader reader(bytes);
    read(reader, part);
    if (reader.ok() && reader.left() != 0) reader.refuse("bytes are left after the end");
    if (reader.ok()) return {};
    return base::Error{.code = base::ErrorCode::store_corrupt,
                       .detail = std::string("record is damaged in its ") + name + ", at byte " +
                                 std::to_string(reader.problem_at()) + " of it: " +
                                 reader.problem() + "; restore it from a copy or remove it"};
}

}  // namespace

void encode_part(const Owner& owner, std::string& out) {
    Writer writer(out);
    write_owner(writer, owner);
}
void encode_part(const Failure& failure, std::string& out) {
    Writer writer(out);
    write_failure(writer, failure);
}
void encode_part(const Usage& usage, std::string& out) {
    Writer writer(out);
    write_usage(writer, usage);
}
void encode_part(const Append& turn, std::string& out) {
    Writer writer(out);
    write_turn(writer, turn);
}
void encode_part(const Answer& answer, std::string& out) {
    Writer writer(out);
    write_answer(writer, answer, true);
}
void encode_part(const std::vector<FieldMark>& fields, std::string& out) {
    Writer writer(out);
    write_fields(writer, fields);
}
base::Result<void> decode_part(std::string_view bytes, Owner& owner) {
    return decode_part(bytes, "owner", owner, read_owner);
}
base::Result<void> decode_part(std::string_view bytes, Failure& failure) {
    return decode_part(bytes, "failure", failure, read_failure);
}
base::Result<void> decode_part(std::string_view bytes, Usage& usage) {
    return decode_part(bytes, "usage", usage, read_usage);
}
base::Result<void> decode_part(std::string_view bytes, Append& turn) {
    return decode_part(bytes, "turn", turn, read_turn);
}
base::Result<void> decode_part(std::string_view bytes, Answer& answer) {
    return decode_part(bytes, "answer", answer, read_answer);
}
base::Result<void> decode_part(std::string_view bytes, std::vector<FieldMark>& fields) {
    return decode_part(bytes, "fields", fields, read_fields);
}

base::Result<Record> decode_record(std::string_view bytes) {
    Reader reader(bytes);
    const std::uint8_t version = reader.byte();
    if (version > record_format_version) {
        return base::Error{.code = base::ErrorCode::store_version,
                           .detail = "record is of format " + std::to_string(version) +
                                     ", this program reads up to " +
                                     std::to_string(record_format_version) +
                                     "; start the version that wrote it"};
    }
    Record record;
    if (version == 0) {
        reader.refuse("the format is 0");
    } else {
        read_record(reader, record);
    }
    if (!reader.ok()) {
        return base::Error{.code = base::ErrorCode::store_corrupt,
                           .detail = "record of " + std::to_string(bytes.size()) +
                                     " bytes is damaged at byte " +
                                     std::to_string(reader.problem_at()) + ": " + reader.problem() +
                                     "; restore it from a copy or remove it"};
    }
    return record;
}

}  // namespace semel::core
