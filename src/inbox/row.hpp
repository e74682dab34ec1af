// A row of message_dedup as a record, and back. Where its readable columns and its record say
// different things, somebody has changed the columns by hand, and is believed.
#pragma once

#include <optional>
#include <string>

#include "base/result.hpp"
#include "core/record.hpp"
#include "inbox/names.hpp"

namespace semel::inbox {

/// Longest error_message, in characters; what goes beyond is cut there and whole in the record.
inline constexpr std::size_t error_message_max = 1000;

struct DedupRow {
    base::Digest key;
    std::int64_t version = 0;
    std::int64_t status = 0;       ///< See row_codes.hpp.
    std::int64_t retry_count = 0;  ///< Attempts after the first.
    std::optional<std::string> error_message;
    core::StoreTime created;
    core::StoreTime updated;
    std::optional<core::StoreTime> expire;  ///< Empty exactly while the message is undecided.
    std::optional<core::StoreTime>
        lease_until;  ///< PROCESSING: the lease's end. FAILED: not due before.
    std::uint64_t token = 0;
    std::string nonce;
    std::optional<std::string>
        fingerprint;  ///< Of the message, canonical where there is such a form; empty: not known.
    std::optional<std::string>
        record;  ///< Empty: a row of the inbox or of a migration; its columns say all.
};

/// The columns that row_of_values() reads, in its order.
std::string row_columns(sql::Dialect dialect);
DedupRow row_of_values(const sql::Values& values);

/// Error store_corrupt: the row can be read neither way; the detail names its key_hash.
base::Result<core::RecordPtr> record_of(const DedupRow& row);
/// All columns but key and version. `at`: the time of the step, for updated_at.
DedupRow row_of(const core::Record& record, core::StoreTime at);

/// A fingerprint that matches everything, and is nobody's: the message was recorded without one.
bool absent(const core::Fingerprint& fingerprint);

}  // namespace semel::inbox
