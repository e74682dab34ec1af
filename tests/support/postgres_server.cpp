#include "support/postgres_server.hpp"

#include <fcntl.h>
#include <libpq-fe.h>
#include <netinet/in.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>

extern char** environ;

namespace semel::support {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
namespace fs = std::filesystem;

namespace {

using Words = std::vector<std::string>;

// Below the range that outgoing connections take their ports from.
constexpr int kFirstPort = 10'000;
constexpr int kLastPort = 29'999;
constexpr int kPortTries = 50;
constexpr seconds kStartWithin{30};
constexpr const char* kServerUser = "postgres";

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

// Free when asked; whoever starts a server on it tries another one if somebody was faster.
std::uint16_t free_port() {
    static std::mutex mutex;
    static std::mt19937 random{std::random_device{}()};
    const std::lock_guard lock(mutex);
    std::uniform_int_distribution<int> any(kFirstPort, kLastPort);
    for (int tries = 0; tries < 1000; ++tries) {
        const int port = any(random);
        const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int on = 1;
        ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_port = htons(static_cast<std::uint16_t>(port));
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        const bool free =
            ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
            ::listen(fd, 1) == 0;
        ::close(fd);
        if (free) return static_cast<std::uint16_t>(port);
    }
    fail("no free port on 127.0.0.1");
}

// A process that kills the servers when the test program ends in whatever way: it holds the reading
// end of a pipe whose writing end dies with the program.
class Guardian {
  public:
    static Guardian& instance() {
        static Guardian one;
        return one;
    }
    void watch(pid_t pid) const { tell(pid); }
    void forget(pid_t pid) const { tell(-pid); }

  private:
    Guardian() {
        int ends[2];
        if (::pipe2(ends, O_CLOEXEC) != 0) fail("no pipe for the guardian process");
        const pid_t child = ::fork();
        if (child == 0) run(ends[0]);
        ::close(ends[0]);
        pipe_ = ends[1];
    }
    void tell(pid_t pid) const {
        if (::write(pipe_, &pid, sizeof pid) != sizeof pid) fail("the guardian process is gone");
    }
    // Between fork and _exit: nothing but system calls.
    [[noreturn]] static void run(int in) {
        ::setsid();
        for (int fd = 0; fd < 1024; ++fd) {
            if (fd != in) ::close(fd);
        }
        std::array<pid_t, 512> pids{};
        pid_t told = 0;
        while (::read(in, &told, sizeof told) == sizeof told) {
            const pid_t wanted = told > 0 ? 0 : -told;
            for (pid_t& pid : pids) {
                if (pid != wanted) continue;
                pid = told > 0 ? told : 0;
                break;
            }
        }
        for (const pid_t pid : pids) {
            if (pid > 0) ::kill(pid, SIGKILL);
        }
        ::_exit(0);
    }
    int pipe_ = -1;
};

// What starts a program as the user that servers must run as: they refuse root.
Words as_server_user(Words words) {
    if (::getuid() != 0) return words;
    Words out{"setpriv", std::string("--reuid=") + kServerUser,
              std::string("--regid=") + kServerUser, "--init-groups", "--"};
    out.insert(out.end(), words.begin(), words.end());
    return out;
}

void give_to_server_user(const fs::path& path) {
    if (::getuid() != 0) return;
    const passwd* user = ::getpwnam(kServerUser);
    if (user == nullptr) fail("PostgreSQL refuses root, and there is no user postgres");
    if (::chown(path.c_str(), user->pw_uid, user->pw_gid) != 0)
        fail("cannot give " + path.string() + " to the user postgres");
}

pid_t spawn(const Words& command, const Words& more_environment, const std::string& folder,
            const std::string& input = "/dev/null") {
    const Words words = as_server_user(command);
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    std::vector<char*> environment;
    for (const std::string& one : more_environment)
        environment.push_back(const_cast<char*>(one.c_str()));
    for (char** one = environ; *one != nullptr; ++one) environment.push_back(*one);
    environment.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, input.c_str(), O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, (folder + "/log").c_str(),
                                     O_WRONLY | O_CREAT | O_APPEND, 0644);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    posix_spawn_file_actions_addchdir_np(&actions, folder.c_str());
    pid_t pid = -1;
    const int code =
        posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    if (code != 0) fail("cannot start " + words[0] + ": " + std::generic_category().message(code));
    return pid;
}

std::string text_of(const fs::path& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
}

std::string end_of(const fs::path& path) {
    constexpr std::size_t kEnd = 3000;
    std::string all = text_of(path);
    if (all.size() > kEnd) all.erase(0, all.size() - kEnd);
    return all;
}

void run_to_end(const Words& command, const fs::path& folder,
                const std::string& input = "/dev/null") {
    const pid_t pid = spawn(command, {}, folder.string(), input);
    int status = 0;
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (status != 0) fail(command[0] + " failed: " + end_of(folder / "log"));
}

fs::path make_temporary_folder() {
    // Short: a unix socket's path has 107 bytes.
    std::string pattern = (fs::temp_directory_path() / "semel-pg-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) fail("cannot make a temporary folder " + pattern);
    fs::permissions(pattern, fs::perms{0755});
    give_to_server_user(pattern);
    return pattern;
}

void remove_folder(const fs::path& folder) {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
}

std::string program(const std::string& name) {
    static const fs::path folder = [] {
        fs::path best;
        std::error_code none;
        for (const auto& one : fs::directory_iterator("/usr/lib/postgresql", none)) {
            if (fs::exists(one.path() / "bin" / "postgres") && one.path() > best) best = one.path();
        }
        return best.empty() ? fs::path() : best / "bin";
    }();
    return folder.empty() ? name : (folder / name).string();
}

// initdb takes a second or two: once for a test program, then it is copied.
class Template {
  public:
    static const fs::path& data() {
        static const Template one;
        return one.data_;
    }

  private:
    Template() : folder_(make_temporary_folder()), data_(folder_ / "data") {
        run_to_end({program("initdb"), "-D", data_.string(), "-U", "semel", "-A", "trust", "-E",
                    "UTF8", "--locale=C.UTF-8", "--no-sync", "--no-instructions"},
                   folder_);
        const fs::path script = folder_ / "script";
        std::ofstream(script) << "CREATE DATABASE semel;\n";
        run_to_end({program("postgres"), "--single", "-D", data_.string(), "-F", "postgres"},
                   folder_, script.string());
    }
    ~Template() { remove_folder(folder_); }

    fs::path folder_;
    fs::path data_;
};

char state_of(pid_t pid) {
    const std::string stat = text_of("/proc/" + std::to_string(pid) + "/stat");
    const std::size_t at = stat.rfind(')');
    return at == std::string::npos || at + 2 >= stat.size() ? 'X' : stat[at + 2];
}

bool gone(pid_t pid) {
    const char state = state_of(pid);
    return state == 'X' || state == 'Z';
}

// Every backend is a process group of its own, but a child of the postmaster.
std::vector<pid_t> children_of(pid_t parent) {
    std::vector<pid_t> out;
    std::error_code ignored;
    for (const auto& one : fs::directory_iterator("/proc", ignored)) {
        const std::string name = one.path().filename().string();
        if (name.find_first_not_of("0123456789") != std::string::npos) continue;
        const std::string stat = text_of(one.path() / "stat");
        const std::size_t at = stat.rfind(')');
        if (at == std::string::npos) continue;
        std::istringstream rest(stat.substr(at + 1));
        std::string state;
        pid_t found = 0;
        rest >> state >> found;
        if (found == parent && state != "Z") out.push_back(static_cast<pid_t>(std::stol(name)));
    }
    return out;
}

void make_certificates(const fs::path& folder) {
    const std::string script =
        "cd '" + folder.string() +
        "' && exec >/dev/null 2>&1 && "
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 "
        "-subj '/CN=semel test CA' -keyout ca.key -out ca.pem && "
        "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes "
        "-subj '/CN=semel test server' -keyout server.key -out server.csr && "
        "printf 'subjectAltName=IP:127.0.0.1,DNS:localhost' > san && "
        "openssl x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial "
        "-extfile san -out server.pem";
    if (std::system(script.c_str()) != 0) fail("openssl did not make the test certificates");
    fs::permissions(folder / "server.key", fs::perms{0600});
    give_to_server_user(folder / "server.key");
}

}  // namespace

// ---------------------------------------------------------------- a client

std::string QueryAnswer::one() const {
    return rows.empty() || rows[0].empty() ? std::string() : rows[0][0].value_or("");
}

PostgresClient::PostgresClient(const std::string& url) : connection_(PQconnectdb(url.c_str())) {
    PQsetNoticeProcessor(connection_, [](void*, const char*) {}, nullptr);
}
PostgresClient::~PostgresClient() { PQfinish(connection_); }

QueryAnswer PostgresClient::query(const std::string& sql) {
    QueryAnswer answer;
    if (PQstatus(connection_) != CONNECTION_OK) {
        answer.message = PQerrorMessage(connection_);
        return answer;
    }
    PGresult* result = PQexec(connection_, sql.c_str());
    const ExecStatusType status = PQresultStatus(result);
    answer.ok = status == PGRES_COMMAND_OK || status == PGRES_TUPLES_OK;
    if (!answer.ok) {
        const char* state = PQresultErrorField(result, PG_DIAG_SQLSTATE);
        answer.sqlstate = state == nullptr ? "" : state;
        answer.message = PQerrorMessage(connection_);
    }
    for (int row = 0; row < PQntuples(result); ++row) {
        auto& values = answer.rows.emplace_back();
        for (int column = 0; column < PQnfields(result); ++column) {
            if (PQgetisnull(result, row, column) != 0)
                values.emplace_back();
            else
                values.emplace_back(PQgetvalue(result, row, column));
        }
    }
    PQclear(result);
    return answer;
}

// ---------------------------------------------------------------- one server

PostgresServer::PostgresServer(PostgresServerOptions options) : options_(std::move(options)) {
    const fs::path& model = Template::data();
    make_folder();
    run_to_end({"cp", "-a", "--reflink=auto", model.string(), (folder_ / "data").string()},
               folder_);
    start();
}

PostgresServer::PostgresServer(const PostgresServer& primary, const std::string& name,
                               PostgresServerOptions options)
    : options_(std::move(options)) {
    make_folder();
    run_to_end({program("pg_basebackup"), "-D", (folder_ / "data").string(), "-R", "-X", "stream",
                "-c", "fast", "--no-sync", "-d",
                "host=" + primary.folder().string() + " port=" + std::to_string(primary.port()) +
                    " user=semel application_name=" + name},
               folder_);
    start();
    if (!eventually(
            [&] {
                return primary
                           .query(
                               "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming' AND "
                               "application_name = '" +
                               name + "'")
                           .one() == "1";
            },
            kStartWithin))
        fail("the standby does not reach its primary: " + log());
}

PostgresServer::~PostgresServer() {
    kill();
    remove_folder(folder_);
}

void PostgresServer::make_folder() {
    folder_ = make_temporary_folder();
    if (options_.tls) make_certificates(folder_);
}

void PostgresServer::start() {
    for (int tries = 0; tries < kPortTries; ++tries) {
        port_ = free_port();
        if (launch()) return;
    }
    fail("postgres does not start in " + folder_.string() + ": " + log());
}

void PostgresServer::write_configuration() const {
    const fs::path data = folder_ / "data";
    std::ofstream conf(data / "postgresql.conf");
    conf << "listen_addresses = '127.0.0.1'\nport = " << port_ << "\nunix_socket_directories = '"
         << folder_.string()
         << "'\nshared_buffers = 64MB\nmax_connections = 120\nlogging_collector = off\n"
            "log_line_prefix = '%m [%p] %q%a '\nmax_wal_senders = 8\nwal_keep_size = 64MB\n"
            "wal_retrieve_retry_interval = 100ms\nautovacuum_naptime = 60s\n";
    if (options_.tls) {
        conf << "ssl = on\nssl_cert_file = '" << (folder_ / "server.pem").string()
             << "'\nssl_key_file = '" << (folder_ / "server.key").string() << "'\n";
    }
    for (const std::string& line : options_.settings) conf << line << "\n";
    std::ofstream rules(data / "pg_hba.conf");
    rules << "local all all trust\nlocal replication all trust\n";
    if (!options_.host_rules.empty()) {
        for (const std::string& line : options_.host_rules) rules << line << "\n";
    } else {
        rules << (options_.tls ? "hostssl" : "host") << " all all 127.0.0.1/32 trust\n";
    }
    conf.close();
    rules.close();
    give_to_server_user(data / "postgresql.conf");
    give_to_server_user(data / "pg_hba.conf");
}

// False: the process ended by itself (a port in use). Throws if it neither ends nor answers.
bool PostgresServer::launch() {
    write_configuration();
    // Left by a killed postmaster; the number in it may be another process's by now.
    std::error_code ignored;
    fs::remove(folder_ / "data" / "postmaster.pid", ignored);
    pid_ = spawn({program("postgres"), "-D", (folder_ / "data").string()}, options_.environment,
                 folder_.string());
    Guardian::instance().watch(pid_);
    bool ended = false;
    const bool decided = eventually(
        [&] {
            int status = 0;
            if (::waitpid(pid_, &status, WNOHANG) == pid_) {
                Guardian::instance().forget(pid_);
                pid_ = -1;
                return ended = true;
            }
            return query("SELECT 1", "postgres").ok;
        },
        kStartWithin);
    if (!decided) fail("postgres does not answer within 30 s: " + log());
    if (ended && log().find("in use") == std::string::npos)
        fail("postgres ended at once: " + log());
    return !ended;
}

std::string PostgresServer::name() const { return "127.0.0.1:" + std::to_string(port_); }
std::string PostgresServer::url(const std::string& user, const std::string& database) const {
    return "postgresql://" + user + "@" + name() + "/" + database +
           (options_.tls ? "?sslmode=verify-full&sslrootcert=" + ca_file() : "");
}
std::string PostgresServer::socket_url(const std::string& database) const {
    return "postgresql:///" + database + "?host=" + folder_.string() +
           "&port=" + std::to_string(port_) + "&user=semel";
}
std::string PostgresServer::ca_file() const { return (folder_ / "ca.pem").string(); }

QueryAnswer PostgresServer::query(const std::string& sql, const std::string& database) const {
    PostgresClient client(socket_url(database) + "&connect_timeout=10");
    return client.query(sql);
}

std::string PostgresServer::ask(const std::string& sql, const std::string& database) const {
    const QueryAnswer answer = query(sql, database);
    if (!answer.ok) fail(sql + ": " + answer.message);
    return answer.one();
}

std::string PostgresServer::new_database() const {
    static std::atomic<int> count{0};
    const std::string name = "place" + std::to_string(++count);
    ask("CREATE DATABASE " + name, "postgres");
    return name;
}

void PostgresServer::kill() {
    if (pid_ < 0) return;
    // The postmaster first: it must not start or mourn children meanwhile.
    ::kill(pid_, SIGSTOP);
    const std::vector<pid_t> children = children_of(pid_);
    ::kill(pid_, SIGKILL);
    for (const pid_t pid : children) ::kill(pid, SIGKILL);
    for (const pid_t pid : frozen_) Guardian::instance().forget(pid);
    frozen_.clear();
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    Guardian::instance().forget(pid_);
    pid_ = -1;
    for (const pid_t pid : children) {
        if (!eventually([pid] { return gone(pid); })) fail("a backend outlives SIGKILL");
    }
}

void PostgresServer::freeze() {
    const auto stop = [](pid_t pid) {
        ::kill(pid, SIGSTOP);
        if (!eventually([pid] { return state_of(pid) == 'T' || gone(pid); }))
            fail("a server process does not stop");
    };
    stop(pid_);
    for (const pid_t pid : children_of(pid_)) {
        stop(pid);
        Guardian::instance().watch(pid);
        frozen_.push_back(pid);
    }
}

void PostgresServer::thaw() {
    for (const pid_t pid : frozen_) {
        ::kill(pid, SIGCONT);
        Guardian::instance().forget(pid);
    }
    frozen_.clear();
    ::kill(pid_, SIGCONT);
}

void PostgresServer::restart() {
    kill();
    if (!eventually([this] { return launch(); }, kStartWithin))
        fail("postgres does not come back on port " + std::to_string(port_) + ": " + log());
}

void PostgresServer::restart(PostgresServerOptions options) {
    kill();
    options_ = std::move(options);
    if (options_.tls && !fs::exists(folder_ / "server.pem")) make_certificates(folder_);
    restart();
}

void PostgresServer::cut_from_primary() const {
    ask("ALTER SYSTEM SET primary_conninfo = ''");
    ask("SELECT pg_reload_conf()");
    if (!eventually([this] { return ask("SELECT count(*) FROM pg_stat_wal_receiver") == "0"; }))
        fail("the standby does not leave its primary");
}

void PostgresServer::promote() const {
    ask("SELECT pg_promote(true, 30)");
    if (!eventually([this] { return ask("SELECT pg_is_in_recovery()") == "f"; }, kStartWithin))
        fail("the standby does not become a primary: " + log());
}

std::string PostgresServer::log() const { return end_of(folder_ / "log"); }
std::string PostgresServer::whole_log() const { return text_of(folder_ / "log"); }

bool PostgresServer::eventually(const std::function<bool()>& condition, milliseconds within) {
    const auto deadline = steady_clock::now() + within;
    while (!condition()) {
        if (steady_clock::now() > deadline) return false;
        ::poll(nullptr, 0, 5);
    }
    return true;
}

// ---------------------------------------------------------------- a pooler

PgBouncer::PgBouncer(const PostgresServer& server, const std::vector<std::string>& settings)
    : folder_(make_temporary_folder()) {
    std::ofstream(folder_ / "users") << "\"semel\" \"\"\n";
    for (int tries = 0; tries < kPortTries; ++tries) {
        port_ = free_port();
        std::ofstream conf(folder_ / "pgbouncer.ini");
        conf << "[databases]\n* = host=" << server.folder().string() << " port=" << server.port()
             << " user=semel\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = " << port_
             << "\nauth_type = trust\nauth_file = " << (folder_ / "users").string()
             << "\npool_mode = transaction\nunix_socket_dir =\nmax_client_conn = 200\n"
                "default_pool_size = 20\n";
        for (const std::string& line : settings) conf << line << "\n";
        conf.close();
        pid_ = spawn({"pgbouncer", (folder_ / "pgbouncer.ini").string()}, {}, folder_.string());
        Guardian::instance().watch(pid_);
        bool ended = false;
        const bool decided = PostgresServer::eventually(
            [&] {
                if (::waitpid(pid_, nullptr, WNOHANG) == pid_) {
                    Guardian::instance().forget(pid_);
                    return ended = true;
                }
                return PostgresClient(url("postgres")).query("SELECT 1").ok;
            },
            kStartWithin);
        if (decided && !ended) return;
        if (!decided) break;
    }
    fail("pgbouncer does not start: " + log());
}

PgBouncer::~PgBouncer() {
    ::kill(pid_, SIGKILL);
    while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
    }
    Guardian::instance().forget(pid_);
    remove_folder(folder_);
}

std::string PgBouncer::url(const std::string& database) const {
    return "postgresql://semel@127.0.0.1:" + std::to_string(port_) + "/" + database;
}
std::string PgBouncer::log() const { return end_of(folder_ / "log"); }

}  // namespace semel::support
