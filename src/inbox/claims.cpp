#include "inbox/claims.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "inbox/row_codes.hpp"

namespace semel::inbox {
namespace {

using sql::Dialect;

/// A one-dimensional array for unnest(), all of its values as bytes. Empty: NULL.
class ByteArray {
  public:
    void add(std::optional<std::string_view> value) {
        text_ += text_.size() > 1 ? "," : "";
        text_ += value ? "\"\\\\x" + base::hex(*value) + '"' : std::string("NULL");
    }
    std::string finish() { return std::move(text_) + '}'; }

  private:
    std::string text_ = "{";
};

template <class Keys>
void add_key_list(StatementBuilder& sql, const Keys& keys) {
    bool first = true;
    for (std::string_view key : keys) {
        sql.text(first ? "" : ", ").bytes(key);
        first = false;
    }
}

/// WHERE over keys. On MySQL the primary key is forced: a locking read that scans a small table
/// instead waits for rows that are none of its business.
std::string from_keys(const Tables& tables) {
    return " FROM " + tables.dedup +
           (tables.dialect == Dialect::mysql ? " FORCE INDEX (PRIMARY)" : "") +
           " WHERE key_hash IN (";
}

std::vector<std::string_view> views(std::span<const base::Digest> keys) {
    std::vector<std::string_view> out;
    for (const base::Digest& key : keys) out.push_back(key.view());
    return out;
}

std::optional<std::string_view> view_of(const std::optional<base::Digest>& digest) {
    return digest ? std::optional(digest->view()) : std::nullopt;
}

constexpr std::size_t id_bytes = 8;

std::string bytes_of(ClaimId id) {
    std::string bytes(id_bytes, '\0');
    std::memcpy(bytes.data(), &id.value, id_bytes);
    return bytes;
}

/// Whether a row's nonce begins with the id.
std::string under_id(Dialect dialect) {
    return dialect == Dialect::postgres ? "substring(nonce from 1 for 8) = " : "LEFT(nonce, 8) = ";
}

bool same(const std::optional<std::string>& stored, const std::optional<base::Digest>& asked) {
    return !stored || !asked || *stored == asked->view();
}

}  // namespace

Claims::Claims(const Tables& tables, const InboxOptions& options,
               std::span<const Message* const> messages, ClaimId id)
    : tables_(tables),
      options_(options),
      nonce_(bytes_of(id) + base::random_bytes(16 - id_bytes)),
      index_(messages.size()),
      repeated_(messages.size()) {
    std::vector<base::Digest> keys(messages.size());
    for (std::size_t i = 0; i < messages.size(); ++i)
        keys[i] = key_hash({options.scope, messages[i]->source, messages[i]->id});
    std::vector<std::size_t> order(messages.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return keys[a] != keys[b] ? keys[a] < keys[b] : a < b;
    });
    for (const std::size_t i : order) {
        repeated_[i] = !unique_.empty() && unique_.back().key == keys[i];
        if (!repeated_[i]) unique_.push_back({.key = keys[i], .message = messages[i]});
        index_[i] = unique_.size() - 1;
    }
    if (unique_.empty()) step_ = Step::finished;
}

bool Claims::any(bool Unique::* flag) const {
    return std::any_of(unique_.begin(), unique_.end(),
                       [&](const Unique& one) { return one.*flag; });
}

std::vector<sql::Statement> Claims::next() {
    std::vector<sql::Statement> statements;
    switch (step_) {
        case Step::insert:
            statements.push_back(insertion());
            // Who inserted what is seen by the nonces only.
            if (tables_.dialect == Dialect::mysql) statements.push_back(reading());
            break;
        case Step::read:
            statements.push_back(reading());
            break;
        case Step::take:
            for (const Unique& one : unique_) {
                if (one.take) statements.push_back(taking(one));
            }
            break;
        case Step::finished:
            break;
    }
    return statements;
}

void Claims::absorb(std::span<const sql::ResultRows> results) {
    switch (step_) {
        case Step::insert:
            if (tables_.dialect == Dialect::mysql) {
                take_in_rows(results.back());
                break;
            }
            for (const sql::Values& row : results.back().rows) {
                if (Unique* one = find(row[0])) {
                    one->pending = false;
                    one->claim = {.kind = Claim::Kind::fresh};
                }
            }
            step_ = Step::read;
            if (any(&Unique::pending)) return;
            break;
        case Step::read:
            take_in_rows(results.back());
            break;
        case Step::take: {
            std::size_t at = 0;
            for (Unique& one : unique_) {
                if (!one.take) continue;
                one.take = false;
                // Somebody else took it, or brought its end: look again.
                one.pending = results[at++].affected != 1;
                if (!one.pending)
                    one.claim = {.kind = Claim::Kind::fresh, .retry = one.claim.retry};
            }
            break;
        }
        case Step::finished:
            return;
    }
    if (any(&Unique::take)) {
        step_ = Step::take;
    } else if (any(&Unique::pending) && ++rounds_ < claim_rounds_max) {
        step_ = Step::insert;
    } else {
        step_ = Step::finished;
    }
}

std::vector<Claim> Claims::result() const {
    std::vector<Claim> claims(index_.size());
    for (std::size_t i = 0; i < index_.size(); ++i) {
        claims[i] = unique_[index_[i]].claim;
        if (!repeated_[i] || claims[i].kind != Claim::Kind::fresh) continue;
        claims[i] = {.kind = Claim::Kind::done};
    }
    return claims;
}

Claims::Unique* Claims::find(const std::optional<std::string>& key) {
    if (!key) return nullptr;
    const auto found = std::lower_bound(
        unique_.begin(), unique_.end(), std::string_view(*key),
        [](const Unique& one, std::string_view wanted) { return one.key.view() < wanted; });
    return found != unique_.end() && found->key.view() == *key ? &*found : nullptr;
}

// Columns: key_hash, status, nonce, fingerprint, version, expired, takeable, retry_count.
void Claims::take_in_rows(const sql::ResultRows& result) {
    for (const sql::Values& row : result.rows) {
        Unique* one = find(row[0]);
        if (one == nullptr || !one->pending) continue;
        one->pending = false;
        const auto code = number_of(row[1]);
        const bool expired = number_of(row[5]) != 0;
        one->claim = {.kind = Claim::Kind::undecided, .status = status_of(code)};
        one->version = number_of(row[4]);
        if (expired) {
            one->take = true;
            one->claim.retry = false;
        } else if (!same(row[3], one->message->fingerprint)) {
            one->claim.kind = Claim::Kind::mismatch;
        } else if (code == code_done) {
            const std::string_view nonce = row[2] ? std::string_view(*row[2]) : std::string_view();
            const bool ours = nonce.starts_with(std::string_view(nonce_).substr(0, id_bytes));
            one->claim.kind = nonce == nonce_ ? Claim::Kind::fresh
                              : ours          ? Claim::Kind::ours
                                              : Claim::Kind::done;
        } else if (number_of(row[6]) != 0) {
            one->take = true;
            one->claim.retry = true;
        }
    }
}

sql::Statement Claims::insertion() const {
    const std::string columns =
        "INSERT INTO " + tables_.dedup +
        " (key_hash, scope, source, message_id, business_key, status, retry_count, created_at,"
        " updated_at, expire_at, token, nonce, fingerprint, version) ";
    const std::int64_t keep = std::chrono::microseconds(options_.retention).count();
    const std::string scope = readable(options_.scope);
    StatementBuilder sql(tables_.dialect);
    sql.text(columns);
    if (tables_.dialect == Dialect::postgres) {
        ByteArray keys, sources, ids, business_keys, fingerprints;
        for (const Unique& one : unique_) {
            if (!one.pending) continue;
            const Message& message = *one.message;
            keys.add(one.key.view());
            sources.add(readable(message.source));
            ids.add(readable(message.id));
            business_keys.add(message.business_key.empty()
                                  ? std::nullopt
                                  : std::optional<std::string_view>(
                                        readable(message.business_key, business_key_max)));
            fingerprints.add(view_of(message.fingerprint));
        }
        sql.text("SELECT m.k, ").utf8(scope);
        sql.text(
            ", convert_from(m.s, 'UTF8'), convert_from(m.i, 'UTF8'), convert_from(m.b, 'UTF8'),"
            " 1, 0, c.t, c.t, c.t + ");
        sql.number(keep).text(
            " * interval '1 microsecond', (extract(epoch from c.t) * 1000000)::bigint, ");
        sql.bytes(nonce_).text(", m.f, 1 FROM unnest(");
        sql.byte_array(keys.finish()).text(", ").byte_array(sources.finish()).text(", ");
        sql.byte_array(ids.finish()).text(", ").byte_array(business_keys.finish()).text(", ");
        sql.byte_array(fingerprints.finish());
        sql.text(
            ") AS m(k, s, i, b, f), (SELECT clock_timestamp() AS t) c"
            " ON CONFLICT (key_hash) DO NOTHING RETURNING key_hash");
        return sql.finish();
    }
    bool first = true;
    sql.text("VALUES ");
    for (const Unique& one : unique_) {
        if (!one.pending) continue;
        const Message& message = *one.message;
        sql.text(first ? "(" : ", (").bytes(one.key.view()).text(", ").utf8(scope).text(", ");
        first = false;
        sql.utf8(readable(message.source)).text(", ").utf8(readable(message.id)).text(", ");
        if (message.business_key.empty())
            sql.null();
        else
            sql.utf8(readable(message.business_key, business_key_max));
        sql.text(
               ", 1, 0, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6),"
               " DATE_ADD(UTC_TIMESTAMP(6), INTERVAL ")
            .number(keep);
        sql.text(" MICROSECOND), TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), ");
        sql.bytes(nonce_).text(", ");
        if (message.fingerprint)
            sql.bytes(message.fingerprint->view());
        else
            sql.null();
        sql.text(", 1)");
    }
    // Changes nothing, waits for whoever else has the row, and hides no other error, as IGNORE
    // would.
    sql.text(" ON DUPLICATE KEY UPDATE key_hash = key_hash");
    return sql.finish();
}

sql::Statement Claims::reading() const {
    const bool mysql = tables_.dialect == Dialect::mysql;
    std::vector<std::string_view> keys;
    for (const Unique& one : unique_) {
        if (one.pending) keys.push_back(one.key.view());
    }
    const std::string clock = clock_of(tables_.dialect);
    StatementBuilder sql(tables_.dialect);
    sql.text("SELECT key_hash, status, nonce, fingerprint, version, CASE WHEN expire_at <= ");
    sql.text(clock).text(" AND status NOT IN (0, 4) THEN 1 ELSE 0 END, CASE WHEN status = 2 AND");
    sql.text(" expire_at IS NULL AND (lease_until IS NULL OR lease_until <= ").text(clock);
    sql.text(") THEN 1 ELSE 0 END");
    if (!mysql) {
        // One text for any number of keys: it is prepared.
        ByteArray all;
        for (const std::string_view key : keys) all.add(key);
        sql.text(" FROM " + tables_.dedup + " WHERE key_hash = ANY(");
        sql.byte_array(all.finish()).text(")");
        return sql.finish();
    }
    sql.text(from_keys(tables_));
    add_key_list(sql, keys);
    // Under REPEATABLE READ a plain read would not see what others have committed.
    sql.text(") LOCK IN SHARE MODE");
    return sql.finish();
}

sql::Statement Claims::taking(const Unique& one) const {
    const std::string clock = clock_of(tables_.dialect);
    const std::string now = microseconds_of(tables_.dialect, clock);
    const std::int64_t keep = std::chrono::microseconds(options_.retention).count();
    StatementBuilder sql(tables_.dialect);
    sql.text("UPDATE " + tables_.dedup + " SET status = 1, retry_count = ");
    sql.text(one.claim.retry ? "retry_count + 1" : "0, created_at = " + clock);
    sql.text(", error_message = NULL, updated_at = " + clock + ", expire_at = ");
    if (tables_.dialect == Dialect::postgres)
        sql.text(clock + " + ").number(keep).text(" * interval '1 microsecond'");
    else
        sql.text("DATE_ADD(UTC_TIMESTAMP(6), INTERVAL ").number(keep).text(" MICROSECOND)");
    sql.text(", lease_until = NULL, token = GREATEST(token + 1, " + now + "), nonce = ");
    sql.bytes(nonce_).text(", fingerprint = ");
    if (one.message->fingerprint)
        sql.bytes(one.message->fingerprint->view());
    else
        sql.text(one.claim.retry ? "fingerprint" : "NULL");
    sql.text(", version = version + 1, record = NULL WHERE key_hash = ").bytes(one.key.view());
    sql.text(" AND version = ").number(one.version);
    return sql.finish();
}

sql::Statement unclaiming(const Tables& tables, std::span<const base::Digest> keys, ClaimId id) {
    StatementBuilder sql(tables.dialect);
    sql.text("DELETE FROM " + tables.dedup + " WHERE key_hash IN (");
    add_key_list(sql, views(keys));
    sql.text(") AND version = 1 AND status = 1 AND " + under_id(tables.dialect))
        .bytes(bytes_of(id));
    return sql.finish();
}

sql::Statement reading_claimed(const Tables& tables, std::span<const base::Digest> keys,
                               ClaimId id) {
    StatementBuilder sql(tables.dialect);
    sql.text("SELECT key_hash").text(from_keys(tables));
    add_key_list(sql, views(keys));
    sql.text(") AND status = 1 AND " + under_id(tables.dialect)).bytes(bytes_of(id));
    return sql.finish();
}

}  // namespace semel::inbox
