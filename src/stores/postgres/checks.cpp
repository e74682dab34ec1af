#include "stores/postgres/checks.hpp"

#include <cstdlib>
#include <utility>

#include "base/time.hpp"
#include "stores/postgres/session.hpp"

namespace semel::stores::postgres {

using sql::Trouble;

namespace {

/// Leases are judged by the server's clock alone: a difference only makes logs and listings hard to
/// compare.
constexpr std::int64_t clock_apart_unremarkable_us = 5'000'000;

constexpr const char* facts_question =
    "SELECT current_setting('server_version'), current_setting('fsync') = 'on', "
    "current_setting('full_page_writes') = 'on', current_setting('synchronous_commit'), "
    "current_setting('synchronous_standby_names'), "
    // Who may not see the rest sees the process of each.
    "count(*) FILTER (WHERE state = 'streaming' OR state IS NULL), "
    "count(*) FILTER (WHERE sync_state IN ('sync', 'quorum')), "
    "count(*) FILTER (WHERE state IS NULL) = 0, "
    "(extract(epoch FROM now()) * 1000000)::bigint FROM pg_catalog.pg_stat_replication";

base::Error error_of(const Connection& connection, const Failed& failed) {
    base::Error error = failed.problem.error;
    error.detail = "PostgreSQL at " + connection.name() + ": " + error.detail;
    return error;
}

/// What is true of the server, in words; what they promise.
class Judgement {
  public:
    Judgement(const Facts& facts, const std::string& name)
        : facts_(facts), server_("PostgreSQL at " + name + " ") {}

    Findings made() && {
        found_.version = facts_.version.substr(0, facts_.version.find(' '));
        words_ = "a claim or a recorded answer survives the death of a gateway; ";
        disk();
        standbys();
        clock();
        found_.durability.summary = words_;
        return std::move(found_);
    }

  private:
    void notice(const std::string& text) { found_.notices.push_back(server_ + text); }
    void wrong(const std::string& text) { found_.wrong.push_back(server_ + text); }

    void disk() {
        core::Durability& durability = found_.durability;
        const bool waits_for_disk = facts_.synchronous_commit != "off";
        durability.survives_process_crash = waits_for_disk;
        durability.survives_power_cut = waits_for_disk && facts_.fsync && facts_.full_page_writes;
        if (!facts_.fsync) {
            wrong(
                "does not sync its disk (fsync = off): a power cut or a crash of its machine "
                "damages the database, and "
                "intents are paid again when they are retried; set `fsync = on`");
        }
        if (!facts_.full_page_writes) {
            notice(
                "writes no full pages (full_page_writes = off): unless its file system never tears "
                "a page, a power cut "
                "damages the database; set `full_page_writes = on`");
        }
        if (!waits_for_disk) {
            wrong(
                "acknowledges before the disk has it (synchronous_commit = off): a crash of the "
                "server forgets about the "
                "last half second, and those intents are paid again when they are retried; set "
                "`synchronous_commit = "
                "on`, at least for this user (ALTER ROLE … SET synchronous_commit = on)");
            words_ += "a crash of PostgreSQL or a power cut takes about the last half second";
        } else if (!facts_.fsync) {
            words_ += "a kill of PostgreSQL takes none, a power cut may take all";
        } else if (!facts_.full_page_writes) {
            words_ += "a kill of PostgreSQL takes none, a power cut only if it tears a page";
        } else {
            words_ +=
                "it is on PostgreSQL's disk before it is acknowledged, so a kill of PostgreSQL and "
                "a power cut take "
                "none";
        }
    }

    void standbys() {
        core::Durability& durability = found_.durability;
        const bool named = !facts_.synchronous_standby_names.empty();
        const bool waits =
            named && facts_.synchronous_commit != "local" && facts_.synchronous_commit != "off";
        const std::string count =
            std::to_string(facts_.standbys) + (facts_.standbys == 1 ? " standby" : " standbys");
        durability.survives_failover = waits || facts_.standbys == 0;
        if (named && !waits && facts_.synchronous_commit == "local") {
            wrong(
                "has synchronous standbys, and this user does not wait for them "
                "(synchronous_commit = local): a failover "
                "may forget claims and answers, and those intents may be paid again; set "
                "`synchronous_commit = on` for "
                "this user");
        }
        if (waits && facts_.standbys_told_apart && facts_.synchronous_standbys == 0) {
            wrong(
                "waits for a synchronous standby that is not there (synchronous_standby_names = " +
                facts_.synchronous_standby_names +
                "): nothing can be claimed until it is back, or the setting is changed");
        }
        if (!named && facts_.standbys > 0) {
            wrong("has " + count +
                  " and acknowledges what they do not have yet: a failover may forget the last "
                  "claims and answers, and "
                  "those intents may be paid again; set synchronous_standby_names");
        }
        if (waits && facts_.standbys_told_apart && facts_.synchronous_standbys > 0 &&
            facts_.standbys > facts_.synchronous_standbys) {
            notice("waits for " + std::to_string(facts_.synchronous_standbys) + " of its " + count +
                   ": a failover to one of the others may forget the last claims and answers; "
                   "promote synchronous ones only");
        }
        if (facts_.standbys == 0 && !waits) {
            words_ += "; there is no standby to fail over to";
        } else if (waits) {
            words_ += "; a synchronous standby has it before it is acknowledged (" +
                      std::string(facts_.synchronous_commit == "remote_write" ? "in memory"
                                                                              : "on its disk") +
                      "), so a failover to one takes none";
        } else {
            words_ += "; a failover may take those that the standby did not have yet";
        }
    }

    void clock() {
        const std::int64_t ahead = facts_.clock_ahead_us;
        if (std::abs(ahead) <= clock_apart_unremarkable_us) return;
        notice("has a clock that is " + std::to_string(std::abs(ahead) / 1'000'000) + " s " +
               (ahead > 0 ? "ahead of" : "behind") +
               " this machine's: leases and retention go by the server's alone, but times in logs "
               "and records will not "
               "match; synchronise both (NTP)");
    }

    const Facts& facts_;
    const std::string server_;
    std::string words_;
    Findings found_;
};

base::Error trial_error(const Connection& connection, const Statements& statements,
                        const Failed& failed) {
    const std::string server = "PostgreSQL at " + connection.name() + " ";
    const std::string& schema = statements.schema();
    const std::string& state = failed.sqlstate;
    const auto refusal = [](std::string detail) {
        return base::Error{.code = base::ErrorCode::invalid_argument, .detail = std::move(detail)};
    };
    if (state == "42501") {
        return refusal(server + "does not let the user " + connection.user() +
                       " use the tables: GRANT USAGE ON SCHEMA " + schema + " TO " +
                       connection.user() +
                       "; GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA " + schema +
                       " TO " + connection.user());
    }
    if (state == "25006") {
        return refusal(server + "is set read-only for the user " + connection.user() +
                       " (default_transaction_read_only = on): ALTER ROLE " + connection.user() +
                       " SET default_transaction_read_only = off, or name another server");
    }
    if (state.starts_with("42") || state.starts_with("22") || state.starts_with("23")) {
        return refusal(server + "has tables in the schema " + schema +
                       " of another shape than this program makes (" + failed.problem.error.detail +
                       "): restore them, or name another schema in store.postgres.schema");
    }
    return error_of(connection, failed);
}

}  // namespace

Findings judge(const Facts& facts, const std::string& name) {
    return Judgement(facts, name).made();
}

base::Result<void> check_version(const Connection& connection) {
    if (connection.version() >= server_version_min) return {};
    return base::Error{.code = base::ErrorCode::store_version,
                       .detail = "PostgreSQL at " + connection.name() + " is version " +
                                 std::to_string(connection.version() / 10'000) +
                                 ", and 13 or newer is needed: upgrade it, or name another server"};
}

base::Result<Findings> check_server(Connection& connection, const Statements& statements,
                                    std::chrono::milliseconds timeout) {
    const std::string question = facts_question;
    auto answer =
        connection.plain(std::span(&question, 1), std::chrono::steady_clock::now() + timeout);
    if (const auto* failed = std::get_if<Failed>(&answer)) return error_of(connection, *failed);
    const std::int64_t here = base::system_clocks().wall_us();
    const Rows& rows = std::get<0>(answer).front();
    const Facts facts{.version = std::string(rows.bytes(0, 0)),
                      .fsync = rows.flag(0, 1),
                      .full_page_writes = rows.flag(0, 2),
                      .synchronous_commit = std::string(rows.bytes(0, 3)),
                      .synchronous_standby_names = std::string(rows.bytes(0, 4)),
                      .standbys = rows.number(0, 5),
                      .synchronous_standbys = rows.number(0, 6),
                      .standbys_told_apart = rows.flag(0, 7),
                      .clock_ahead_us = rows.number(0, 8) - here};
    Findings found = judge(facts, connection.name());
    const std::vector<Step> trial = trial_of(statements);
    if (const auto failed = connection.try_out(trial, sql::Ask{.deadline = timeout})) {
        if (failed->problem.trouble != Trouble::full)
            return trial_error(connection, statements, *failed);
        found.wrong.push_back("PostgreSQL at " + connection.name() +
                              " has a full disk: nothing can be claimed until there is room on it, "
                              "and recorded answers "
                              "are still replayed");
    }
    return found;
}

}  // namespace semel::stores::postgres
