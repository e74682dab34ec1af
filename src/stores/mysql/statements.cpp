#include "stores/mysql/statements.hpp"

#include <charconv>

#include "stores/mysql/connection.hpp"

namespace semel::stores::mysql {
namespace {

using std::chrono::microseconds;

constexpr auto kIdle = std::chrono::duration_cast<microseconds>(core::conversation_idle_retention);

void append_number(std::string& sql, std::int64_t number) { sql += std::to_string(number); }

void append_optional(std::string& sql, const std::optional<std::string>& bytes) {
    if (bytes) {
        append_bytes(sql, *bytes);
    } else {
        sql += "NULL";
    }
}

template <class Range>
void append_keys(std::string& sql, const Range& keys) {
    sql += '(';
    for (const auto& key : keys) {
        if (sql.back() != '(') sql += ',';
        append_key(sql, key);
    }
    sql += ')';
}

// Not UNIX_TIMESTAMP(): that ends in 2038.
std::string microseconds_of(const char* moment) {
    return std::string("TIMESTAMPDIFF(MICROSECOND,TIMESTAMP'1970-01-01 00:00:00',") + moment + ")";
}

// The next of numbers with a space between them.
template <class Number>
bool take_next(std::string_view& text, Number& number) {
    const auto [end, code] = std::from_chars(text.data(), text.data() + text.size(), number);
    if (code != std::errc{}) return false;
    text.remove_prefix(std::min(static_cast<std::size_t>(end - text.data()) + 1, text.size()));
    return true;
}

template <class Bytes>
bool take_bytes(const std::optional<std::string>& text, Bytes& bytes) {
    if (!text || text->size() != bytes.size()) return false;
    std::copy(text->begin(), text->end(), reinterpret_cast<char*>(bytes.data()));
    return true;
}

std::string slot_name(const char* name, std::size_t slot) { return name + std::to_string(slot); }

}  // namespace

std::string clock_sql(const std::optional<StoreTime>& told) {
    static const std::string clock = microseconds_of("UTC_TIMESTAMP(6)");
    return told ? std::to_string(told->us) : clock;
}

std::string clock_at_row_sql(const std::optional<StoreTime>& told) {
    // The session's time zone is UTC.
    static const std::string clock = microseconds_of("SYSDATE(6)");
    return told ? std::to_string(told->us) : clock;
}

void append_key(std::string& sql, const StoredKey& key) { append_bytes(sql, key.view()); }

std::string record_columns(bool with_body) {
    return std::string(
               "k,CONCAT_WS(' "
               "',version,status,token,created,lease_end,completed,expires,keep_ms),nonce,head,"
               "done,") +
           (with_body ? "body" : "NULL");
}

base::Result<sql::Row> row_of_values(sql::Values&& values) {
    sql::Row row;
    unsigned status = 0;
    std::string_view numbers =
        values.size() >= record_columns_count && values[1] ? *values[1] : std::string_view{};
    const bool good = take_next(numbers, row.version) && take_next(numbers, status) &&
                      take_next(numbers, row.token.value) && take_next(numbers, row.created.us) &&
                      take_next(numbers, row.lease_end.us) &&
                      take_next(numbers, row.completed.us) && take_next(numbers, row.expires.us) &&
                      take_next(numbers, row.keep_ms) && take_bytes(values[0], row.key.bytes) &&
                      take_bytes(values[2], row.nonce.bytes) && values[3].has_value();
    if (!good)
        return base::Error{.code = base::ErrorCode::store_corrupt,
                           .detail =
                               "a row of semel_records holds what no store wrote: restore the "
                               "table from a backup"};
    row.status = static_cast<core::Status>(status);
    row.head = std::move(*values[3]);
    row.done = std::move(values[4]);
    row.body = std::move(values[5]);
    return row;
}

std::string insert_sql(std::span<const sql::Fresh> rows, const std::optional<StoreTime>& told,
                       bool returning) {
    const std::string clock = clock_sql(told);
    // Columns name those that the row has got before.
    std::string sql =
        "INSERT INTO "
        "semel_records(k,version,status,token,nonce,created,lease_end,completed,expires,keep_ms,"
        "head)VALUES";
    for (const sql::Fresh& row : rows) {
        sql += &row == rows.data() ? "(" : ",(";
        append_key(sql, row.key);
        sql.append(",IF(").append(clock).append("<=");
        append_number(sql, row.not_after.us);
        sql.append(1, ',').append(clock).append(",NULL),1,version,");
        append_bytes(sql, bytes_of(row.nonce));
        sql += ",version,version+";
        append_number(sql, microseconds(row.lease).count());
        sql += ",0,0,";
        append_number(sql, row.keep_ms);
        sql += ',';
        append_bytes(sql, row.head);
        sql += ')';
    }
    // Changes nothing. A guard has no place here: assignments are made from left to right.
    sql += "ON DUPLICATE KEY UPDATE k=semel_records.k";
    if (returning) {
        sql.append(" RETURNING ").append(record_columns(true)).append(1, ',').append(clock);
        return sql.append(1, ',').append(clock_at_row_sql(told));
    }
    std::vector<StoredKey> keys;
    for (const sql::Fresh& row : rows) keys.push_back(row.key);
    return sql + ";" + read_sql(keys, true, clock + "," + clock);
}

std::string owned_sql(std::span<const sql::Fresh> rows) {
    std::string sql = "SELECT k FROM semel_records WHERE (k,nonce) IN(";
    for (const sql::Fresh& row : rows) {
        sql += &row == rows.data() ? "(" : ",(";
        append_key(sql, row.key);
        sql += ',';
        append_bytes(sql, bytes_of(row.nonce));
        sql += ')';
    }
    return sql + ")";
}

std::string complete_sql(const sql::Completion& completion, const std::optional<StoreTime>& told) {
    const std::string clock = clock_sql(told);
    std::string sql = "UPDATE semel_records SET version=version+1,status=2,completed=" + clock +
                      ",expires=" + clock + "+keep_ms*1000,done=";
    append_bytes(sql, completion.done);
    sql += ",body=";
    append_optional(sql, completion.body);
    sql += " WHERE k=";
    append_key(sql, completion.key);
    sql += " AND status=1 AND token=";
    append_number(sql, static_cast<std::int64_t>(completion.token.value));
    sql += " AND nonce=";
    append_bytes(sql, bytes_of(completion.nonce));
    return sql;
}

std::string keep_clock_sql(const std::optional<StoreTime>& told) {
    return "SET @semel_at=" + clock_sql(told);
}

std::string complete_many_sql(std::span<const sql::Completion* const> completions) {
    std::string keys, guards, dones, bodies;
    for (const sql::Completion* one : completions) {
        const char* const comma = keys.empty() ? "" : ",";
        keys += comma;
        append_key(keys, one->key);
        guards.append(comma).append(1, '(');
        append_key(guards, one->key);
        guards += ',';
        append_number(guards, static_cast<std::int64_t>(one->token.value));
        guards += ',';
        append_bytes(guards, bytes_of(one->nonce));
        guards += ')';
        dones += ',';
        append_bytes(dones, one->done);
        bodies += ',';
        append_optional(bodies, one->body);
    }
    const std::string which = "ELT(FIELD(k," + keys + ")";
    return "UPDATE semel_records SET "
           "version=version+1,status=2,completed=@semel_at,expires=@semel_at+keep_ms*1000,done=" +
           which + dones + "),body=" + which + bodies + ") WHERE k IN(" + keys +
           ") AND status=1 AND (k,token,nonce) IN(" + guards + ")";
}

std::string replace_sql(const sql::Change& change, const std::optional<StoreTime>& told) {
    const sql::Row& row = change.row;
    std::string sql = "UPDATE semel_records SET version=";
    append_number(sql, row.version);
    sql += ",status=";
    append_number(sql, static_cast<std::int64_t>(row.status));
    sql += ",token=";
    append_number(sql, static_cast<std::int64_t>(row.token.value));
    sql += ",nonce=";
    append_bytes(sql, bytes_of(row.nonce));
    sql += ",created=";
    append_number(sql, row.created.us);
    sql += ",lease_end=";
    append_number(sql, row.lease_end.us);
    sql += ",completed=";
    append_number(sql, row.completed.us);
    sql += ",expires=";
    append_number(sql, row.expires.us);
    sql += ",keep_ms=";
    append_number(sql, row.keep_ms);
    sql += ",head=";
    append_bytes(sql, row.head);
    sql += ",done=";
    append_optional(sql, row.done);
    sql += ",body=";
    append_optional(sql, row.body);
    sql += " WHERE k=";
    append_key(sql, row.key);
    sql += " AND version=";
    append_number(sql, change.version_seen);
    sql.append(" AND ").append(clock_at_row_sql(told)).append("<=");
    append_number(sql, change.not_after.us);
    return sql;
}

std::string remember_sql(std::size_t slot, const std::string& at) {
    return "SET " + slot_name("@semel_did", slot) + "=ROW_COUNT()," + slot_name("@semel_at", slot) +
           "=" + at;
}

std::string append_sql(std::size_t slot, const core::Append& turn) {
    const std::string did = slot_name("@semel_did", slot) + "=1";
    const std::string at = slot_name("@semel_at", slot);
    std::string conversation;
    append_key(conversation, turn.conversation);
    std::string request_id;
    append_bytes(request_id, turn.request_id);

    // Locks the conversation: its turns are counted by one at a time.
    std::string sql =
        "INSERT INTO semel_conversations(k,created,last_used,turns) SELECT " + conversation + "," +
        at + "," + at + ",0 FROM DUAL WHERE " + did +
        " ON DUPLICATE KEY UPDATE k=semel_conversations.k;"
        "INSERT INTO semel_turns(k,number,request_id,user_content,answer_content,at,late) SELECT " +
        conversation + ",turns+1," + request_id + ",";
    append_bytes(sql, turn.user_content);
    sql += ',';
    append_bytes(sql, turn.answer_content);
    sql += "," + at + "," + (turn.late ? "1" : "0") +
           " FROM semel_conversations WHERE k=" + conversation + " AND " + did +
           " AND NOT EXISTS(SELECT 1 FROM semel_turns t WHERE t.k=" + conversation +
           " AND t.request_id=" + request_id +
           ");UPDATE semel_conversations SET turns=turns+1,last_used=" + at +
           " WHERE k=" + conversation + " AND " + did + " AND ROW_COUNT()=1";
    return sql;
}

std::string read_sql(std::span<const StoredKey> keys, bool with_bodies, const std::string& clock) {
    std::string sql = "SELECT ";
    sql.append(record_columns(with_bodies))
        .append(1, ',')
        .append(clock)
        .append(" FROM semel_records WHERE k IN");
    append_keys(sql, keys);
    return sql;
}

std::string read_one_sql(const StoredKey& key, bool with_body, const std::string& clock) {
    std::string sql = "SELECT ";
    sql.append(record_columns(with_body))
        .append(1, ',')
        .append(clock)
        .append(" FROM(SELECT 1)AS one LEFT JOIN semel_records ON k=");
    append_key(sql, key);
    return sql;
}

std::string list_sql(const core::ScanFilter& filter, const std::string& cursor, std::size_t limit,
                     const std::optional<StoreTime>& told) {
    const std::string clock = clock_sql(told);
    const bool undecided = filter.undecided_only || filter.dead_leases_only;
    std::string sql = "SELECT ";
    sql.append(record_columns(false))
        .append(" FROM semel_records FORCE INDEX(")
        .append(undecided ? "by_end" : "PRIMARY");
    sql += ") WHERE ";
    sql += undecided ? "expires=0" : "(expires=0 OR expires>" + clock + ")";
    if (filter.dead_leases_only) sql += " AND lease_end<=" + clock + " AND status=1";
    if (filter.status != 0) sql += " AND status=" + std::to_string(filter.status);
    if (!cursor.empty()) {
        sql += " AND k>";
        append_bytes(sql, cursor);
    }
    return sql + " ORDER BY k LIMIT " + std::to_string(limit);
}

std::string expired_sql(std::size_t limit, const std::optional<StoreTime>& told) {
    return "SELECT k FROM semel_records FORCE INDEX(by_end) WHERE expires>0 AND expires<=" +
           clock_sql(told) + " ORDER BY expires LIMIT " + std::to_string(limit);
}

std::string idle_sql(std::size_t limit, const std::optional<StoreTime>& told) {
    return "SELECT k FROM semel_conversations FORCE INDEX(by_use) WHERE last_used<=" +
           clock_sql(told) + "-" + std::to_string(kIdle.count()) + " ORDER BY last_used LIMIT " +
           std::to_string(limit);
}

std::string chunk_owners_sql(const std::string& above, std::size_t limit) {
    std::string sql =
        "SELECT c.k,c.token,r.token FROM (SELECT DISTINCT k,token FROM semel_chunks WHERE k>";
    append_bytes(sql, above);
    return sql + " ORDER BY k,token LIMIT " + std::to_string(limit) +
           ") c LEFT JOIN semel_records r ON r.k=c.k ORDER BY c.k,c.token";
}

std::string delete_expired_sql(std::span<const StoredKey> keys,
                               const std::optional<StoreTime>& told) {
    std::string list;
    append_keys(list, keys);
    return "DELETE FROM semel_records WHERE k IN" + list +
           " AND expires>0 AND expires<=" + clock_sql(told) +
           ";DELETE c FROM semel_chunks c LEFT JOIN semel_records r ON r.k=c.k WHERE c.k IN" +
           list + " AND r.k IS NULL";
}

std::string delete_idle_sql(std::span<const StoredKey> keys, const std::optional<StoreTime>& told) {
    std::string list;
    append_keys(list, keys);
    return "DELETE FROM semel_conversations WHERE k IN" + list +
           " AND last_used<=" + clock_sql(told) + "-" + std::to_string(kIdle.count()) +
           ";DELETE t FROM semel_turns t LEFT JOIN semel_conversations c ON c.k=t.k WHERE t.k IN" +
           list + " AND c.k IS NULL";
}

std::string delete_chunks_sql(const StoredKey& key, std::int64_t token) {
    std::string sql = "DELETE FROM semel_chunks WHERE k=";
    append_key(sql, key);
    return sql + " AND token=" + std::to_string(token);
}

std::string put_chunk_sql(const StoredKey& key, const core::PutChunk& chunk,
                          const std::optional<StoreTime>& told) {
    std::string sql = "INSERT INTO semel_chunks(k,token,n,bytes,at) VALUES(";
    append_key(sql, key);
    sql += "," + std::to_string(chunk.token.value) + "," + std::to_string(chunk.n) + ",";
    append_bytes(sql, chunk.bytes);
    // What is there stays: a repeated write brings the same bytes, a late one must not change what
    // is completed.
    return sql + "," + clock_sql(told) + ") ON DUPLICATE KEY UPDATE k=semel_chunks.k";
}

std::string get_chunk_sql(const StoredKey& key, const core::GetChunk& chunk) {
    std::string sql = "SELECT bytes FROM semel_chunks WHERE k=";
    append_key(sql, key);
    return sql + " AND token=" + std::to_string(chunk.token.value) +
           " AND n=" + std::to_string(chunk.n);
}

std::string get_conversation_sql(const StoredKey& key, const std::string& request_id) {
    std::string sql =
        "SELECT created,last_used,turns,EXISTS(SELECT 1 FROM semel_turns t WHERE t.k=c.k AND "
        "t.request_id=";
    append_bytes(sql, request_id);
    sql += ") FROM semel_conversations c WHERE k=";
    append_key(sql, key);
    return sql;
}

std::string get_turns_sql(const StoredKey& key, const core::GetTurns& what) {
    std::string sql =
        "SELECT number,request_id,user_content,answer_content,at,late FROM semel_turns WHERE k=";
    append_key(sql, key);
    // Numbers are BIGINT; none is ever so large.
    const auto after =
        std::min<std::uint64_t>(what.after, std::numeric_limits<std::int64_t>::max());
    return sql + " AND number>" + std::to_string(after) + " ORDER BY number" +
           (what.newest ? " DESC" : "") + " LIMIT " + std::to_string(what.limit);
}

std::string delete_conversation_sql(const StoredKey& key) {
    std::string quoted;
    append_key(quoted, key);
    return "DELETE FROM semel_conversations WHERE k=" + quoted +
           ";DELETE FROM semel_turns WHERE k=" + quoted;
}

std::string claim_value_sql(const core::ClaimValue& value) {
    std::string name;
    append_bytes(name, value.name);
    std::string sql = "INSERT INTO semel_values(name,value) VALUES(" + name + ",";
    append_bytes(sql, value.value_if_absent);
    return sql +
           ") ON DUPLICATE KEY UPDATE name=semel_values.name;SELECT value FROM semel_values WHERE "
           "name=" +
           name;
}

std::string replace_value_sql(const core::ReplaceValue& value) {
    std::string bytes;
    append_bytes(bytes, value.value);
    std::string sql = "INSERT INTO semel_values(name,value) VALUES(";
    append_bytes(sql, value.name);
    return sql + "," + bytes + ") ON DUPLICATE KEY UPDATE value=" + bytes;
}

std::string fence_sql(const StoredKey& list) {
    std::string sql = "SELECT fence FROM semel_parking WHERE k=";
    append_key(sql, list);
    return sql;
}

std::string open_parking_sql(const StoredKey& list, const std::optional<std::string>& seen,
                             const core::Nonce& fence) {
    std::string sql;
    if (seen) {
        sql = "UPDATE semel_parking SET fence=";
        append_bytes(sql, bytes_of(fence));
        sql += " WHERE k=";
        append_key(sql, list);
        sql += " AND fence=";
        append_bytes(sql, *seen);
    } else {
        sql = "INSERT INTO semel_parking(k,fence) VALUES(";
        append_key(sql, list);
        sql += ',';
        append_bytes(sql, bytes_of(fence));
        sql += ") ON DUPLICATE KEY UPDATE k=semel_parking.k";
    }
    return sql + ";" + fence_sql(list);
}

std::string hold_fence_sql(const StoredKey& list) {
    return fence_sql(list) + " LOCK IN SHARE MODE";
}

std::string park_sql(const sql::Parking& message) {
    std::string sql = "INSERT INTO semel_parked(k,place,bytes) SELECT k,";
    append_number(sql, sql::place_number(message.place));
    sql += ',';
    append_bytes(sql, message.bytes);
    sql += " FROM semel_parking WHERE k=";
    append_key(sql, message.list);
    sql += " AND fence=";
    append_bytes(sql, bytes_of(message.fence));
    return sql + " ON DUPLICATE KEY UPDATE bytes=VALUES(bytes)";
}

std::string unpark_sql(std::span<const sql::Place> places) {
    std::string sql = "DELETE FROM semel_parked WHERE k=";
    append_key(sql, places.front().list);
    sql += " AND place IN(";
    for (const sql::Place& one : places) {
        if (&one != places.data()) sql += ',';
        append_number(sql, sql::place_number(one.place));
    }
    return sql + ")";
}

std::string get_parked_sql(const StoredKey& list, const core::GetParked& what) {
    std::string sql = "SELECT place,bytes FROM semel_parked WHERE k=";
    append_key(sql, list);
    return sql + " AND place>=" + std::to_string(sql::place_number(what.from)) +
           " ORDER BY place LIMIT " + std::to_string(what.limit);
}

}  // namespace semel::stores::mysql
