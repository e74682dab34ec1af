// The command line: one file per subcommand. Data goes to stdout, everything else to stderr.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/result.hpp"
#include "brokers/publisher.hpp"
#include "brokers/source.hpp"
#include "cli/reset_target.hpp"
#include "config/config.hpp"
#include "core/store.hpp"
#include "inbox/inbox.hpp"
#include "inbox/names.hpp"
#include "inbox/old_table.hpp"

namespace semel::cli {

/// Exit codes, the same for every subcommand (docs/reference/cli.md).
enum ExitCode : int {
    exit_ok = 0,
    exit_failed = 1,     ///< It was tried and did not work; doctor: something is wrong.
    exit_usage = 2,      ///< The command line or the configuration is wrong; nothing was tried.
    exit_not_found = 3,  ///< record: there is no such record.
};

/// An open store and what opening it found, in sentences that somebody should read.
struct OpenedStore {
    std::unique_ptr<core::Store> store;
    std::string server;  ///< Name and version of what keeps the records; empty where that is this process.
    bool pooled = false;  ///< A pooler that hands connections out per transaction is in the path.
    std::vector<std::string> notices;
    std::vector<std::string> wrong;  ///< The same, graver: what would lose records or keeps the store from taking any.
    std::int64_t wall_ahead_us = 0;  ///< The wall clock against the store's; 0 where a store has no clock of its own.
    bool clock_kept = false;         ///< The wall clock was not believed.
};

/// The inbox's tables (src/inbox) in the database of the configured store, which is one that has tables.
/// Each connects for itself; errors are those of src/inbox, or say why there is no connection.
struct InboxLeaves {
    std::function<base::Result<std::vector<std::string>>(const config::Config&, const inbox::Place&)> plan;
    std::function<base::Result<void>(const config::Config&, const inbox::Place&)> apply;
    std::function<base::Result<inbox::OldTablePlan>(const config::Config&, const inbox::Place&, const inbox::OldTable&)> plan_old_table;
    std::function<base::Result<std::int64_t>(const config::Config&, const inbox::Place&, const inbox::OldTable&, const inbox::Progress&)>
        migrate_old_table;
};

/// How a consumer's source presents itself to its broker.
struct SourceNames {
    std::string client_id;
    std::string commit_metadata;  ///< Kafka: committed beside every position.
    bool exclusive = false;       ///< RabbitMQ: nobody else may subscribe.
};

/// What a broker said of a consumer's topics, queue and targets.
struct BrokerFindings {
    std::vector<std::string> missing;  ///< Of what it reads: topics or its queue, each named in words.
    std::string letters_missing;       ///< Where its letters go, in words, if there is no such target; else empty.
    std::string results_missing;       ///< The same of the answers of its handler.
    std::vector<std::string> copies_missing;  ///< Where copies wait (retry.wait: broker), in words, as far as there is no such place.
    std::vector<std::string> copies_wrong;    ///< Why what is there would lose copies: sentences.
    std::vector<std::string> copies_left;     ///< Topics of copies that hold some, and of no configured delay: nobody reads them.
    /// How long the broker keeps its messages, the longest of its topics; nullopt: see `about_retention`.
    std::optional<std::chrono::milliseconds> retention;
    std::string about_retention;  ///< Why there is no such time, for people.
};

/// A position of a stopped consumer, and where it goes.
struct PositionToSet {
    std::string topic;
    std::int32_t partition = 0;
    std::int64_t committed = -1;  ///< -1: nothing.
    std::int64_t to = 0, end = 0;
};
struct ConsumerResetOptions {
    std::string config;
    std::string name;
    std::string to;      ///< As it was written.
    ResetTarget target;  ///< What it means.
    std::string topic;  ///< This one alone, of the consumer's or of its copies. Empty: all of the consumer's.
    std::optional<std::int32_t> partition;
    bool yes = false;
};

/// The brokers and databases of consumers.
struct ConsumerLeaves {
    /// Whether the source can be as the configuration wants it, as far as that is known without asking anybody.
    std::function<base::Result<void>(const config::ConsumerConfig&)> check;
    std::function<base::Result<std::unique_ptr<brokers::Source>>(const config::ConsumerConfig&, const SourceNames&)> make_source;
    std::function<base::Result<std::unique_ptr<brokers::Publisher>>(const config::ConsumerConfig&)> make_publisher;
    /// Asks the broker. Blocks, some seconds at most. `make`: the target of letters is made where `create` says so and it is
    /// missing. Errors: invalid_argument (it can never be), else the broker cannot be asked.
    std::function<base::Result<BrokerFindings>(const config::ConsumerConfig&, bool make)> look;
    /// Where the positions of a Kafka consumer would go; and commits them. Errors: invalid_argument (somebody is in the group,
    /// what is asked for cannot be), else the brokers cannot be asked.
    std::function<base::Result<std::vector<PositionToSet>>(const config::ConsumerConfig&, const ConsumerResetOptions&)> plan_reset;
    std::function<base::Result<void>(const config::ConsumerConfig&, const std::vector<PositionToSet>&)> commit_reset;
    /// Connections to a consumer's database, from any thread.
    std::function<inbox::Connect(const config::DatabaseConfig&)> connect;
};

/// What only the program itself knows: the leaves it was linked with.
struct Leaves {
    /// Opens the configured store, or makes it. Errors name the path and what to do.
    std::function<base::Result<OpenedStore>(const config::Config&, bool accept_clock)> open_store;
    /// What opening the configured store, of those that keep tables, would change: SQL statements in their order. Changes nothing.
    std::function<base::Result<std::vector<std::string>>(const config::Config&)> plan_store;
    InboxLeaves inbox;
    ConsumerLeaves consumers;
    /// `semel mock-upstream` with the rest of its command line. An exit code.
    std::function<int(const std::vector<std::string>&)> mock_upstream;
    std::string mock_upstream_help;
};

/// Reads the command line and runs the subcommand. Call once, before any thread exists. An exit code.
int run(int argc, char** argv, const Leaves& leaves);

// ---------------------------------------------------------------- subcommands, as arguments.cpp calls them

struct ServeOptions {
    std::string config;
    bool check = false;
    bool accept_clock = false;
    bool json = false;
};
int serve(const ServeOptions& options, const Leaves& leaves);

struct RecordOptions {
    std::string config;  ///< Names the admin address, and the directory where no server runs. May be empty.
    std::string admin;   ///< host:port instead of the config's. May be empty.
    bool json = false;

    std::string intent;  ///< Semel-Intent; or, if empty, the name below.
    std::string operation = "/v1/chat/completions";
    std::string client;
    std::string credential_env;
    std::string id;
    std::string user;
    std::string session;

    bool body = false;  ///< get

    std::string status;  ///< list
    unsigned limit = 100;
    std::string cursor;

    std::string decision;  ///< resolve
    std::string file;
    std::string content_type;
    std::string reason;
    std::uint64_t token = 0;  ///< 0: the one the record has now.
    bool dry_run = false;

    bool yes = false;      ///< erase; the tenant is `client`, `credential_env`, `consumer`, or that of `intent`
    std::string consumer;  ///< A name of `consumers:`.
};
int record_get(const RecordOptions& options, const Leaves& leaves);
int record_list(const RecordOptions& options, const Leaves& leaves);
int record_resolve(const RecordOptions& options, const Leaves& leaves);
int record_erase(const RecordOptions& options, const Leaves& leaves);

/// Opens the configured store. With `migrate: false` tables that are missing or old are an error that names the command for them.
base::Result<OpenedStore> open_store(const config::Config& config, const Leaves& leaves, bool accept_clock);
/// Opens the store for a command that only looks: tables that are missing or old are an error, and are not changed.
base::Result<OpenedStore> open_as_it_is(const config::Config& config, const Leaves& leaves);

struct MigrateOptions {
    std::string config;
    bool dry_run = false;
    bool json = false;

    bool inbox_tables = false;  ///< The inbox's tables instead of the store's.
    std::string consumer;       ///< Not empty: those in the database of this consumer.
    std::string old_table;      ///< Not empty: this table of the older shape is brought to that of the inbox's.
    inbox::Place place;         ///< Of the inbox's tables, in both cases.
    inbox::OldTable old;        ///< All but its `table`.
};
int store_migrate(const MigrateOptions& options, const Leaves& leaves);

struct ConsumerCommandOptions {
    std::string config;  ///< Names the admin address. May be empty.
    std::string admin;   ///< host:port instead of the config's. May be empty.
    bool json = false;
    std::string name;    ///< Empty: all (list, lag).
    std::string reason;  ///< pause, drain
};
int consumer_list(const ConsumerCommandOptions& options);
int consumer_lag(const ConsumerCommandOptions& options);
/// `command`: pause, resume, drain.
int consumer_tell(const ConsumerCommandOptions& options, const std::string& command);

int consumer_reset(const ConsumerResetOptions& options, const Leaves& leaves);

struct DoctorOptions {
    std::string config;
    bool json = false;
};
int doctor(const DoctorOptions& options, const Leaves& leaves);

}  // namespace semel::cli
