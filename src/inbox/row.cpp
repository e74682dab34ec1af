#include "inbox/row.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/record_codec.hpp"
#include "inbox/row_codes.hpp"

namespace semel::inbox {
namespace {

using core::Record;
using core::Status;
using core::StoreTime;

std::optional<StoreTime> time_of(const std::optional<std::string>& value) {
    if (!value) return {};
    return StoreTime{number_of(value)};
}

std::optional<StoreTime> unless_zero(StoreTime time) {
    return time.us == 0 ? std::nullopt : std::optional(time);
}

/// What the columns say. `known`: what else is known of it.
Record from_columns(const DedupRow& row, Record known, bool fingerprint_known) {
    Record record = std::move(known);
    record.status = status_of(row.status);
    record.final = record.cancelled = record.scheduled_copy = record.letter_published = false;
    record.attempt = static_cast<std::uint32_t>(std::max<std::int64_t>(row.retry_count, 0)) + 1;
    record.uncharged_attempts = 0;
    // Nothing says that it was free, and an attempt that failed is charged exactly if its call may
    // have left.
    record.call_started = true;
    record.token = {std::max<std::uint64_t>(row.token, 1)};
    record.nonce = {};
    std::memcpy(record.nonce.bytes.data(), row.nonce.data(),
                std::min(row.nonce.size(), record.nonce.bytes.size()));
    record.created = row.created;
    record.completed = record.expires = record.due = record.lease_end = {};
    record.policy.kind = core::IntentKind::message;
    if (!fingerprint_known && row.fingerprint &&
        row.fingerprint->size() == record.fingerprint.raw.bytes.size()) {
        std::memcpy(record.fingerprint.raw.bytes.data(), row.fingerprint->data(),
                    row.fingerprint->size());
        record.fingerprint.canonical = record.fingerprint.raw;
    }
    switch (record.status) {
        case Status::processing:
            record.lease_end = row.lease_until.value_or(StoreTime{});
            break;
        case Status::completed:
            record.completed = row.updated;
            record.expires = row.expire.value_or(row.updated + record.policy.retention_completed);
            record.failure = {};
            record.turn = nullptr;
            break;
        case Status::failed:
            record.due = row.lease_until.value_or(StoreTime{});
            break;
        case Status::dead:
            record.letter_published = row.expire.has_value();
            record.expires = row.expire.value_or(StoreTime{});
            break;
        case Status::unknown:
            break;
    }
    if (record.status != Status::completed) {
        record.answer.reset();
        if (row.error_message && record.failure.message.empty())
            record.failure = {"recorded", *row.error_message, 0};
    }
    return record;
}

}  // namespace

bool absent(const core::Fingerprint& fingerprint) {
    return fingerprint.raw.empty() && fingerprint.canonical.empty();
}

std::string row_columns(sql::Dialect dialect) {
    const auto us = [&](const char* column) { return microseconds_of(dialect, column); };
    return "key_hash, version, status, retry_count, error_message, " + us("created_at") + ", " +
           us("updated_at") + ", " + us("expire_at") + ", " + us("lease_until") +
           ", token, nonce, fingerprint, record";
}

DedupRow row_of_values(const sql::Values& values) {
    DedupRow row;
    const std::string key = values[0].value_or("");
    std::memcpy(row.key.bytes.data(), key.data(), std::min(key.size(), row.key.bytes.size()));
    row.version = number_of(values[1]);
    row.status = number_of(values[2]);
    row.retry_count = number_of(values[3]);
    row.error_message = values[4];
    row.created = {number_of(values[5])};
    row.updated = {number_of(values[6])};
    row.expire = time_of(values[7]);
    row.lease_until = time_of(values[8]);
    row.token = static_cast<std::uint64_t>(std::max<std::int64_t>(number_of(values[9]), 0));
    row.nonce = values[10].value_or("");
    row.fingerprint = values[11];
    row.record = values[12];
    return row;
}

base::Result<core::RecordPtr> record_of(const DedupRow& row) {
    const auto corrupt = [&](const std::string& why) {
        return base::Error{.code = base::ErrorCode::store_corrupt,
                           .detail = "inbox: the row of message_dedup with key_hash " +
                                     base::hex(row.key.view()) + " " + why};
    };
    Record record;
    if (row.record) {
        auto decoded = core::decode_record(*row.record);
        if (!decoded) {
            base::Error error =
                corrupt("holds a record that cannot be read: " + decoded.error().detail);
            error.code = decoded.error().code;
            return error;
        }
        record = std::move(*decoded);
    }
    if (!row.record || code_of(record.status) != row.status)
        record = from_columns(row, std::move(record), row.record.has_value());
    if (const char* why = core::contradiction(record))
        return corrupt(std::string("contradicts itself: ") + why);
    return std::make_shared<const Record>(std::move(record));
}

DedupRow row_of(const Record& record, StoreTime at) {
    DedupRow row;
    row.status = code_of(record.status);
    row.retry_count = record.attempt == 0 ? 0 : record.attempt - 1;
    if (!record.failure.code.empty()) {
        const std::string words = record.failure.message.empty()
                                      ? record.failure.code
                                      : record.failure.code + ": " + record.failure.message;
        row.error_message = readable(words, error_message_max);
    }
    row.created = record.created;
    row.updated = at;
    row.expire = unless_zero(record.expires);
    if (record.status == Status::processing) row.lease_until = unless_zero(record.lease_end);
    if (record.status == Status::failed) row.lease_until = unless_zero(record.due);
    row.token = record.token.value;
    row.nonce.assign(reinterpret_cast<const char*>(record.nonce.bytes.data()),
                     record.nonce.bytes.size());
    const base::Digest& digest = record.fingerprint.canonical.empty()
                                     ? record.fingerprint.raw
                                     : record.fingerprint.canonical;
    if (!digest.empty()) row.fingerprint = std::string(digest.view());
    std::string encoded;
    core::encode_record(record, true, encoded);
    row.record = std::move(encoded);
    return row;
}

}  // namespace semel::inbox
