// A record as the SQL databases hold it, and how a record comes back from its row: docs/internals/sql-layout.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/result.hpp"
#include "core/operation.hpp"
#include "core/store.hpp"

namespace semel::sql {

using core::FencingToken;
using core::Nonce;
using core::Status;
using core::StoredKey;
using core::StoreTime;

/// One row of semel_records. The columns are what statements judge by and what the database's own clock may set; everything else
/// is in `head`. Where both say something, the columns are right.
struct Row {
    StoredKey key;
    std::int64_t version = 1;  ///< What a guarded write compares: begins with the time, grows by one with each write.
    Status status = Status::processing;
    FencingToken token;
    Nonce nonce;
    StoreTime created;
    StoreTime lease_end;
    StoreTime completed;          ///< 0 until decided.
    StoreTime expires;            ///< 0 exactly while the record is undecided.
    std::int64_t keep_ms = 0;     ///< policy.retention_completed: what a completing statement adds to its time.
    std::string head;             ///< encode_record() without the inline body.
    std::optional<std::string> done;  ///< Set by the one statement that completes: see encode_completion(). Empty after any other write.
    std::optional<std::string> body;  ///< The answer's inline body, as the record would hold it. Left out of listings.
};

/// What the completing statement adds to the row of the grant: the record it makes is decide(head, complete, completed).
std::string encode_completion(const core::Answer& answer, const core::Usage& usage);

/// The record of a row. `with_body`: the row's body is part of it (else answer->body is null). Error store_corrupt or
/// store_version: head or done cannot be read, or contradict themselves; the detail names no key.
base::Result<core::RecordPtr> record_of(Row row, bool with_body);

/// The row that says the same as `record`, all columns set, at `version`. The inverse of record_of().
Row row_of(const StoredKey& key, const core::Record& record, std::int64_t version);

}  // namespace semel::sql
