// The store's statements, as text for a Connection: values escaped, nothing prepared. Several of
// them go in one packet, which no prepared statement can; measured, the texts cost the server less
// than a second round trip would. The tables are in migrations/, the layout in
// docs/internals/sql-layout.md.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/store.hpp"
#include "sql/executor.hpp"
#include "sql/session.hpp"

namespace semel::stores::mysql {

/// As a column holds it.
inline std::string_view bytes_of(const core::Nonce& nonce) {
    return {reinterpret_cast<const char*>(nonce.bytes.data()), nonce.bytes.size()};
}

using core::StoredKey;
using core::StoreTime;

/// The server's clock when the statement began, or `told`: an SQL expression in us since 1970. The
/// same in all of a statement.
std::string clock_sql(const std::optional<StoreTime>& told);
/// The same at the moment that the row is looked at, after all waits for locks.
std::string clock_at_row_sql(const std::optional<StoreTime>& told);

/// `'...'` of a key.
void append_key(std::string& sql, const StoredKey& key);

/// The columns of semel_records from which row_of_values() makes a Row, with body or with NULL in
/// its place. The numbers are one text: each column of an answer costs a description of itself.
std::string record_columns(bool with_body);
inline constexpr std::size_t record_columns_count = 6;
/// A row of record_columns(). Error store_corrupt: the columns hold what no store wrote.
base::Result<sql::Row> row_of_values(sql::Values&& values);

/// Inserts what is not there, and answers with record_columns(), the clock of the insertion and
/// that of the reading, of each row that is there now. `returning`: in one statement (MariaDB).
/// Else two: the second row set is the answer. If one of the rows comes too late, the statement
/// does nothing and fails with error 1048 (a column that must not be NULL).
std::string insert_sql(std::span<const sql::Fresh> rows, const std::optional<StoreTime>& told,
                       bool returning);
/// Which of these keys are there under these nonces: k.
std::string owned_sql(std::span<const sql::Fresh> rows);

/// One UPDATE that completes if status, token and nonce are as they should.
std::string complete_sql(const sql::Completion& completion, const std::optional<StoreTime>& told);
/// The same for several (without their turns) in one statement, at the time that is in @semel_at.
std::string complete_many_sql(std::span<const sql::Completion* const> completions);
/// Puts the time into @semel_at.
std::string keep_clock_sql(const std::optional<StoreTime>& told);
/// One UPDATE that replaces if the version is still the one seen and it is in time.
std::string replace_sql(const sql::Change& change, const std::optional<StoreTime>& told);

/// Keeps in the session whether the UPDATE before changed a row, and the time of the turn that then
/// follows.
std::string remember_sql(std::size_t slot, const std::string& at);
/// Three statements: appends the turn if that UPDATE did, and if the conversation holds no turn of
/// this request id.
std::string append_sql(std::size_t slot, const core::Append& turn);

/// record_columns() and the value of `clock`, an SQL expression, for these keys.
std::string read_sql(std::span<const StoredKey> keys, bool with_bodies, const std::string& clock);
/// The same for one key, and always one row: if there is no record all but the clock is NULL.
std::string read_one_sql(const StoredKey& key, bool with_body, const std::string& clock);
/// A page of record_columns(), in the order of the keys.
std::string list_sql(const core::ScanFilter& filter, const std::string& cursor, std::size_t limit,
                     const std::optional<StoreTime>& told);

/// Keys of expired records, of conversations that nobody uses, and (key, token) of chunks above a
/// key with the token of the record, if there is one.
std::string expired_sql(std::size_t limit, const std::optional<StoreTime>& told);
std::string idle_sql(std::size_t limit, const std::optional<StoreTime>& told);
std::string chunk_owners_sql(const std::string& above, std::size_t limit);
/// Delete those of `keys` that still are what they were selected for. Each two statements: the
/// first deletes the records (or conversations), the second what belongs to those of them that are
/// gone.
std::string delete_expired_sql(std::span<const StoredKey> keys,
                               const std::optional<StoreTime>& told);
std::string delete_idle_sql(std::span<const StoredKey> keys, const std::optional<StoreTime>& told);
std::string delete_chunks_sql(const StoredKey& key, std::int64_t token);

std::string put_chunk_sql(const StoredKey& key, const core::PutChunk& chunk,
                          const std::optional<StoreTime>& told);
std::string get_chunk_sql(const StoredKey& key, const core::GetChunk& chunk);
std::string get_conversation_sql(const StoredKey& key, const std::string& request_id);
std::string get_turns_sql(const StoredKey& key, const core::GetTurns& what);
/// Two statements; whether there was one is the first's affected rows.
std::string delete_conversation_sql(const StoredKey& key);
/// Two statements; the second answers with the value.
std::string claim_value_sql(const core::ClaimValue& value);
std::string replace_value_sql(const core::ReplaceValue& value);

/// The fence of a list of parked messages.
std::string fence_sql(const StoredKey& list);
/// Two statements, in one transaction: take the list over from `seen` (empty: from nobody), and
/// answer with the fence that then is in it.
std::string open_parking_sql(const StoredKey& list, const std::optional<std::string>& seen,
                             const core::Nonce& fence);
/// The fence of a list, which stays until the end of the transaction.
std::string hold_fence_sql(const StoredKey& list);
/// Parks a message if its fence is the list's.
std::string park_sql(const sql::Parking& message);
/// Of one list.
std::string unpark_sql(std::span<const sql::Place> places);
std::string get_parked_sql(const StoredKey& list, const core::GetParked& what);

}  // namespace semel::stores::mysql
