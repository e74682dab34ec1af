#include "stores/mysql/connection.hpp"

#include <errmsg.h>
#include <fcntl.h>
#include <mysql.h>
#include <mysqld_error.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>

#include "stores/mysql/results.hpp"

namespace semel::stores::mysql {
namespace {

using sql::Done;
using sql::Problem;
using sql::ResultRows;
using sql::Tried;
using std::chrono::steady_clock;

// Time-outs of the client library itself are whole seconds. They only bound what it does without
// asking us to wait (TLS).
unsigned whole_seconds(milliseconds time) {
    return static_cast<unsigned>(std::chrono::ceil<std::chrono::seconds>(time).count());
}

void set_options(MYSQL* mysql, const Target& target, milliseconds timeout) {
    const unsigned seconds = std::max(1U, whole_seconds(timeout));
    const my_bool on = 1;
    const unsigned off = 0;
    mysql_options(mysql, MYSQL_OPT_NONBLOCK, nullptr);
    mysql_options(mysql, MYSQL_OPT_CONNECT_TIMEOUT, &seconds);
    // A server could otherwise ask for any file of this machine.
    mysql_options(mysql, MYSQL_OPT_LOCAL_INFILE, &off);
    mysql_options(mysql, MYSQL_SET_CHARSET_NAME, "binary");
    // Otherwise the library would look for a socket of its own choice where the host is called
    // localhost.
    const unsigned protocol = target.socket.empty() ? MYSQL_PROTOCOL_TCP : MYSQL_PROTOCOL_SOCKET;
    mysql_options(mysql, MYSQL_OPT_PROTOCOL, &protocol);
    // Any but mysql_clear_password and dialog, which would show the password to whoever answers.
    if (target.tls != Tls::verify && target.socket.empty())
        mysql_options(mysql, MARIADB_OPT_RESTRICTED_AUTH,
                      "mysql_native_password,client_ed25519,caching_sha2_password,sha256_password,"
                      "auth_gssapi_client");
    if (target.tls == Tls::off) return;
    mysql_options(mysql, MYSQL_OPT_SSL_ENFORCE, &on);
    if (target.tls != Tls::verify) return;
    mysql_options(mysql, MYSQL_OPT_SSL_VERIFY_SERVER_CERT, &on);
    if (!target.ca_file.empty()) mysql_options(mysql, MYSQL_OPT_SSL_CA, target.ca_file.c_str());
}

// The library makes the socket of a TLS connection blocking for the handshake, and leaves it so:
// until it is through, the kernel must end its waits.
void limit_waits(MYSQL* mysql, milliseconds timeout) {
    const timeval limit{.tv_sec = timeout.count() / 1000,
                        .tv_usec = (timeout.count() % 1000) * 1000};
    const int fd = static_cast<int>(mysql_get_socket(mysql));
    ::setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    ::setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
}

void never_block(MYSQL* mysql) {
    const int fd = static_cast<int>(mysql_get_socket(mysql));
    ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
}

// "10.11.19-MariaDB-log" -> 101119.
unsigned version_number(std::string_view text) {
    unsigned parts[3] = {};
    const char* at = text.data();
    const char* const end = text.data() + text.size();
    for (unsigned& part : parts) {
        const auto [next, code] = std::from_chars(at, end, part);
        if (code != std::errc{}) break;
        at = next;
        if (at == end || *at != '.') break;
        ++at;
    }
    return parts[0] * 10'000 + parts[1] * 100 + parts[2];
}

// What the server's administrator may have set otherwise. completion_type: a COMMIT must not begin
// the next transaction or end the connection. unique_checks: without them an insert may lock the
// whole table.
constexpr std::string_view kSettings =
    "SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED;"
    "SET SESSION TRANSACTION READ WRITE;"
    "SET time_zone='+00:00',"
    "sql_mode='STRICT_ALL_TABLES,NO_ZERO_DATE,NO_ZERO_IN_DATE,ERROR_FOR_DIVISION_BY_ZERO,NO_ENGINE_"
    "SUBSTITUTION',"
    "autocommit=1,completion_type=0,innodb_lock_wait_timeout=1,unique_checks=1,foreign_key_checks="
    "1,"
    "sql_safe_updates=0,sql_select_limit=18446744073709551615,sql_big_selects=1,timestamp=DEFAULT";
constexpr std::string_view kMariadbSettings = ",query_cache_type=OFF,max_statement_time=0";
constexpr std::string_view kMysqlSettings = ",max_execution_time=0";
// Reads and writes see what the cluster committed on other nodes before.
constexpr std::string_view kGaleraSettings = ",wsrep_sync_wait=7";

}  // namespace

Connection::~Connection() {
    // The goodbye of a connection that does not answer must not block.
    if (mysql_ != nullptr && !usable_ && mysql_get_socket(mysql_) != MARIADB_INVALID_SOCKET)
        ::shutdown(mysql_get_socket(mysql_), SHUT_RDWR);
    if (mysql_ != nullptr) mysql_close(mysql_);
}

bool Connection::in_transaction() const {
    return (mysql_->server_status & SERVER_STATUS_IN_TRANS) != 0;
}

bool Connection::wait(int& events, SteadyTime deadline) const {
    pollfd one{.fd = static_cast<int>(mysql_get_socket(mysql_)), .events = 0, .revents = 0};
    if ((events & MYSQL_WAIT_READ) != 0) one.events |= POLLIN;
    if ((events & MYSQL_WAIT_WRITE) != 0) one.events |= POLLOUT;
    if ((events & MYSQL_WAIT_EXCEPT) != 0) one.events |= POLLPRI;
    while (true) {
        const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
        if (left <= milliseconds{0}) return false;
        const int ready =
            ::poll(&one, 1, static_cast<int>(std::min<std::int64_t>(left.count(), 60'000)));
        if (ready <= 0) continue;  // a signal, or the deadline
        events = 0;
        if ((one.revents & (POLLIN | POLLHUP | POLLERR)) != 0) events |= MYSQL_WAIT_READ;
        if ((one.revents & (POLLOUT | POLLERR)) != 0) events |= MYSQL_WAIT_WRITE;
        if ((one.revents & POLLPRI) != 0) events |= MYSQL_WAIT_EXCEPT;
        return true;
    }
}

bool Connection::closed_by_server() const {
    // Between statements a server says nothing but that it ends the connection.
    pollfd one{.fd = static_cast<int>(mysql_get_socket(mysql_)),
               .events = POLLIN | POLLRDHUP,
               .revents = 0};
    return ::poll(&one, 1, 0) > 0;
}

sql::Problem Connection::lost(unsigned number, bool sent) {
    usable_ = false;
    return problem_of(number, sent);
}

Tried<std::vector<ResultRows>> Connection::run(std::string_view statements, SteadyTime deadline,
                                               Failure* failure) {
    Failure ignored;
    Failure& at = failure != nullptr ? *failure : ignored;
    at = {};
    if (server_.max_packet != 0 && statements.size() + 1 >= server_.max_packet) {
        at.number = ER_NET_PACKET_TOO_LARGE;
        return problem_of(at.number, false);
    }
    if (!usable_ || closed_by_server()) {
        at.number = CR_SERVER_GONE_ERROR;
        return lost(at.number, false);
    }
    const auto late = [&](bool sent) {
        Problem problem = lost(at.number = CR_SERVER_LOST, sent);
        problem.error.detail = "the server did not answer in time";
        return problem;
    };
    int failed = 0;
    int events = mysql_send_query_start(&failed, mysql_, statements.data(), statements.size());
    while (events != 0) {
        // Not all of the packet has left: the server executes none of it.
        if (!wait(events, deadline)) return late(false);
        events = mysql_send_query_cont(&failed, mysql_, events);
    }
    if (failed != 0) return lost(at.number = mysql_errno(mysql_), false);

    const auto refused = [&]() -> Problem {
        at.number = mysql_errno(mysql_);
        Problem problem = problem_of(at.number, true);
        if (problem.trouble == sql::Trouble::lost) usable_ = false;
        return problem;
    };
    std::vector<ResultRows> results;
    my_bool unread = 0;
    events = mysql_read_query_result_start(&unread, mysql_);
    while (events != 0) {
        if (!wait(events, deadline)) return late(true);
        events = mysql_read_query_result_cont(&unread, mysql_, events);
    }
    if (unread != 0) return refused();
    while (true) {
        MYSQL_RES* rows = nullptr;
        if (mysql_field_count(mysql_) != 0) {
            events = mysql_store_result_start(&rows, mysql_);
            while (events != 0) {
                if (!wait(events, deadline)) return late(true);
                events = mysql_store_result_cont(&rows, mysql_, events);
            }
            if (rows == nullptr) return refused();
        }
        results.push_back(take_result(mysql_, rows));
        ++at.statement;
        int more = 0;
        events = mysql_next_result_start(&more, mysql_);
        while (events != 0) {
            if (!wait(events, deadline)) return late(true);
            events = mysql_next_result_cont(&more, mysql_, events);
        }
        if (more > 0) return refused();
        if (more < 0) return results;
    }
}

Tried<Done> Connection::connect(const Target& target, milliseconds timeout) {
    const SteadyTime deadline = steady_clock::now() + timeout;
    const std::string where = describe(target);
    const char* socket = target.socket.empty() ? nullptr : target.socket.c_str();
    MYSQL* connected = nullptr;
    int events = mysql_real_connect_start(
        &connected, mysql_, target.host.c_str(), target.user.c_str(), target.password.c_str(),
        target.database.c_str(), target.port, socket, CLIENT_MULTI_STATEMENTS | CLIENT_FOUND_ROWS);
    if (events != 0 && target.tls != Tls::off) limit_waits(mysql_, timeout);
    while (events != 0) {
        if (!wait(events, deadline)) {
            usable_ = false;
            Problem problem =
                connect_problem(CR_SERVER_LOST, {}, where, target.user, target.database);
            problem.error.detail = "the server at " + where + " did not answer within " +
                                   std::to_string(timeout.count()) +
                                   " ms: is it overloaded, frozen or behind a firewall?";
            return problem;
        }
        events = mysql_real_connect_cont(&connected, mysql_, events);
    }
    if (connected == nullptr) {
        usable_ = false;
        return connect_problem(mysql_errno(mysql_), mysql_error(mysql_), where, target.user,
                               target.database);
    }
    never_block(mysql_);
    // The library alone goes on in the clear with a server that has no TLS.
    if (target.tls != Tls::off && mysql_get_ssl_cipher(mysql_) == nullptr) {
        usable_ = false;
        return connect_problem(CR_SSL_CONNECTION_ERROR, "the server has no TLS", where, target.user,
                               target.database);
    }
    return prepare(deadline);
}

Tried<Done> Connection::prepare(SteadyTime deadline) {
    auto asked =
        run("SELECT VERSION(), @@max_allowed_packet; SHOW VARIABLES LIKE 'wsrep_on'", deadline);
    if (auto* problem = std::get_if<Problem>(&asked)) return std::move(*problem);
    auto& answers = std::get<0>(asked);
    if (answers.size() != 2 || answers[0].rows.size() != 1) return lost(CR_MALFORMED_PACKET, false);
    const auto& about = answers[0].rows[0];
    server_.text = about[0].value_or("");
    server_.mariadb = server_.text.find("MariaDB") != std::string::npos;
    server_.version = version_number(server_.text);
    const std::string packet = about[1].value_or("");
    std::from_chars(packet.data(), packet.data() + packet.size(), server_.max_packet);
    server_.galera = !answers[1].rows.empty() && answers[1].rows[0][1] == "ON";

    std::string settings(kSettings);
    settings += server_.mariadb ? kMariadbSettings : kMysqlSettings;
    if (server_.galera) settings += kGaleraSettings;
    auto set = run(settings, deadline);
    if (auto* problem = std::get_if<Problem>(&set)) return std::move(*problem);
    return Done{};
}

Tried<std::unique_ptr<Connection>> Connection::open(const Target& target, milliseconds timeout) {
    // mysql_init() would do it too, but not safely from several threads at once.
    static const int ready = mysql_library_init(0, nullptr, nullptr);
    std::unique_ptr<Connection> connection(new Connection);
    connection->mysql_ = ready == 0 ? mysql_init(nullptr) : nullptr;
    if (connection->mysql_ == nullptr)
        return connect_problem(CR_OUT_OF_MEMORY, "out of memory", describe(target), target.user,
                               target.database);
    set_options(connection->mysql_, target, timeout);
    auto done = connection->connect(target, timeout);
    if (auto* problem = std::get_if<Problem>(&done)) return std::move(*problem);
    return connection;
}

void append_bytes(std::string& sql, std::string_view bytes) {
    sql += '\'';
    while (!bytes.empty()) {
        const std::size_t plain =
            std::min(bytes.find_first_of(std::string_view("\0'\\", 3)), bytes.size());
        sql.append(bytes.substr(0, plain));
        if (plain == bytes.size()) break;
        sql += '\\';
        sql += bytes[plain] == '\0' ? '0' : bytes[plain];
        bytes.remove_prefix(plain + 1);
    }
    sql += '\'';
}

}  // namespace semel::stores::mysql
