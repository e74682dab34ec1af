#include "stores/mysql/migration.hpp"

#include <mysqld_error.h>

#include <charconv>
#include <set>
#include <string_view>

#include "migrations.hpp"

namespace semel::stores::mysql {
namespace {

using sql::Problem;
using sql::ResultRows;

constexpr int kKnownVersion = std::size(migration_texts);
constexpr std::string_view kVersionTable =
    "CREATE TABLE IF NOT EXISTS semel_schema (version INT NOT NULL, applied BIGINT NOT NULL, "
    "PRIMARY KEY (version)) "
    "ENGINE=InnoDB DEFAULT CHARSET=ascii COLLATE=ascii_bin";
// One at a time, of the programs that migrate this database. Held by the connection.
constexpr std::string_view kTakeLock =
    "SELECT GET_LOCK(CONCAT('semel.', LEFT(SHA1(DATABASE()), 40)), 30)";
constexpr std::string_view kDropLock =
    "SELECT RELEASE_LOCK(CONCAT('semel.', LEFT(SHA1(DATABASE()), 40)))";

// What information_schema says of the tables as the migrations make them: table, column, type,
// length, NULL allowed.
constexpr std::string_view kColumnsQuestion =
    "SELECT CONCAT_WS(' ', LOWER(c.table_name), LOWER(c.column_name), c.data_type,"
    " IF(c.data_type IN ('binary','varbinary'), c.character_maximum_length, ''), c.is_nullable)"
    " FROM information_schema.columns c WHERE c.table_schema=DATABASE() AND c.table_name IN"
    " ('semel_records','semel_chunks','semel_conversations','semel_turns','semel_values',"
    "'semel_parking','semel_parked')";
constexpr const char* kColumns[] = {
    "semel_records k binary 32 NO",
    "semel_records version bigint  NO",
    "semel_records status tinyint  NO",
    "semel_records token bigint  NO",
    "semel_records nonce binary 16 NO",
    "semel_records created bigint  NO",
    "semel_records lease_end bigint  NO",
    "semel_records completed bigint  NO",
    "semel_records expires bigint  NO",
    "semel_records keep_ms bigint  NO",
    "semel_records head longblob  NO",
    "semel_records done longblob  YES",
    "semel_records body longblob  YES",
    "semel_chunks k binary 32 NO",
    "semel_chunks token bigint  NO",
    "semel_chunks n int  NO",
    "semel_chunks bytes longblob  NO",
    "semel_chunks at bigint  NO",
    "semel_conversations k binary 32 NO",
    "semel_conversations created bigint  NO",
    "semel_conversations last_used bigint  NO",
    "semel_conversations turns bigint  NO",
    "semel_turns k binary 32 NO",
    "semel_turns number bigint  NO",
    "semel_turns request_id varbinary 1024 NO",
    "semel_turns user_content longblob  NO",
    "semel_turns answer_content longblob  NO",
    "semel_turns at bigint  NO",
    "semel_turns late tinyint  NO",
    "semel_values name varbinary 255 NO",
    "semel_values value longblob  NO",
    "semel_parking k binary 32 NO",
    "semel_parking fence binary 16 NO",
    "semel_parked k binary 32 NO",
    "semel_parked place bigint  NO",
    "semel_parked bytes longblob  NO",
};
constexpr std::string_view kIndexesQuestion =
    "SELECT CONCAT_WS(' ', LOWER(s.table_name), LOWER(s.index_name), s.non_unique, s.seq_in_index, "
    "LOWER(s.column_name))"
    " FROM information_schema.statistics s WHERE s.table_schema=DATABASE() AND s.table_name IN"
    " ('semel_records','semel_chunks','semel_conversations','semel_turns','semel_values',"
    "'semel_parking','semel_parked')";
constexpr const char* kIndexes[] = {
    "semel_records primary 0 1 k",        "semel_records by_end 1 1 expires",
    "semel_records by_end 1 2 lease_end", "semel_chunks primary 0 1 k",
    "semel_chunks primary 0 2 token",     "semel_chunks primary 0 3 n",
    "semel_conversations primary 0 1 k",  "semel_conversations by_use 1 1 last_used",
    "semel_turns primary 0 1 k",          "semel_turns primary 0 2 number",
    "semel_turns by_request 0 1 k",       "semel_turns by_request 0 2 request_id",
    "semel_values primary 0 1 name",      "semel_parking primary 0 1 k",
    "semel_parked primary 0 1 k",         "semel_parked primary 0 2 place",
};
constexpr std::string_view kEnginesQuestion =
    "SELECT LOWER(t.table_name), t.engine FROM information_schema.tables t WHERE "
    "t.table_schema=DATABASE() AND"
    " t.table_name IN "
    "('semel_records','semel_chunks','semel_conversations','semel_turns','semel_values',"
    "'semel_parking','semel_parked','semel_schema')";

base::Error refused(std::string detail) {
    return {.code = base::ErrorCode::invalid_argument, .detail = std::move(detail)};
}

base::Error another_shape(const std::string& what) {
    return refused("the tables in the database are of another shape than this program makes: " +
                   what + "; restore them, or name another database in the URL");
}

std::string text_of(const ResultRows& result) {
    return result.rows.empty() || result.rows[0].empty() ? std::string{}
                                                         : result.rows[0][0].value_or("");
}

class Migration {
  public:
    Migration(Connection& connection, SteadyTime deadline)
        : connection_(connection), deadline_(deadline) {}

    base::Result<std::vector<std::string>> plan() {
        std::vector<std::string> statements;
        const auto version = version_there();
        if (!version) return version.error();
        if (*version < 0) statements.emplace_back(kVersionTable);
        for (int next = std::max(*version, 0) + 1; next <= kKnownVersion; ++next) {
            for (std::string& one : statements_of(migration_texts[next - 1]))
                statements.push_back(std::move(one));
            statements.push_back(
                "INSERT INTO semel_schema(version,applied) VALUES(" + std::to_string(next) +
                ",TIMESTAMPDIFF(MICROSECOND,TIMESTAMP'1970-01-01 00:00:00',UTC_TIMESTAMP(6)))"
                " ON DUPLICATE KEY UPDATE version=semel_schema.version");
        }
        if (!statements.empty()) return statements;
        if (auto checked = check_shape(); !checked) return checked.error();
        return statements;
    }

    base::Result<void> run() {
        auto missing = plan();
        if (!missing) return missing.error();
        if (missing->empty()) return {};
        const auto locked = ask(kTakeLock);
        if (!locked) return locked.error();
        if (text_of(*locked) != "1")
            return base::Error{.code = base::ErrorCode::store_unavailable,
                               .detail =
                                   "another program has been making the tables for 30 s: is it "
                                   "stuck? Its connection holds "
                                   "the lock 'semel.…' (SHOW PROCESSLIST)"};
        auto result = locked_run();
        (void)ask(kDropLock);
        return result;
    }

  private:
    // Of those before this one somebody else may have done all while this one waited for the lock.
    base::Result<void> locked_run() {
        auto missing = plan();
        if (!missing) return missing.error();
        for (const std::string& statement : *missing) {
            if (auto done = ask(statement); !done) return done.error();
        }
        return check_shape();
    }

    // -1: there is no semel_schema.
    base::Result<int> version_there() {
        const auto table =
            ask("SELECT COUNT(*) FROM information_schema.tables WHERE table_schema=DATABASE() AND"
                " table_name='semel_schema'");
        if (!table) return table.error();
        if (text_of(*table) == "0") return -1;
        const auto asked = ask("SELECT COALESCE(MAX(version),0) FROM semel_schema");
        if (!asked) return asked.error();
        const std::string text = text_of(*asked);
        int version = 0;
        std::from_chars(text.data(), text.data() + text.size(), version);
        if (version > kKnownVersion)
            return base::Error{.code = base::ErrorCode::store_version,
                               .detail = "the tables have version " + text +
                                         ", made by a newer program; this one knows version " +
                                         std::to_string(kKnownVersion) + ": start the newer one"};
        return version;
    }

    base::Result<void> check_shape() {
        const auto engines = ask(kEnginesQuestion);
        if (!engines) return engines.error();
        for (const auto& row : engines->rows) {
            if (row[1] != "InnoDB")
                return another_shape(
                    row[0].value_or("") +
                    " is a view, or not in the engine InnoDB, which alone has transactions");
        }
        if (auto columns = compare(kColumnsQuestion, kColumns, "column"); !columns) return columns;
        return compare(kIndexesQuestion, kIndexes, "index");
    }

    template <std::size_t N>
    base::Result<void> compare(std::string_view question, const char* const (&wanted)[N],
                               const char* kind) {
        const auto found = ask(question);
        if (!found) return found.error();
        std::set<std::string, std::less<>> there;
        for (const auto& row : found->rows) there.insert(row[0].value_or(""));
        for (const char* one : wanted) {
            if (!there.contains(std::string_view(one)))
                return another_shape(std::string("no ") + kind + " is `" + one + "`");
        }
        return {};
    }

    base::Result<ResultRows> ask(std::string_view statement) {
        Failure failure;
        auto answer = connection_.run(statement, deadline_, &failure);
        if (auto* problem = std::get_if<Problem>(&answer)) {
            if (failure.number == ER_TABLEACCESS_DENIED_ERROR ||
                failure.number == ER_DBACCESS_DENIED_ERROR ||
                failure.number == ER_SPECIFIC_ACCESS_DENIED_ERROR)
                return refused("the user may not make the tables (error " +
                               std::to_string(failure.number) +
                               "): GRANT CREATE, ALTER, INDEX, SELECT, INSERT, UPDATE, DELETE on "
                               "the database to it, or let an "
                               "administrator run the migration");
            if (failure.number == ER_TABLE_EXISTS_ERROR || failure.number == ER_BAD_FIELD_ERROR)
                return another_shape("error " + std::to_string(failure.number));
            problem->error.detail = "making or reading the tables failed: " + problem->error.detail;
            return std::move(problem->error);
        }
        return std::move(std::get<0>(answer).back());
    }

    // The file's statements without its comments.
    static std::vector<std::string> statements_of(std::string_view file) {
        std::vector<std::string> statements;
        std::string current;
        while (!file.empty()) {
            const std::string_view line = file.substr(0, file.find('\n'));
            file.remove_prefix(std::min(line.size() + 1, file.size()));
            if (line.empty() || line.starts_with("--")) continue;
            if (!line.ends_with(';')) {
                current.append(line).append(1, '\n');
                continue;
            }
            current.append(line.substr(0, line.size() - 1));
            statements.push_back(std::move(current));
            current.clear();
        }
        return statements;
    }

    Connection& connection_;
    const SteadyTime deadline_;
};

}  // namespace

base::Result<std::vector<std::string>> plan_migration(Connection& connection, SteadyTime deadline) {
    return Migration(connection, deadline).plan();
}

base::Result<void> migrate(Connection& connection, SteadyTime deadline) {
    return Migration(connection, deadline).run();
}

std::optional<sql::Problem> wrong_version(Connection& connection, SteadyTime deadline) {
    Failure failure;
    auto answer = connection.run("SELECT MAX(version) FROM semel_schema", deadline, &failure);
    if (auto* problem = std::get_if<Problem>(&answer)) return std::move(*problem);
    const std::string version = text_of(std::get<0>(answer)[0]);
    if (version == std::to_string(kKnownVersion)) return {};
    return Problem{
        sql::Trouble::refused,
        {.code = base::ErrorCode::store_version,
         .detail = "the tables have version " + version +
                   " meanwhile, this program knows version " + std::to_string(kKnownVersion) +
                   ": start the program that made them"}};
}

}  // namespace semel::stores::mysql
