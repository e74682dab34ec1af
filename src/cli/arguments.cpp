// The only file that includes CLI11: it takes ten seconds to compile.
#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sys/stat.h>

#include "base/fault_point.hpp"
#include "base/hash.hpp"
#include "cli/cli.hpp"

namespace semel::cli {

namespace {

constexpr const char* about = R"(Semel puts an idempotency gateway in front of paid AI APIs: one user operation, one paid call.

Start here:
  semel mock-upstream --port 9999             a pretended AI API that counts paid calls
  semel serve --config examples/quickstart.yaml
  curl -i http://127.0.0.1:8787/v1/chat/completions -H 'Content-Type: application/json' \
       -H 'Idempotency-Key: click-1' \
       -d '{"model": "mock", "messages": [{"role": "user", "content": "hello"}]}'
Send the same line again: same answer, marked X-Idempotent-Replayed: true, and no second call.)";

constexpr const char* serve_examples = R"(
Examples:
  semel serve --config semel.yaml             runs until SIGTERM or SIGINT, which let running calls end first
  semel serve --config semel.yaml --check     reads and checks the file, touches nothing else
  semel serve --config semel.yaml --accept-clock
                                              moves the store's clock to the machine's once, after a wrong clock was put right
A second signal ends it at once: calls that run are then taken over at the next start.)";

constexpr const char* record_examples = R"(
Examples:
  semel record list --status unknown          what waits for a decision
  semel record get jT4…                       one record, by its response header Semel-Intent
  semel record get --client web --id click-1  the same by its client's name for it
  semel record get jT4… --body                the recorded answer's bytes
  semel record resolve jT4… --as failed --reason 'provider shows no call'
  semel record resolve jT4… --as completed --file answer.json
  semel record resolve jT4… --as rerun --dry-run
  semel record erase --tenant web --yes       makes all that is kept of a tenant's prompts and answers unreadable, for good
They ask the running server on its admin address. If none runs and --config names an embedded store, they open its directory.)";

constexpr const char* consumer_examples = R"(
Examples:
  semel consumer list                         how each consumer stands, and what somebody should look at
  semel consumer list orders                  one of them, with its partitions and counts
  semel consumer lag --config semel.yaml      how far each is behind
  semel consumer pause orders --reason 'the shop is being moved'
  semel consumer resume orders
  semel consumer drain orders                 hands its partitions over: to be done before it is taken down on purpose
  semel consumer reset orders --config semel.yaml --to earliest
                                              shows where its positions would go; --yes moves them
All but reset ask the running server on its admin address; reset wants that no process is in the group.)";

constexpr const char* store_examples = R"(
Examples:
  semel store migrate --config semel.yaml --dry-run     shows the statements, changes nothing
  semel store migrate --config semel.yaml     shows them, then runs them
  semel store migrate --config semel.yaml --inbox
                                              the same for the tables of the inbox, in the same database
  semel store migrate --config semel.yaml --old-dedup-table processed --scope shop/stock --source orders --dry-run
                                              shows how a table keyed by message_id becomes message_dedup, and what its rows become
For store.postgres and store.mysql. `semel serve` makes the store's own tables at its start, unless `migrate: false` is set
there, and those of the inbox for consumers alone, in their databases.)";

/// The longest duration, as in the configuration.
constexpr std::uint64_t ten_years_ms = 3650ULL * 24 * 3600 * 1000;

constexpr const char* doctor_examples = R"(
Examples:
  semel doctor --config semel.yaml            says in plain words what is guaranteed, and what is wrong
  semel doctor --config semel.yaml --json
It makes no paid call: of an upstream it tries the connection only.)";

void add_consumer_server(CLI::App* command, ConsumerCommandOptions& options) {
    command->add_option("--config", options.config, "the server's configuration file");
    command->add_option("--admin", options.admin, "admin address host:port, instead of --config (default 127.0.0.1:8788)");
    command->add_flag("--json", options.json, "the admin API's JSON");
}

/// `semel consumer …`; `code` is set by the one that runs.
void add_consumer(CLI::App& app, ConsumerCommandOptions& options, ConsumerResetOptions& reset_options, const Leaves& leaves, int& code) {
    CLI::App* consumer = app.add_subcommand("consumer", "Look at consumers, pause, resume, drain and reset them");
    consumer->require_subcommand(1);
    consumer->footer(consumer_examples);
    CLI::App* list = consumer->add_subcommand("list", "How they stand, or one of them");
    list->add_option("name", options.name, "one consumer, in full");
    add_consumer_server(list, options);
    list->callback([&options, &code] { code = consumer_list(options); });
    CLI::App* lag = consumer->add_subcommand("lag", "How far they are behind");
    lag->add_option("name", options.name, "one consumer");
    add_consumer_server(lag, options);
    lag->callback([&options, &code] { code = consumer_lag(options); });
    for (const auto& [name, words] :
         {std::pair("pause", "Start nothing any more; what runs ends, and it stays in its group"),
          std::pair("resume", "Go on after pause, or after it has stopped by itself"),
          std::pair("drain", "Start nothing any more, and leave the group when nothing runs: resume does not undo it")}) {
        CLI::App* command = consumer->add_subcommand(name, words);
        command->add_option("name", options.name, "the consumer")->required();
        command->add_option("--reason", options.reason, "shown by list and in the log");
        add_consumer_server(command, options);
        command->callback([&options, &code, which = std::string(name)] { code = consumer_tell(options, which); });
    }
    CLI::App* reset = consumer->add_subcommand("reset", "Move the positions of a Kafka consumer that does not run");
    reset->add_option("name", reset_options.name, "the consumer")->required();
    reset->add_option("--config", reset_options.config, "YAML file")->required();
    reset->add_option("--to", reset_options.to, "earliest, latest, an offset, a time (2026-11-30T08:00:00Z), or how long ago (-2h)")->required();
    reset->add_option("--topic", reset_options.topic,
                      "this topic alone: one of the consumer's, or one in which its copies wait (retry.wait: broker)");
    reset->add_option("--partition", reset_options.partition, "this partition alone")->check(CLI::NonNegativeNumber);
    reset->add_flag("--yes", reset_options.yes, "do it; without it the plan is shown and nothing is changed");
    reset->callback([&reset_options, &leaves, &code] { code = consumer_reset(reset_options, leaves); });
}

constexpr const char* footer = R"(
Exit codes: 0 done, 1 tried and failed, 2 wrong command line or configuration, 3 no such record or consumer.
SEMEL_FAULT_POINTS (kills the process at named points) is for tests only.)";

/// One intent in 64 begins with '-', which would be read as an option.
std::vector<std::string> with_intents_named(int argc, char** argv) {
    std::vector<std::string> arguments;
    for (int i = 1; i < argc; ++i) {
        std::string argument = argv[i];
        base::Digest intent;
        if (argument.starts_with('-') && base::digest_from_base64url(argument, intent)) {
            const bool named = !arguments.empty() && arguments.back() == "--tenant-of";
            argument = (named ? "--tenant-of=" : "--intent=") + argument;
            if (named) arguments.pop_back();
        }
        arguments.push_back(std::move(argument));
    }
    return arguments;
}

void add_name_of_record(CLI::App* command, RecordOptions& options) {
    command->add_option("intent,--intent", options.intent, "Semel-Intent of the record: 43 characters");
    command->add_option("--id", options.id, "Idempotency-Key or request id, instead of the intent");
    command->add_option("--operation", options.operation, "route of the intent; chat for /api/chat")->capture_default_str();
    command->add_option("--client", options.client, "name under clients: whose intent it is");
    command->add_option("--credential-env", options.credential_env,
                        "without clients: the environment variable that holds the caller's credential");
    command->add_option("--user", options.user, "X-User-Id (/api/chat)");
    command->add_option("--session", options.session, "sessionId (/api/chat)");
}

/// A duration as the configuration writes it: a whole number and a unit.
CLI::Option* add_duration(CLI::App* command, const char* name, std::chrono::milliseconds& duration, const char* standard,
                          const char* words) {
    const std::map<std::string, std::uint64_t> units{
        {"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3'600'000}, {"d", 86'400'000}};
    return command
        ->add_option_function<std::uint64_t>(
            name, [&duration](std::uint64_t ms) { duration = std::chrono::milliseconds(ms); }, words)
        ->transform(CLI::AsNumberWithUnit(units, CLI::AsNumberWithUnit::UNIT_REQUIRED).description(""))
        ->check(CLI::Range(std::uint64_t{1}, ten_years_ms).description(""))
        ->type_name("DURATION")
        ->default_str(standard);
}

/// The tables of the inbox, and the table of the older shape that becomes one of them.
void add_inbox(CLI::App* migrate, MigrateOptions& options) {
    CLI::Option* tables = migrate->add_flag("--inbox", options.inbox_tables,
                                            "the tables of the inbox (semel_assignments, semel_offsets, message_dedup) instead of the store's");
    CLI::Option* consumer = migrate->add_option("--consumer", options.consumer,
                                                "the store of this consumer; with --inbox: in the database of this consumer");
    CLI::Option* old = migrate->add_option("--old-dedup-table", options.old_table,
                                           "bring this table, keyed by message_id, to the shape of message_dedup");
    CLI::Option* scope = migrate->add_option("--scope", options.old.scope, "who consumes: its rows are known in this scope alone");
    old->excludes(tables)->excludes(consumer)->needs(scope);
    scope->needs(old);
    migrate->add_option("--source", options.old.source, "whose ids its rows are: a topic, a queue")->needs(old);
    add_duration(migrate, "--retention", options.old.retention, "7d", "how long its done ids stay known at least: longer than the latest redelivery")
        ->needs(old);
    constexpr int day_minutes = 24 * 60;
    migrate
        ->add_option_function<int>(
            "--utc-offset", [&options](int minutes) { options.old.utc_offset = std::chrono::minutes(minutes); },
            "minutes that its times are ahead of UTC, where its columns have no zone")
        ->check(CLI::Range(-day_minutes, day_minutes))
        ->default_str("0")
        ->needs(old);
    add_duration(migrate, "--watch", options.old.watch, "2s", "how long it is watched for somebody who writes, before anything is done")->needs(old);
    migrate->add_flag("--accept-writer", options.old.accept_writer, "copy although somebody writes to it")->needs(old);
    migrate->add_option("--dedup-table", options.place.dedup_table, "the inbox's table")->capture_default_str();
    migrate->add_option("--schema", options.place.schema,
                        "where the inbox's tables are: a schema (PostgreSQL) or a database (MySQL); the connection's own if not given");
}

void add_server(CLI::App* command, RecordOptions& options) {
    command->add_option("--config", options.config, "the server's configuration file");
    command->add_option("--admin", options.admin, "admin address host:port, instead of --config (default 127.0.0.1:8788)");
    command->add_flag("--json", options.json, "the admin API's JSON, unchanged");
}

}  // namespace

int run(int argc, char** argv, const Leaves& leaves) {
    (void)std::signal(SIGPIPE, SIG_IGN);
    if (const char* points = std::getenv("SEMEL_FAULT_POINTS"); points != nullptr) {
        std::string problem;
        if (!base::arm_fault_points(points, problem)) {
            std::fprintf(stderr, "semel: SEMEL_FAULT_POINTS: %s\n", problem.c_str());
            return exit_usage;
        }
    }

    CLI::App app{about, "semel"};
    app.set_version_flag("--version", std::string("semel ") + SEMEL_VERSION);
    app.footer(footer);
    app.require_subcommand(1);
    int code = exit_ok;

    ServeOptions serve_options;
    CLI::App* serve_command = app.add_subcommand("serve", "Run the gateway and the consumers");
    serve_command->footer(serve_examples);
    serve_command->add_option("--config", serve_options.config, "YAML file; docs/reference/config.md names every key")->required();
    serve_command->add_flag("--check", serve_options.check, "read and check the configuration, then exit");
    serve_command->add_flag("--accept-clock", serve_options.accept_clock, "move the store's clock to the machine's once");
    serve_command->add_flag("--json", serve_options.json, "with --check: the result as JSON");
    serve_command->callback([&] { code = serve(serve_options, leaves); });

    RecordOptions record_options;
    CLI::App* record = app.add_subcommand("record", "Look at records, and decide those whose outcome is unknown");
    record->require_subcommand(1);
    record->footer(record_examples);
    CLI::App* get = record->add_subcommand("get", "Show one record");
    add_name_of_record(get, record_options);
    add_server(get, record_options);
    get->add_flag("--body", record_options.body, "the recorded answer's bytes on stdout instead");
    get->callback([&] { code = record_get(record_options, leaves); });
    CLI::App* list = record->add_subcommand("list", "List records");
    add_server(list, record_options);
    list->add_option("--status", record_options.status, "processing, completed, failed, unknown or dead");
    list->add_option("--limit", record_options.limit, "records of this page")->check(CLI::Range(1, 1000))->capture_default_str();
    list->add_option("--cursor", record_options.cursor, "where the page before said that the next one begins");
    list->callback([&] { code = record_list(record_options, leaves); });
    CLI::App* resolve = record->add_subcommand("resolve", "Decide a record that is UNKNOWN or DEAD");
    add_name_of_record(resolve, record_options);
    add_server(resolve, record_options);
    resolve
        ->add_option("--as", record_options.decision,
                     "completed (with --file), failed (no answer: the next request calls again), rerun (the same, attempts count from 0)")
        ->required()
        ->check(CLI::IsMember({"completed", "failed", "rerun"}));
    resolve->add_option("--file", record_options.file, "the answer to replay from now on: JSON, or a stream's events");
    resolve->add_option("--content-type", record_options.content_type,
                        "of the file; found out from its first bytes if not given");
    resolve->add_option("--reason", record_options.reason, "kept in the record");
    resolve->add_option("--token", record_options.token, "refuse if the record's token is another by now");
    resolve->add_flag("--dry-run", record_options.dry_run, "check everything, change nothing");
    resolve->callback([&] { code = record_resolve(record_options, leaves); });
    CLI::App* erase = record->add_subcommand("erase", "Make what is kept of one tenant's prompts and answers unreadable, for good");
    erase->add_option("--tenant", record_options.client,
                      "the tenant's name under clients:; without clients: anonymous, for the callers without a credential");
    erase->add_option("--tenant-of", record_options.intent, "the tenant of this record, by its Semel-Intent");
    erase->add_option("--credential-env", record_options.credential_env,
                      "without clients: the environment variable that holds the tenant's credential");
    erase->add_option("--consumer", record_options.consumer,
                      "what the handler of this consumer answered; with --config also where it has a store of its own");
    add_server(erase, record_options);
    erase->add_flag("--yes", record_options.yes, "do it; without it nothing is changed");
    erase->add_flag("--dry-run", record_options.dry_run, "say whom it means, change nothing");
    erase->callback([&] { code = record_erase(record_options, leaves); });

    ConsumerCommandOptions consumer_options;
    ConsumerResetOptions reset_options;
    add_consumer(app, consumer_options, reset_options, leaves, code);

    MigrateOptions migrate_options;
    CLI::App* store = app.add_subcommand("store", "Make the tables of a database, or bring them to this version");
    store->require_subcommand(1);
    store->footer(store_examples);
    CLI::App* migrate = store->add_subcommand("migrate", "Show the statements that are needed, and run them");
    migrate->add_option("--config", migrate_options.config, "YAML file; store.postgres or store.mysql says which tables")->required();
    migrate->add_flag("--dry-run", migrate_options.dry_run, "show them, change nothing");
    migrate->add_flag("--json", migrate_options.json, "the statements as JSON");
    add_inbox(migrate, migrate_options);
    migrate->callback([&] { code = store_migrate(migrate_options, leaves); });

    DoctorOptions doctor_options;
    CLI::App* doctor_command = app.add_subcommand("doctor", "Say what a configuration guarantees and what is wrong with it");
    doctor_command->footer(doctor_examples);
    doctor_command->add_option("--config", doctor_options.config, "YAML file")->required();
    doctor_command->add_flag("--json", doctor_options.json, "as JSON");
    doctor_command->callback([&] { code = doctor(doctor_options, leaves); });

    CLI::App* mock = app.add_subcommand("mock-upstream", "A pretended AI API that counts paid calls; for trying out and tests");
    mock->footer(leaves.mock_upstream_help);
    mock->prefix_command();  // its options are its own
    mock->set_help_flag();
    mock->callback([&] { code = leaves.mock_upstream(mock->remaining()); });

    // What the store, the spool and spill files hold is for their owner alone.
    ::umask(077);
    try {
        std::vector<std::string> arguments = with_intents_named(argc, argv);
        std::ranges::reverse(arguments);  // CLI11 takes them from the back
        app.parse(std::move(arguments));
    } catch (const CLI::ParseError& error) {
        // CLI11 prints help and version to stdout, complaints to stderr.
        return app.exit(error) == 0 ? exit_ok : exit_usage;
    }
    return code;
}

}  // namespace semel::cli
