// semel store migrate: the tables of a database that keeps records, and those of the inbox in it,
// brought to the version of this binary.
#include <boost/json.hpp>
#include <chrono>
#include <cstdio>

#include "cli/cli.hpp"
#include "cli/guarantees.hpp"

namespace semel::cli {

namespace {

namespace json = boost::json;

/// `config` with the tables made and changed by the store when it is opened, or left alone.
config::Config with_migrations(config::Config config, bool allowed) {
    config.store.postgres.migrate = allowed;
    config.store.mysql.migrate = allowed;
    return config;
}

int failed(const base::Error& error) {
    std::fprintf(stderr, "semel store migrate: %s\n", error.detail.c_str());
    return exit_failed;
}

json::array listed(const std::vector<std::string>& texts) {
    json::array list;
    for (const std::string& text : texts) list.emplace_back(text);
    return list;
}

/// `more`: members of the JSON beside the statements.
void print(const MigrateOptions& options, const std::string& store,
           const std::vector<std::string>& statements, const json::object& more = {}) {
    if (options.json) {
        json::object all{
            {"store", store}, {"dry_run", options.dry_run}, {"statements", listed(statements)}};
        all.insert(more.begin(), more.end());
        std::printf("%s\n", json::serialize(all).c_str());
    } else {
        for (const std::string& statement : statements) {
            std::printf("%s%s\n", statement.c_str(), statement.ends_with(';') ? "" : ";");
        }
    }
    std::fflush(stdout);  // before the first of them runs
}

std::string counted(std::size_t statements) {
    return std::to_string(statements) + (statements == 1 ? " statement" : " statements");
}

/// Ends what was only shown.
int nothing_changed(std::size_t statements, const std::string& store) {
    std::fprintf(stderr, "semel store migrate: %s to run on %s; nothing was changed (--dry-run)\n",
                 counted(statements).c_str(), store.c_str());
    return exit_ok;
}

// ---------------------------------------------------------------- the inbox's tables

int inbox_migrate(const MigrateOptions& options, const config::Config& config,
                  const std::string& store, const InboxLeaves& leaves) {
    const auto plan = leaves.plan(config, options.place);
    if (!plan) return failed(plan.error());
    print(options, store, *plan);
    if (plan->empty()) {
        std::fprintf(stderr,
                     "semel store migrate: the inbox's tables in %s are those of semel %s; there is "
                     "nothing to do\n",
                     store.c_str(), SEMEL_VERSION);
        return exit_ok;
    }
    if (options.dry_run) return nothing_changed(plan->size(), store);
    if (auto applied = leaves.apply(config, options.place); !applied)
        return failed(applied.error());
    std::fprintf(stderr,
                 "semel store migrate: done; the inbox's tables in %s are those of semel %s now\n",
                 store.c_str(), SEMEL_VERSION);
    return exit_ok;
}

/// What the rows of the old table become.
void say_what_becomes(const inbox::OldTable& old, const std::string& table,
                      const inbox::OldTablePlan& plan) {
    // None are counted where an interrupted migration is finished.
    if (plan.rows > 0) {
        std::fprintf(stderr,
                     "semel store migrate: %lld rows of %s go to %s, scope '%s', source '%s': %lld "
                     "of status 1 become done, %lld of status 2 failed and due again, %lld of "
                     "status 0 unknown\n",
                     static_cast<long long>(plan.rows), old.table.c_str(), table.c_str(),
                     inbox::readable(old.scope).c_str(), inbox::readable(old.source).c_str(),
                     static_cast<long long>(plan.done), static_cast<long long>(plan.failed),
                     static_cast<long long>(plan.undecided));
    }
    for (const std::string& notice : plan.notices)
        std::fprintf(stderr, "semel store migrate: %s\n", notice.c_str());
}

/// Says the first step, and then one in a second.
inbox::Progress progress_on_stderr() {
    using Clock = std::chrono::steady_clock;
    return [next = Clock::now()](std::int64_t copied, std::int64_t total) mutable {
        if (Clock::now() < next) return true;
        next = Clock::now() + std::chrono::seconds{1};
        std::fprintf(stderr, "semel store migrate: copied %lld of %lld rows\n",
                     static_cast<long long>(copied), static_cast<long long>(total));
        return true;
    };
}

int old_table_migrate(const MigrateOptions& options, const config::Config& config,
                      const std::string& store, const InboxLeaves& leaves) {
    inbox::OldTable old = options.old;
    old.table = options.old_table;
    const auto plan = leaves.plan_old_table(config, options.place, old);
    if (!plan) return failed(plan.error());
    print(options, store, plan->statements,
          {{"rows", plan->rows},
           {"done", plan->done},
           {"failed", plan->failed},
           {"undecided", plan->undecided},
           {"notices", listed(plan->notices)}});
    const std::string& table = options.place.dedup_table;
    say_what_becomes(old, table, *plan);
    if (options.dry_run) return nothing_changed(plan->statements.size(), store);
    const auto copied =
        leaves.migrate_old_table(config, options.place, old, progress_on_stderr());
    if (!copied) return failed(copied.error());
    std::fprintf(stderr,
                 "semel store migrate: done, %lld rows copied; %s has the new shape, and the old "
                 "table is called %s_before_semel: drop it once it is of no more use\n",
                 static_cast<long long>(*copied), table.c_str(), old.table.c_str());
    return exit_ok;
}

base::Result<config::StoreConfig> own_store_of(const std::string& name,
                                              const config::Config& config) {
    for (const config::ConsumerConfig& one : config.consumers) {
        if (one.name == name && one.store) return *one.store;
    }
    return base::Error{.detail = "there is no consumer " + name +
                                 " with a store of its own; for the tables in a consumer's "
                                 "database say --inbox too"};
}

/// The tables in a consumer's own database.
int consumer_migrate(MigrateOptions options, config::Config config, const Leaves& leaves) {
    const config::ConsumerConfig* found = nullptr;
    for (const config::ConsumerConfig& one : config.consumers) {
        if (one.name == options.consumer) found = &one;
    }
    if (found == nullptr || !found->database) {
        std::fprintf(stderr, "semel store migrate: %s\n",
                     found == nullptr
                         ? ("there is no consumer " + options.consumer + " in " + options.config).c_str()
                         : ("consumer " + options.consumer + " has no database").c_str());
        return exit_usage;
    }
    const config::DatabaseConfig& database = *found->database;
    if (options.place.schema.empty()) options.place.schema = database.schema;
    const std::string shown = database.shown_url;
    if (database.kind == config::DatabaseKind::postgres) {
        config.store.kind = config::StoreKind::postgres;
        config.store.postgres.url = database.url;
    } else {
        config.store.kind = config::StoreKind::mysql;
        config.store.mysql.url = database.url;
    }
    return inbox_migrate(options, config, shown, leaves.inbox);
}

}  // namespace

base::Result<OpenedStore> open_store(const config::Config& config, const Leaves& leaves,
                                     bool accept_clock) {
    if (config.store.has_tables() && !config.store.migrates()) {
        const auto plan = leaves.plan_store(config);
        if (!plan) return plan.error();
        if (!plan->empty()) {
            return base::Error{
                .code = base::ErrorCode::store_version,
                .detail = "the tables of " + store_in_words(config.store) +
                          " are missing or of an older version: run `semel store migrate "
                          "--config FILE` with this configuration"};
        }
    }
    return leaves.open_store(config, accept_clock);
}

base::Result<OpenedStore> open_as_it_is(const config::Config& config, const Leaves& leaves) {
    return open_store(with_migrations(config, false), leaves, false);
}

int store_migrate(const MigrateOptions& options, const Leaves& leaves) {
    auto config = config::load(options.config);
    if (!config) {
        std::fprintf(stderr, "semel store migrate: %s\n", config.error().detail.c_str());
        return exit_usage;
    }
    if (!options.consumer.empty() && !options.inbox_tables) {
        const auto own = own_store_of(options.consumer, *config);
        if (!own) {
            std::fprintf(stderr, "semel store migrate: %s\n", own.error().detail.c_str());
            return exit_usage;
        }
        config->store = *own;
    }
    const std::string store = store_in_words(config->store);
    const bool old_table = !options.old_table.empty();
    const inbox::Place standard;
    const bool places = options.place.schema != standard.schema ||
                        options.place.dedup_table != standard.dedup_table;
    if (!options.inbox_tables && !old_table && places) {
        std::fprintf(stderr,
                     "semel store migrate: --dedup-table and --schema are for the inbox's tables: "
                     "say --inbox or --old-dedup-table too\n");
        return exit_usage;
    }
    if (options.inbox_tables && !options.consumer.empty())
        return consumer_migrate(options, *config, leaves);
    if ((options.inbox_tables || old_table) && !config->store.has_tables()) {
        std::fprintf(stderr,
                     "semel store migrate: the inbox's tables are in the database of "
                     "store.postgres or store.mysql, and %s is neither: name a configuration "
                     "file with one\n",
                     store.c_str());
        return exit_usage;
    }
    if (options.inbox_tables) return inbox_migrate(options, *config, store, leaves.inbox);
    if (old_table) return old_table_migrate(options, *config, store, leaves.inbox);
    if (!config->store.has_tables()) {
        print(options, store, {});
        std::fprintf(stderr,
                     "semel store migrate: %s keeps no tables, so there is nothing to migrate; "
                     "only store.postgres and "
                     "store.mysql do\n",
                     store.c_str());
        return exit_ok;
    }
    const auto plan = leaves.plan_store(*config);
    if (!plan) return failed(plan.error());
    print(options, store, *plan);
    if (plan->empty()) {
        std::fprintf(
            stderr,
            "semel store migrate: the tables of %s are those of semel %s; there is nothing to do\n",
            store.c_str(), SEMEL_VERSION);
        return exit_ok;
    }
    if (options.dry_run) return nothing_changed(plan->size(), store);
    auto opened = leaves.open_store(with_migrations(*config, true), false);
    if (!opened) return failed(opened.error());
    opened->store->stop();
    std::fprintf(stderr, "semel store migrate: done; the tables of %s are those of semel %s now\n",
                 store.c_str(), SEMEL_VERSION);
    return exit_ok;
}

}  // namespace semel::cli
