#include "integration/inbox_databases.hpp"

#include <arpa/inet.h>
#include <libpq-fe.h>
#include <mysql.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <utility>

#include "stores/mysql/executor.hpp"
#include "stores/postgres/executor.hpp"
#include "support/mysql_server.hpp"
#include "support/postgres_server.hpp"

namespace semel::support {
namespace {

// As a program that the tests start connects too, this user may do all and has no secret worth one.
PostgresServer& postgres_server() {
    static PostgresServer server;
    return server;
}
MysqlServer& mysql_server() {
    static MysqlServer server;
    return server;
}

struct PostgresConnection {
    PGconn* connection = nullptr;
    std::unique_ptr<Executor> executor;
    ~PostgresConnection() {
        executor.reset();
        PQfinish(connection);
    }
};
struct OwnMysqlConnection {
    MYSQL* connection = nullptr;
    std::unique_ptr<Executor> executor;
    ~OwnMysqlConnection() {
        executor.reset();
        mysql_close(connection);
    }
};

}  // namespace

std::shared_ptr<Executor> connect(const Address& address, Native& native) {
    if (address.dialect == Dialect::postgres) {
        auto own = std::make_shared<PostgresConnection>();
        own->connection = PQconnectdb(("host=127.0.0.1 user=semel connect_timeout=5 port=" +
                                       std::to_string(address.port) + " dbname=" + address.database)
                                          .c_str());
        if (PQstatus(own->connection) != CONNECTION_OK)
            throw std::runtime_error(PQerrorMessage(own->connection));
        native.postgres = own->connection;
        own->executor =
            stores::postgres::executor_on(own->connection, stores::postgres::executor_deadline,
                                          address.pooled ? stores::postgres::Prepare::never
                                                         : stores::postgres::Prepare::repeated);
        return {own, own->executor.get()};
    }
    auto own = std::make_shared<OwnMysqlConnection>();
    own->connection = mysql_init(nullptr);
    unsigned seconds = 30;
    mysql_options(own->connection, MYSQL_OPT_READ_TIMEOUT, &seconds);
    mysql_options(own->connection, MYSQL_SET_CHARSET_NAME,
                  "latin1");  // the inbox must not depend on it
    if (mysql_real_connect(own->connection, "127.0.0.1", MysqlServer::user, MysqlServer::password,
                           address.database.c_str(), address.port, nullptr,
                           CLIENT_MULTI_STATEMENTS | CLIENT_FOUND_ROWS) == nullptr)
        throw std::runtime_error(mysql_error(own->connection));
    native.mysql = own->connection;
    own->executor = stores::mysql::executor_on(own->connection);
    return {own, own->executor.get()};
}

std::shared_ptr<Executor> connect(const Address& address) {
    Native ignored;
    return connect(address, ignored);
}

InboxDatabase::InboxDatabase(Dialect dialect) {
    address_.dialect = dialect;
    if (dialect == Dialect::postgres) {
        address_.port = postgres_server().port();
        address_.database = postgres_server().new_database();
    } else {
        address_.port = mysql_server().port();
        address_.database = mysql_server().make_database();
    }
    connection_ = connect();
}

Address InboxDatabase::pooled() const {
    static const PgBouncer pooler(postgres_server());
    const std::string url = pooler.url();
    const std::size_t colon = url.rfind(':');
    Address address = address_;
    address.port = static_cast<std::uint16_t>(std::stoi(url.substr(colon + 1)));
    address.pooled = true;
    return address;
}

std::vector<sql::Values> InboxDatabase::query(const std::string& text) {
    auto answer = connection_->run(sql::Statement{.text = text, .parameters = {}});
    if (auto* problem = std::get_if<sql::Problem>(&answer))
        throw std::runtime_error(text + ": " + problem->error.detail);
    return std::move(std::get<0>(answer).rows);
}

std::string InboxDatabase::one(const std::string& text) {
    const std::vector<sql::Values> rows = query(text);
    return rows.empty() || rows[0].empty() ? std::string() : rows[0][0].value_or("");
}

std::int64_t InboxDatabase::waiting_for_locks() {
    if (postgres())
        return number(
            "SELECT COUNT(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = "
            "current_database()");
    return std::stoll(
        mysql_server()
            .query(
                "SELECT COUNT(*) FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'")
            .value());
}

void InboxDatabase::set_default_isolation(const std::string& level) {
    if (postgres()) {
        query("ALTER DATABASE " + address_.database + " SET default_transaction_isolation = '" +
              level + "'");
    } else if (!mysql_server().query("SET GLOBAL TRANSACTION ISOLATION LEVEL " + level).ok()) {
        throw std::runtime_error("the isolation level cannot be set");
    }
}

void InboxDatabase::set_sql_mode(const std::string& mode) {
    if (!mysql_server().query("SET GLOBAL sql_mode = '" + mode + "'").ok())
        throw std::runtime_error("sql_mode cannot be set");
}

// ---------------------------------------------------------------- the proxy

struct DroppingProxy::State {
    std::uint16_t server_port = 0;
    int listener = -1;
    std::uint16_t port = 0;
    std::atomic<bool> over = false;
    std::mutex mutex;
    Lose what = Lose::nothing;
    std::string word;
    int times = 0;
    std::atomic<int> lost = 0;
    std::vector<std::thread> threads;  // of the acceptor alone

    static sockaddr_in local(std::uint16_t port) {
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(port);
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        return address;
    }
    static bool write_all(int fd, const char* data, std::size_t size) {
        while (size > 0) {
            const ssize_t n = ::send(fd, data, size, MSG_NOSIGNAL);
            if (n <= 0) return false;
            data += n;
            size -= static_cast<std::size_t>(n);
        }
        return true;
    }
    Lose take(std::string_view packet) {
        const std::lock_guard lock(mutex);
        if (times == 0 || packet.find(word) == std::string_view::npos) return Lose::nothing;
        --times;
        return what;
    }
    void carry(int client) {
        const int server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const sockaddr_in address = local(server_port);
        std::array<char, 65536> buffer;
        bool open =
            ::connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
        bool dropping = false;
        while (open && !over) {
            std::array<pollfd, 2> ends{{{client, POLLIN, 0}, {server, POLLIN, 0}}};
            if (::poll(ends.data(), ends.size(), 100) <= 0) continue;
            for (std::size_t i = 0; i < 2 && open; ++i) {
                if (ends[i].revents == 0) continue;
                const ssize_t n = ::read(ends[i].fd, buffer.data(), buffer.size());
                if (n <= 0) {
                    open = false;
                    break;
                }
                const std::string_view packet(buffer.data(), static_cast<std::size_t>(n));
                if (i == 0) {
                    const Lose lose = take(packet);
                    dropping = dropping || lose == Lose::the_answer;
                    open =
                        lose != Lose::the_packet && write_all(server, packet.data(), packet.size());
                    if (lose == Lose::the_packet) ++lost;
                } else {
                    open = !dropping && write_all(client, packet.data(), packet.size());
                    if (dropping) ++lost;
                }
            }
        }
        ::close(server);
        ::close(client);
    }
    void accept_all() {
        std::vector<std::thread> carriers;
        while (!over) {
            pollfd end{listener, POLLIN, 0};
            if (::poll(&end, 1, 100) <= 0) continue;
            const int client = ::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
            if (client >= 0) carriers.emplace_back([this, client] { carry(client); });
        }
        for (std::thread& one : carriers) one.join();
    }
};

DroppingProxy::DroppingProxy(std::uint16_t server_port) : state_(std::make_unique<State>()) {
    state_->server_port = server_port;
    state_->listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = State::local(0);
    socklen_t size = sizeof address;
    if (::bind(state_->listener, reinterpret_cast<const sockaddr*>(&address), size) != 0 ||
        ::listen(state_->listener, 16) != 0 ||
        ::getsockname(state_->listener, reinterpret_cast<sockaddr*>(&address), &size) != 0)
        throw std::runtime_error("the proxy cannot listen");
    state_->port = ntohs(address.sin_port);
    state_->threads.emplace_back([this] { state_->accept_all(); });
}

DroppingProxy::~DroppingProxy() {
    state_->over = true;
    for (std::thread& one : state_->threads) one.join();
    ::close(state_->listener);
}

std::uint16_t DroppingProxy::port() const { return state_->port; }
int DroppingProxy::lost() const { return state_->lost; }

void DroppingProxy::lose(Lose what, std::string word, int times) {
    const std::lock_guard lock(state_->mutex);
    state_->what = what;
    state_->word = std::move(word);
    state_->times = times;
}

}  // namespace semel::support
