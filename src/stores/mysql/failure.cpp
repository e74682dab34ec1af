#include "stores/mysql/failure.hpp"

#include <errmsg.h>
#include <mysqld_error.h>

#include <algorithm>
#include <array>
#include <string_view>

namespace semel::stores::mysql {
namespace {

using base::Applied;
using base::ErrorCode;
using sql::Problem;
using sql::Trouble;

// What the MariaDB headers do not know.
constexpr unsigned kMysqlReadOnlyMode = 1836;
constexpr unsigned kMysqlQueryTimeout = 3024;
constexpr unsigned kMysqlLockNowait = 3572;
constexpr unsigned kMysqlClientIdle = 4031;
constexpr unsigned kMysqlSecureTransport = 3159;

struct Meaning {
    unsigned number;
    Trouble trouble;
    std::string_view words;  ///< Behind "error N: ".
};

constexpr auto kMeanings = std::to_array<Meaning>({
    {ER_LOCK_DEADLOCK, Trouble::contended,
     "a deadlock, or a conflict with another node of a Galera cluster"},
    {ER_LOCK_WAIT_TIMEOUT, Trouble::contended, "another transaction holds a lock on the row"},
    {ER_STATEMENT_TIMEOUT, Trouble::contended,
     "the statement waited too long, for a lock as a rule"},
    {kMysqlQueryTimeout, Trouble::contended, "the statement waited too long"},
    {kMysqlLockNowait, Trouble::contended, "another transaction holds a lock on the row"},
    {ER_CHECKREAD, Trouble::contended, "the row changed while it was read"},
    {ER_LOCK_TABLE_FULL, Trouble::contended, "the server's table of locks is full"},
    {ER_TOO_MANY_CONCURRENT_TRXS, Trouble::contended,
     "the server has no undo log for one more transaction"},
    {ER_QUERY_INTERRUPTED, Trouble::contended, "somebody stopped the statement"},
    {ER_RECORD_FILE_FULL, Trouble::full,
     "the table is full: the server's disk, or a limit on its tablespace"},
    {ER_DISK_FULL, Trouble::full, "the server's disk is full"},
    {ER_ERROR_ON_WRITE, Trouble::full,
     "the server cannot write a file, mostly for want of room on its disk"},
    {ER_OUTOFMEMORY, Trouble::full, "the server is out of memory"},
    {ER_OUT_OF_RESOURCES, Trouble::full, "the server is out of memory"},
    {ER_OPTION_PREVENTS_STATEMENT, Trouble::not_writable, "the server is read-only"},
    {kMysqlReadOnlyMode, Trouble::not_writable, "the server is read-only"},
    {ER_CANT_EXECUTE_IN_READ_ONLY_TRANSACTION, Trouble::not_writable,
     "the server makes transactions read-only"},
    {ER_UNKNOWN_COM_ERROR, Trouble::not_writable,
     "this node of a Galera cluster is not in the cluster's majority"},
    {ER_SERVER_SHUTDOWN, Trouble::lost, "the server is shutting down"},
    {ER_CONNECTION_KILLED, Trouble::lost, "somebody ended the connection"},
    {kMysqlClientIdle, Trouble::lost, "the server ended a connection that had been idle"},
    {ER_NEW_ABORTING_CONNECTION, Trouble::lost, "the server broke the connection off"},
    {ER_ABORTING_CONNECTION, Trouble::lost, "the server broke the connection off"},
    {ER_ERROR_DURING_COMMIT, Trouble::lost, "the commit failed half-way"},
    {ER_NET_READ_ERROR, Trouble::lost, "the server could not read from the connection"},
    {ER_NET_READ_INTERRUPTED, Trouble::lost,
     "the server waited too long for the rest of a statement"},
    {ER_NET_ERROR_ON_WRITE, Trouble::lost, "the server could not write to the connection"},
    {ER_NET_WRITE_INTERRUPTED, Trouble::lost,
     "the server waited too long to write to the connection"},
    {CR_SERVER_GONE_ERROR, Trouble::lost, "the connection is broken"},
    {CR_SERVER_LOST, Trouble::lost, "the connection broke before the answer came"},
    {ER_NET_PACKET_TOO_LARGE, Trouble::refused,
     "the statement is longer than the server's max_allowed_packet: set that to 64M or more"},
    {ER_TABLEACCESS_DENIED_ERROR, Trouble::refused,
     "the user may not do that with a table: grant SELECT, INSERT, UPDATE and DELETE on the "
     "database"},
    {ER_COLUMNACCESS_DENIED_ERROR, Trouble::refused,
     "the user may not do that with a column: grant it on the whole table"},
    {ER_DBACCESS_DENIED_ERROR, Trouble::refused,
     "the user may not use the database: grant SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER and "
     "INDEX on it"},
    {ER_NO_SUCH_TABLE, Trouble::refused,
     "a table is missing: somebody dropped it, or the database was never migrated"},
    {ER_BAD_FIELD_ERROR, Trouble::refused, "a table has other columns than this binary knows"},
    {ER_BINLOG_STMT_MODE_AND_ROW_ENGINE, Trouble::refused,
     "binlog_format is STATEMENT, which the isolation READ COMMITTED does not work with: set it to "
     "ROW or MIXED"},
    {ER_DATA_TOO_LONG, Trouble::refused, "a value is longer than its column"},
});

const Meaning* meaning_of(unsigned number) {
    const auto* it = std::find_if(kMeanings.begin(), kMeanings.end(),
                                  [&](const Meaning& one) { return one.number == number; });
    return it == kMeanings.end() ? nullptr : &*it;
}

// What the client library says by itself, mostly about the connection: 2000 to 2999, and MariaDB's
// from 5000.
bool by_client(unsigned number) {
    return (number >= 2000 && number < 3000) || (number >= 5000 && number < 6000);
}

ErrorCode code_of(Trouble trouble) {
    switch (trouble) {
        case Trouble::contended:
        case Trouble::not_writable:
        case Trouble::lost:
            return ErrorCode::store_unavailable;
        case Trouble::full:
            return ErrorCode::store_full;
        case Trouble::refused:
            return ErrorCode::invalid_argument;
    }
    return ErrorCode::io;
}

}  // namespace

sql::Trouble trouble_of(unsigned number) {
    if (const Meaning* meaning = meaning_of(number)) return meaning->trouble;
    return by_client(number) ? Trouble::lost : Trouble::refused;
}

sql::Problem problem_of(unsigned number, bool sent) {
    const Meaning* meaning = meaning_of(number);
    const Trouble trouble = trouble_of(number);
    std::string detail = "the server answered with error " + std::to_string(number);
    if (by_client(number)) detail = "client error " + std::to_string(number);
    if (meaning != nullptr) detail += ": " + std::string(meaning->words);
    const bool unknown = trouble == Trouble::lost && sent;
    return {trouble,
            {.code = code_of(trouble),
             .applied = unknown ? Applied::unknown : Applied::no,
             .detail = std::move(detail)}};
}

sql::Problem not_writable(std::string detail) {
    return {Trouble::not_writable,
            {.code = ErrorCode::store_unavailable,
             .applied = Applied::no,
             .detail = std::move(detail)}};
}

sql::Problem connect_problem(unsigned number, const std::string& text, const std::string& where,
                             const std::string& user, const std::string& database) {
    const auto refused = [](std::string detail) {
        return Problem{Trouble::refused,
                       {.code = ErrorCode::invalid_argument, .detail = std::move(detail)}};
    };
    const std::string code = "error " + std::to_string(number);
    switch (number) {
        case ER_ACCESS_DENIED_ERROR:
        case ER_ACCESS_DENIED_NO_PASSWORD_ERROR:
            return refused(
                "the server at " + where + " does not accept the password of user '" + user +
                "', does not know that user for this host, or accepts it over TLS only (" + code +
                "): correct user and password in the URL, create the user, or add tls=verify");
        case ER_BAD_DB_ERROR:
            return refused("the server at " + where + " has no database '" + database + "' (" +
                           code + "): create it, or correct the name in the URL");
        case ER_DBACCESS_DENIED_ERROR:
            return refused("user '" + user + "' may not use the database '" + database + "' at " +
                           where + " (" + code +
                           "): GRANT SELECT, INSERT, UPDATE, DELETE, CREATE, ALTER, INDEX ON "
                           "the database to the user, "
                           "or correct the name in the URL");
        case ER_HOST_NOT_PRIVILEGED:
            return refused("the server at " + where + " accepts no user from this host (" + code +
                           "): create user '" + user + "' for this host's address");
        case ER_HOST_IS_BLOCKED:
            return refused("the server at " + where +
                           " has blocked this host after too many broken connections (" + code +
                           "): run FLUSH HOSTS there");
        case CR_AUTH_PLUGIN_CANNOT_LOAD:
        case CR_AUTH_PLUGIN_ERR:
        case ER_NOT_SUPPORTED_AUTH_MODE:
            return refused("user '" + user + "' logs in at " + where +
                           " in a way that this client does not know, or only over TLS (" + code +
                           "): add tls=required to the URL, or give the user mysql_native_password "
                           "or caching_sha2_password");
        case CR_SSL_CONNECTION_ERROR:
            return refused("no TLS connection to " + where + " (" + code + ": " + text +
                           "): is TLS on at the server, is its certificate for this host, and is "
                           "ca_file the authority that "
                           "signed it?");
        case kMysqlSecureTransport:
            return refused("the server at " + where + " accepts encrypted connections only (" +
                           code + "): add tls=verify or tls=required to the URL");
        default:
            break;
    }
    Problem problem{Trouble::lost, {.code = ErrorCode::store_unavailable, .detail = {}}};
    std::string& detail = problem.error.detail;
    if (number == ER_CON_COUNT_ERROR || number == ER_TOO_MANY_USER_CONNECTIONS ||
        number == ER_USER_LIMIT_REACHED) {
        detail =
            "the server at " + where + " accepts no more connections (" + code +
            "): raise max_connections (or the user's limit), or lower the store's `connections`";
    } else if (number == CR_CONNECTION_ERROR || number == CR_CONN_HOST_ERROR ||
               number == CR_UNKNOWN_HOST) {
        detail = "nothing answers at " + where + " (" + code + ": " + text +
                 "): is the server running, and are host and port (or socket) in the URL right?";
    } else {
        detail = "no connection to the server at " + where + " (" + code +
                 (text.empty() ? "" : ": " + text) + ")";
    }
    return problem;
}

}  // namespace semel::stores::mysql
