#include "sql/row.hpp"

#include <string_view>
#include <utility>

#include "core/record_codec.hpp"
#include "core/transition.hpp"

namespace semel::sql {
namespace {

using core::Record;
using core::RecordPtr;

/// First byte of `done`.
constexpr std::uint8_t completion_format_version = 1;
/// Behind it the length of the answer's part, low byte first.
constexpr std::size_t length_bytes = 4;

/// What is added to a time must not leave its range.
constexpr std::int64_t time_limit_us = std::int64_t{1} << 53;

base::Error corrupt(const std::string& what) {
    return {.code = base::ErrorCode::store_corrupt,
            .detail = "a row of the records is damaged: " + what +
                      "; restore it from a copy or remove it"};
}

base::Result<void> decode_completion(std::string_view bytes, core::Answer& answer,
                                     core::Usage& usage) {
    const auto byte = [&](std::size_t at) { return static_cast<std::uint8_t>(bytes[at]); };
    if (bytes.empty()) return corrupt("its completion is empty");
    if (byte(0) > completion_format_version) {
        return base::Error{.code = base::ErrorCode::store_version,
                           .detail = "a completion is of format " + std::to_string(byte(0)) +
                                     ", this program reads up to " +
                                     std::to_string(completion_format_version) +
                                     "; start the version that wrote it"};
    }
    if (byte(0) == 0 || bytes.size() < 1 + length_bytes)
        return corrupt("its completion is none that this program writes");
    std::size_t length = 0;
    for (std::size_t i = 0; i < length_bytes; ++i)
        length |= static_cast<std::size_t>(byte(1 + i)) << (8 * i);
    bytes.remove_prefix(1 + length_bytes);
    if (length > bytes.size()) return corrupt("its completion ends too early");
    if (auto read = core::decode_part(bytes.substr(0, length), answer); !read) return read;
    bytes.remove_prefix(length);
    if (bytes.empty()) return {};
    return core::decode_part(bytes, usage);
}

/// The record that the completing statement made of a grant's.
base::Result<RecordPtr> completed(Record granted, const Row& row, core::Answer answer,
                                  core::Usage usage) {
    if (row.status != Status::completed) return corrupt("it has a completion and is not completed");
    if (granted.status != Status::processing) return corrupt("its completion is not of a grant");
    // What lets decide() complete it; anything else would be refused or asserted there.
    if (row.nonce == Nonce{} || row.token.value == 0)
        return corrupt("its completion is of a grant that nobody had");
    if (row.completed.us <= 0 || row.completed.us >= time_limit_us)
        return corrupt("it was completed at no time");
    granted.expires = {};
    granted.completed = {};
    if (const char* problem = core::contradiction(granted)) return corrupt(problem);
    core::Complete complete{.token = row.token,
                            .nonce = row.nonce,
                            .answer = std::move(answer),
                            .usage = std::move(usage),
                            .append = {}};
    const auto grant = std::make_shared<const Record>(std::move(granted));
    core::Transition transition = core::decide(grant, std::move(complete), row.completed);
    if (transition.record->expires != row.expires)
        return corrupt("it expires at another time than its retention says");
    return std::move(transition.record);
}

}  // namespace

std::string encode_completion(const core::Answer& answer, const core::Usage& usage) {
    core::Answer without_body = answer;
    without_body.body = nullptr;
    std::string out(1 + length_bytes, '\0');
    out[0] = static_cast<char>(completion_format_version);
    core::encode_part(without_body, out);
    const std::size_t length = out.size() - 1 - length_bytes;
    for (std::size_t i = 0; i < length_bytes; ++i)
        out[1 + i] = static_cast<char>(length >> (8 * i));
    if (usage != core::Usage{}) core::encode_part(usage, out);
    return out;
}

base::Result<RecordPtr> record_of(Row row, bool with_body) {
    auto decoded = core::decode_record(row.head);
    if (!decoded) return decoded.error();
    Record record = std::move(*decoded);
    record.token = row.token;
    record.created = row.created;
    record.lease_end = row.lease_end;
    if (record.nonce != row.nonce) return corrupt("its head is of another owner than its columns");
    if (record.policy.retention_completed.count() != row.keep_ms)
        return corrupt("its head says another retention than its columns");
    std::shared_ptr<const std::string> body;
    if (with_body && row.body) body = std::make_shared<const std::string>(std::move(*row.body));

    if (row.done) {
        core::Answer answer;
        core::Usage usage;
        if (auto read = decode_completion(*row.done, answer, usage); !read) return read.error();
        if (answer.body_kind == core::BodyKind::inline_body) answer.body = std::move(body);
        return completed(std::move(record), row, std::move(answer), std::move(usage));
    }
    if (record.status != row.status)
        return corrupt("its head is of another status than its columns");
    record.completed = row.completed;
    record.expires = row.expires;
    if (const char* problem = core::contradiction(record)) return corrupt(problem);
    if (record.answer && record.answer->body_kind == core::BodyKind::inline_body)
        record.answer->body = std::move(body);
    return std::make_shared<const Record>(std::move(record));
}

Row row_of(const StoredKey& key, const Record& record, std::int64_t version) {
    Row row{.key = key,
            .version = version,
            .status = record.status,
            .token = record.token,
            .nonce = record.nonce,
            .created = record.created,
            .lease_end = record.lease_end,
            .completed = record.completed,
            .expires = record.expires,
            .keep_ms = record.policy.retention_completed.count(),
            .head = {},
            .done = {},
            .body = {}};
    core::encode_record(record, false, row.head);
    if (record.answer && record.answer->body_kind == core::BodyKind::inline_body &&
        record.answer->body)
        row.body = *record.answer->body;
    return row;
}

}  // namespace semel::sql
