#include "stores/mysql/checks.hpp"

#include <mysqld_error.h>

#include <charconv>
#include <cstdlib>

#include "base/hash.hpp"
#include "base/time.hpp"
#include "stores/mysql/statements.hpp"

namespace semel::stores::mysql {
namespace {

using sql::Problem;
using sql::Trouble;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// Leases are judged by the server's clock alone: a difference only makes logs and listings hard to
/// compare.
constexpr std::int64_t kClockApartUnremarkableUs = 5'000'000;

constexpr std::string_view kVariables =
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN "
    "('innodb_flush_log_at_trx_commit','innodb_doublewrite','log_bin','sync_binlog',"
    "'binlog_format','rpl_semi_sync_master_enabled','rpl_semi_sync_source_enabled','wsrep_on','"
    "transaction_isolation',"
    "'innodb_read_only','max_connections')";
constexpr std::string_view kStatus =
    "SHOW GLOBAL STATUS WHERE Variable_name IN "
    "('Rpl_semi_sync_master_clients','Rpl_semi_sync_source_clients',"
    "'wsrep_cluster_size','wsrep_ready','Slaves_connected')";

base::Error refused(std::string detail) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(detail)};
}

std::string lower(std::string text) {
    for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
    return text;
}

/// What is true of the server, in words; what they promise.
class Judgement {
  public:
    Judgement(const Facts& facts, const std::string& name)
        : facts_(facts),
          server_((facts.server.mariadb ? "MariaDB at " : "MySQL at ") + name + " ") {}

    base::Result<Findings> made() && {
        if (is_on("log_bin") && value("binlog_format") == "STATEMENT")
            return refused(server_ +
                           "writes its binary log by statements (binlog_format = STATEMENT), which "
                           "the isolation READ COMMITTED "
                           "does not work with: set binlog_format = ROW");
        if (facts_.server.max_packet < packet_bytes_min)
            return refused(
                server_ + "takes no statement longer than " +
                std::to_string(facts_.server.max_packet) +
                " bytes (max_allowed_packet), too little for an answer of 256 KiB: set it to 64M");
        found_.version = facts_.server.text;
        words_ = "a claim or a recorded answer survives the death of a gateway; ";
        disk();
        replicas();
        packet();
        clock();
        found_.durability.summary = words_;
        return std::move(found_);
    }

  private:
    void notice(const std::string& text) { found_.notices.push_back(server_ + text); }
    void wrong(const std::string& text) { found_.wrong.push_back(server_ + text); }
    [[nodiscard]] std::string value(std::string_view name) const {
        const auto it = facts_.variables.find(name);
        return it == facts_.variables.end() ? std::string{} : it->second;
    }
    [[nodiscard]] bool is_on(std::string_view name) const {
        return value(name) == "ON" || value(name) == "1";
    }
    [[nodiscard]] int count(std::string_view name) const {
        const std::string text = value(name);
        int number = 0;
        std::from_chars(text.data(), text.data() + text.size(), number);
        return number;
    }

    void disk() {
        core::Durability& durability = found_.durability;
        const std::string flush = value("innodb_flush_log_at_trx_commit");
        const bool flushed = flush == "1" || flush == "3";
        const bool written = flushed || flush == "2";
        const bool whole_pages =
            value("innodb_doublewrite") != "OFF" && value("innodb_doublewrite") != "0";
        const bool log_synced = !is_on("log_bin") || value("sync_binlog") == "1";
        durability.survives_process_crash = written;
        durability.survives_power_cut = flushed && whole_pages && log_synced;
        const std::string paid_again =
            ", and those intents are paid again when they are retried; set ";
        if (!written) {
            wrong("acknowledges before its log is written (innodb_flush_log_at_trx_commit = " +
                  flush + "): a crash of the server forgets about the last second" + paid_again +
                  "innodb_flush_log_at_trx_commit = 1");
        } else if (!flushed) {
            wrong(
                "acknowledges before its disk is synced (innodb_flush_log_at_trx_commit = 2): a "
                "power cut forgets about the last "
                "second" +
                paid_again + "innodb_flush_log_at_trx_commit = 1");
        }
        if (!log_synced)
            wrong("writes a binary log that it does not sync at each commit (sync_binlog = " +
                  value("sync_binlog") + "): after a power cut, what its log lacks is rolled back" +
                  paid_again + "sync_binlog = 1");
        if (!whole_pages)
            notice(
                "writes pages without a second copy (innodb_doublewrite = OFF): unless its file "
                "system never tears a page, a "
                "power cut damages the database; set innodb_doublewrite = ON");
        if (!written) {
            words_ += "a crash of the database server or a power cut takes about the last second";
        } else if (!flushed || !log_synced) {
            words_ += "a kill of the database server takes none, a power cut about the last second";
        } else if (!whole_pages) {
            words_ +=
                "a kill of the database server takes none, a power cut only if it tears a page";
        } else {
            words_ +=
                "it is on the database server's disk before it is acknowledged, so a kill of the "
                "server and a power cut take none";
        }
    }

    void replicas() {
        core::Durability& durability = found_.durability;
        const bool semi_sync =
            is_on("rpl_semi_sync_master_enabled") || is_on("rpl_semi_sync_source_enabled");
        const int waited_for =
            std::max(count("rpl_semi_sync_master_clients"), count("rpl_semi_sync_source_clients"));
        const int nodes = count("wsrep_cluster_size");
        const int replicas = count("slaves_connected");
        if (facts_.server.galera) {
            durability.survives_failover = nodes > 1;
            if (value("wsrep_ready") == "OFF")
                wrong(
                    "is a node of a Galera cluster that is not in the majority: nothing can be "
                    "claimed here until it is");
            notice("is a node of a Galera cluster of " + std::to_string(nodes) +
                   ": correct, but two gateways that change one key on different nodes at once "
                   "both pay for it (the later is "
                   "rolled back and asked again); send all to one node if you can");
            words_ += nodes > 1 ? "the other nodes of the Galera cluster have it before it is "
                                  "acknowledged, so a failover takes none"
                                : "; the Galera cluster has no other node to fail over to";
            return;
        }
        durability.survives_failover = semi_sync && waited_for > 0;
        if (!is_on("log_bin")) {
            // Without a binary log there is no replica.
            durability.survives_failover = true;
            words_ += "; there is no replica to fail over to";
        } else if (durability.survives_failover) {
            words_ +=
                "; a semi-synchronous replica has it before it is acknowledged, so a failover to "
                "that takes none";
            notice(
                "waits for a semi-synchronous replica, but only for a time (its time-out): if none "
                "answers by then, it goes on "
                "without, and a failover may forget claims and answers of that time");
        } else if (semi_sync) {
            wrong(
                "is set to wait for semi-synchronous replicas, and none is there: a failover may "
                "forget the last claims and "
                "answers, and those intents may be paid again; bring the replicas back");
            words_ += "; a failover may take those that no replica had yet";
        } else {
            const std::string who =
                replicas > 0
                    ? "has " + std::to_string(replicas) +
                          (replicas == 1 ? " replica" : " replicas") +
                          " and acknowledges what they do not have yet"
                    : std::string("writes a binary log, and acknowledges what no replica has yet");
            const std::string what = who +
                                     ": a failover may forget the last claims and answers, and "
                                     "those intents may be paid again; "
                                     "use semi-synchronous replication";
            if (replicas > 0) {
                wrong(what);
            } else {
                notice(what + ", if there are replicas");
            }
            words_ += "; a failover may take those that the replica did not have yet";
        }
    }

    void packet() {
        if (facts_.server.max_packet >= packet_bytes_wanted) return;
        notice("takes no statement longer than " + std::to_string(facts_.server.max_packet) +
               " bytes (max_allowed_packet): batches of large answers are refused as a whole and "
               "written one by one; set it to 64M");
    }

    void clock() {
        const std::int64_t ahead = facts_.clock_ahead_us;
        if (std::abs(ahead) <= kClockApartUnremarkableUs) return;
        notice("has a clock that is " + std::to_string(std::abs(ahead) / 1'000'000) + " s " +
               (ahead > 0 ? "ahead of" : "behind") +
               " this machine's: leases and retention go by the server's alone, but times in logs "
               "and records will not match; "
               "synchronise both (NTP)");
    }

    const Facts& facts_;
    const std::string server_;
    std::string words_;
    Findings found_;
};

// Every kind of statement on every table, on keys that nobody has. In the transaction that is
// rolled back.
std::string trial() {
    StoredKey key;
    const std::string random = base::random_bytes(key.bytes.size());
    std::copy(random.begin(), random.end(), reinterpret_cast<char*>(key.bytes.data()));
    const core::Append turn{
        .conversation = key, .request_id = "trial", .user_content = {}, .answer_content = {}};
    const StoreTime now{1};
    const sql::Fresh fresh{.key = key,
                           .nonce = {},
                           .lease = milliseconds{1},
                           .keep_ms = 1,
                           .not_after = now,
                           .head = "trial"};
    const sql::Completion completion{
        .key = key, .token = {1}, .nonce = {}, .done = {}, .body = {}, .append = {}};
    const sql::Place parked{.list = key, .place = 1};
    std::string sql = "START TRANSACTION;";
    for (const std::string& one : {insert_sql({&fresh, 1}, now, false),
                                   complete_sql(completion, now),
                                   remember_sql(0, "1"),
                                   append_sql(0, turn),
                                   put_chunk_sql(key, {.token = {1}, .n = 0, .bytes = {}}, now),
                                   claim_value_sql({.name = random, .value_if_absent = {}}),
                                   replace_value_sql({.name = random, .value = {}}),
                                   delete_expired_sql({&key, 1}, now),
                                   open_parking_sql(key, {}, {}),
                                   open_parking_sql(key, std::string(16, '\0'), {}),
                                   hold_fence_sql(key),
                                   park_sql({.list = key, .fence = {}, .place = 1, .bytes = {}}),
                                   unpark_sql({&parked, 1}),
                                   get_parked_sql(key, {}),
                                   delete_idle_sql({&key, 1}, now),
                                   delete_conversation_sql(key),
                                   chunk_owners_sql(random, 1),
                                   list_sql({}, {}, 1, now),
                                   expired_sql(1, now),
                                   list_sql({.dead_leases_only = true}, {}, 1, now),
                                   idle_sql(1, now),
                                   get_turns_sql(key, {})})
        sql += one + ";";
    return sql + "ROLLBACK";
}

base::Error trial_error(const Problem& problem, const Failure& failure, const std::string& server) {
    switch (failure.number) {
        case ER_TABLEACCESS_DENIED_ERROR:
        case ER_COLUMNACCESS_DENIED_ERROR:
        case ER_DBACCESS_DENIED_ERROR:
            return refused(server + "does not let this user use the tables (error " +
                           std::to_string(failure.number) +
                           "): GRANT SELECT, INSERT, UPDATE, DELETE ON the database TO the user");
        case ER_BAD_FIELD_ERROR:
        case ER_NO_SUCH_TABLE:
        case ER_KEY_DOES_NOT_EXISTS:
            return refused(server + "has tables of another shape than this program makes (error " +
                           std::to_string(failure.number) +
                           "): restore them, or name another database in the URL");
        default: {
            base::Error error = problem.error;
            error.detail = server + "refused a trial of the store's statements: " + error.detail;
            return error;
        }
    }
}

}  // namespace

base::Result<Findings> judge(const Facts& facts, const std::string& name) {
    return Judgement(facts, name).made();
}

base::Result<void> check_version(const Server& server, const std::string& name) {
    if (server.version >= (server.mariadb ? mariadb_version_min : mysql_version_min)) return {};
    return base::Error{.code = base::ErrorCode::store_version,
                       .detail = "the server at " + name + " is of version " + server.text +
                                 ": the store needs MariaDB 10.6 or MySQL 8.0, or newer"};
}

std::optional<sql::Problem> check_writable(Connection& connection, const std::string& name,
                                           SteadyTime deadline) {
    auto answer = connection.run("SELECT @@global.read_only, @@global.innodb_read_only", deadline);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const auto& rows = std::get<0>(answer)[0].rows;
    // A user with many rights could write all the same, and the replica would differ from its
    // primary.
    if (rows.size() == 1 && rows[0][0] == "0" && rows[0][1] == "0") return {};
    return not_writable("the server at " + name +
                        " is read-only, as a replica is (read_only = ON): name the primary in the "
                        "URL, or set read_only = OFF");
}

base::Result<Findings> check_server(Connection& connection, const std::string& name,
                                    milliseconds timeout) {
    const SteadyTime deadline = steady_clock::now() + timeout;
    const std::string server =
        (connection.server().mariadb ? "MariaDB at " : "MySQL at ") + name + " ";
    std::string question(kVariables);
    question.append(1, ';').append(kStatus).append(";SELECT ").append(clock_at_row_sql({}));
    auto answer = connection.run(question, deadline);
    if (auto* problem = std::get_if<Problem>(&answer)) {
        problem->error.detail = server + "did not say its settings: " + problem->error.detail;
        return std::move(problem->error);
    }
    Facts facts{.server = connection.server(), .variables = {}, .clock_ahead_us = 0};
    const auto& answers = std::get<0>(answer);
    for (std::size_t i = 0; i < 2; ++i) {
        for (const auto& row : answers[i].rows)
            facts.variables[lower(row[0].value_or(""))] = row[1].value_or("");
    }
    const std::string clock = answers[2].rows[0][0].value_or("");
    std::from_chars(clock.data(), clock.data() + clock.size(), facts.clock_ahead_us);
    facts.clock_ahead_us -= base::system_clocks().wall_us();
    auto findings = judge(facts, name);
    if (!findings) return findings.error();

    Failure failure;
    auto tried = connection.run(trial(), deadline, &failure);
    if (const auto* problem = std::get_if<Problem>(&tried)) {
        if (connection.usable()) (void)connection.run("ROLLBACK", steady_clock::now() + timeout);
        if (problem->trouble != Trouble::full) return trial_error(*problem, failure, server);
        findings->wrong.push_back(
            server + "has no room (" + problem->error.detail +
            "): recorded answers can be read, nothing can be claimed until there is some");
    }
    return findings;
}

}  // namespace semel::stores::mysql
