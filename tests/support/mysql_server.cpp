#include "support/mysql_server.hpp"

#include <fcntl.h>
#include <mysql.h>
#include <netinet/in.h>
#include <poll.h>
#include <pwd.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <iterator>
#include <mutex>
#include <random>
#include <stdexcept>
#include <system_error>

extern char** environ;

namespace semel::support {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using Words = std::vector<std::string>;

// Below the range that outgoing connections take their ports from, above the Redis fixture's.
constexpr int kFirstPort = 20'000;
constexpr int kLastPort = 29'999;
constexpr int kPortTries = 50;
constexpr seconds kStartWithin{30};
constexpr unsigned kAnswerWithinSeconds = 10;
// Small, so that a server starts in a tenth of a second; the log still takes answers of megabytes.
const Words kSizes{"--innodb-buffer-pool-size=48M", "--innodb-log-file-size=48M",
                   "--innodb-log-buffer-size=4M", "--key-buffer-size=1M",
                   "--aria-pagecache-buffer-size=1M"};

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

bool eventually(const std::function<bool()>& condition, milliseconds within) {
    const auto deadline = steady_clock::now() + within;
    while (!condition()) {
        if (steady_clock::now() > deadline) return false;
        ::poll(nullptr, 0, 5);
    }
    return true;
}

bool free_now(int port) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const int on = 1;
    ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool yes = ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
                     ::listen(fd, 1) == 0;
    ::close(fd);
    return yes;
}

// Free when asked; whoever starts a server on it tries another one if somebody was faster.
std::uint16_t free_port() {
    static std::mutex mutex;
    static std::mt19937 random{std::random_device{}()};
    const std::lock_guard lock(mutex);
    std::uniform_int_distribution<int> any(kFirstPort, kLastPort);
    for (int tries = 0; tries < 1000; ++tries) {
        const int port = any(random);
        if (free_now(port)) return static_cast<std::uint16_t>(port);
    }
    fail("no free port between 20000 and 29999 on 127.0.0.1");
}

// A process that kills the servers when the test program ends in whatever way: it holds the reading
// end of a pipe whose writing end dies with the program.
class Guardian {
  public:
    static Guardian& instance() {
        static Guardian one;
        return one;
    }
    void watch(pid_t pid) { tell(pid); }
    void forget(pid_t pid) { tell(-pid); }

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
        std::array<pid_t, 256> pids{};
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

pid_t spawn(const Words& words, const Words& more_environment, const std::string& output) {
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
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                     0600);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    pid_t pid = -1;
    const int code =
        posix_spawnp(&pid, arguments[0], &actions, nullptr, arguments.data(), environment.data());
    posix_spawn_file_actions_destroy(&actions);
    if (code != 0) fail("cannot start " + words[0] + ": " + std::generic_category().message(code));
    return pid;
}

int wait_for(pid_t pid) {
    int status = 0;
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    return status;
}

// mariadbd runs as root only when told so twice: it gets the user that the package made for it.
bool as_root() { return ::geteuid() == 0; }

void hand_over(const fs::path& path) {
    if (!as_root()) return;
    const passwd* entry = ::getpwnam("mysql");
    if (entry == nullptr) fail("the tests run as root, and there is no user mysql");
    const auto own = [&](const fs::path& one) {
        if (::lchown(one.c_str(), entry->pw_uid, entry->pw_gid) != 0)
            fail("cannot give " + one.string() + " to mysql");
    };
    own(path);
    for (const auto& one : fs::recursive_directory_iterator(path)) own(one.path());
}

fs::path make_folder(const char* pattern) {
    // Short: a unix socket's path has 107 bytes.
    std::string path = (fs::temp_directory_path() / pattern).string();
    if (::mkdtemp(path.data()) == nullptr) fail("cannot make a temporary folder " + path);
    return path;
}

std::string end_of(const fs::path& file) {
    constexpr std::size_t kEnd = 2000;
    std::ifstream in(file);
    std::string all{std::istreambuf_iterator<char>(in), {}};
    if (all.size() > kEnd) all.erase(0, all.size() - kEnd);
    return all;
}

std::string program(const char* name) {
    // /usr/sbin is not in everybody's path.
    const std::string there = std::string("/usr/sbin/") + name;
    return fs::exists(there) ? there : name;
}

// The data directory of a server that has never run, made once by a test program.
class Template {
  public:
    static const Template& instance() {
        static const Template one;
        return one;
    }
    ~Template() {
        std::error_code ignored;
        fs::remove_all(folder_, ignored);
    }
    void copy_to(const fs::path& target) const {
        // Leaves holes where the log is empty.
        const std::string log = (folder_ / "copy.log").string();
        if (wait_for(spawn({"cp", "-r", "--sparse=always", data_.string(), target.string()}, {},
                           log)) != 0)
            fail("cannot copy " + data_.string() + ": " + end_of(log));
    }

  private:
    Template() : folder_(make_folder("semel-mysql-new-XXXXXX")), data_(folder_ / "data") {
        const std::string start = (folder_ / "start.sql").string();
        const std::string name = MysqlServer::user;
        std::ofstream(start) << "FLUSH PRIVILEGES;\nCREATE DATABASE " << MysqlServer::database
                             << ";\nCREATE USER '" << name << "'@'%' IDENTIFIED BY '"
                             << MysqlServer::password << "';\nGRANT ALL ON `semel%`.* TO '" << name
                             << "'@'%';\n";
        hand_over(folder_);
        Words words{"mariadb-install-db",
                    "--no-defaults",
                    "--datadir=" + data_.string(),
                    "--auth-root-authentication-method=normal",
                    "--skip-test-db",
                    "--skip-name-resolve",
                    "--character-set-server=utf8mb4",
                    "--extra-file=" + start,
                    // Two of these at once delete each other's temporary tables in a shared one.
                    "--tmpdir=" + folder_.string()};
        if (as_root()) words.emplace_back("--user=mysql");
        words.insert(words.end(), kSizes.begin(), kSizes.end());
        const std::string log = (folder_ / "log").string();
        if (wait_for(spawn(words, {}, log)) != 0)
            fail("mariadb-install-db made no data directory: " + end_of(log));
    }
    fs::path folder_, data_;
};

void make_certificates(const fs::path& folder) {
    const std::string script = "cd '" + folder.string() +
                               "' && exec >/dev/null 2>&1 && "
                               "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 "
                               "-nodes -days 2 -subj '/CN=semel test CA' "
                               "-keyout ca.key -out ca.pem && "
                               "openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 "
                               "-nodes -subj '/CN=semel test server' "
                               "-keyout server.key -out server.csr && "
                               "printf 'subjectAltName=IP:127.0.0.1,DNS:localhost' > san && "
                               "openssl x509 -req -days 2 -in server.csr -CA ca.pem -CAkey ca.key "
                               "-CAcreateserial -extfile san -out server.pem";
    if (std::system(script.c_str()) != 0) fail("openssl did not make the test certificates");
}

MYSQL* with_time_outs() {
    MYSQL* mysql = mysql_init(nullptr);
    if (mysql == nullptr) fail("out of memory");
    for (const auto option :
         {MYSQL_OPT_CONNECT_TIMEOUT, MYSQL_OPT_READ_TIMEOUT, MYSQL_OPT_WRITE_TIMEOUT})
        mysql_options(mysql, option, &kAnswerWithinSeconds);
    mysql_options(mysql, MYSQL_SET_CHARSET_NAME, "utf8mb4");
    return mysql;
}

MysqlAnswer failure(MYSQL* mysql) {
    return {.number = mysql_errno(mysql), .text = mysql_error(mysql), .rows = {}, .affected = 0};
}

}  // namespace

void MysqlConnectionClose::operator()(st_mysql* connection) const { mysql_close(connection); }

MysqlServer::MysqlServer(MysqlServerOptions options) : options_(std::move(options)) {
    folder_ = make_folder("semel-mysql-XXXXXX");
    Template::instance().copy_to(folder_ / "data");
    if (options_.tls) make_certificates(folder_);
    hand_over(folder_);
    for (int tries = 0; tries < kPortTries; ++tries) {
        port_ = free_port();
        if (!launch()) continue;
        if (options_.replica_of != 0) follow();
        return;
    }
    fail("mariadbd does not start in " + folder_.string() + ": " + log());
}

MysqlServer::~MysqlServer() {
    kill();
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
}

std::string MysqlServer::url(const std::string& in_database, const std::string& query) const {
    std::string more = query;
    if (more.empty() && options_.tls) more = "tls=verify&ca_file=" + ca_file();
    return std::string("mysql://") + user + ":" + password_encoded +
           "@127.0.0.1:" + std::to_string(port_) + "/" + in_database +
           (more.empty() ? "" : "?" + more);
}

std::string MysqlServer::socket_url(const std::string& in_database) const {
    return std::string("mysql://") + user + ":" + password_encoded + "@localhost/" + in_database +
           "?socket=" + socket_path();
}

Words MysqlServer::command_line() const {
    Words words{program("mariadbd"),
                "--no-defaults",
                "--datadir=" + (folder_ / "data").string(),
                "--socket=" + socket_path(),
                "--pid-file=" + (folder_ / "pid").string(),
                "--port=" + std::to_string(port_),
                "--bind-address=127.0.0.1",
                "--skip-name-resolve",
                "--character-set-server=utf8mb4",
                "--innodb-flush-log-at-trx-commit=1",
                "--innodb-buffer-pool-dump-at-shutdown=OFF",
                "--performance-schema=OFF",
                "--server-id=" + std::to_string(port_)};
    words.insert(words.end(), kSizes.begin(), kSizes.end());
    if (as_root()) words.emplace_back("--user=mysql");
    if (options_.binlog) {
        words.insert(words.end(), {"--log-bin=" + (folder_ / "data" / "binlog").string(),
                                   "--sync-binlog=1", "--binlog-format=ROW"});
    } else {
        words.emplace_back("--skip-log-bin");
    }
    if (options_.replica_of != 0) words.emplace_back("--read-only");
    if (options_.tls) {
        words.insert(
            words.end(),
            {"--ssl-ca=" + ca_file(), "--ssl-cert=" + (folder_ / "server.pem").string(),
             "--ssl-key=" + (folder_ / "server.key").string(), "--require-secure-transport=ON"});
    }
    words.insert(words.end(), options_.arguments.begin(), options_.arguments.end());
    return words;
}

// False: the process ended by itself (a port in use). Throws if it neither ends nor answers.
bool MysqlServer::launch() {
    std::error_code ignored;
    fs::remove(socket_path(), ignored);
    pid_ = spawn(command_line(), options_.environment, (folder_ / "log").string());
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
            return fs::exists(socket_path()) && query("SELECT 1", "").ok();
        },
        kStartWithin);
    if (!decided) fail("mariadbd does not answer within 30 s: " + log());
    if (ended && log().find("in use") == std::string::npos)
        fail("mariadbd ended at once: " + log());
    return !ended;
}

void MysqlServer::follow() const {
    const std::string primary = "CHANGE MASTER TO master_host='127.0.0.1', master_port=" +
                                std::to_string(options_.replica_of) +
                                ", master_user='root', master_use_gtid=slave_pos, "
                                "master_connect_retry=1, master_heartbeat_period=1";
    for (const std::string& statement : {primary, std::string("START SLAVE")}) {
        if (const MysqlAnswer said = query(statement, ""); !said.ok())
            fail("the replica does not start: " + said.text);
    }
}

MysqlAnswer MysqlServer::run(st_mysql* connection, const std::string& statement) {
    if (mysql_real_query(connection, statement.data(), statement.size()) != 0)
        return failure(connection);
    MysqlAnswer answer;
    if (MYSQL_RES* result = mysql_store_result(connection)) {
        const unsigned columns = mysql_num_fields(result);
        while (MYSQL_ROW row = mysql_fetch_row(result)) {
            const unsigned long* sizes = mysql_fetch_lengths(result);
            auto& values = answer.rows.emplace_back();
            for (unsigned i = 0; i < columns; ++i) {
                values.emplace_back();
                if (row[i] != nullptr) values.back() = std::string(row[i], sizes[i]);
            }
        }
        mysql_free_result(result);
    } else if (mysql_errno(connection) != 0) {
        return failure(connection);
    } else {
        answer.affected = static_cast<std::int64_t>(mysql_affected_rows(connection));
    }
    return answer;
}

MysqlAnswer MysqlServer::query(const std::string& statement, const std::string& in_database) const {
    const MysqlConnection connection(with_time_outs());
    if (mysql_real_connect(connection.get(), nullptr, "root", "",
                           in_database.empty() ? nullptr : in_database.c_str(), 0,
                           socket_path().c_str(), 0) == nullptr)
        return failure(connection.get());
    return run(connection.get(), statement);
}

MysqlConnection MysqlServer::connect(bool found_rows, const std::string& in_database) const {
    MysqlConnection connection(with_time_outs());
    if (options_.tls)
        mysql_ssl_set(connection.get(), nullptr, nullptr, ca_file().c_str(), nullptr, nullptr);
    if (mysql_real_connect(
            connection.get(), "127.0.0.1", user, password, in_database.c_str(), port_, nullptr,
            CLIENT_MULTI_STATEMENTS | (found_rows ? CLIENT_FOUND_ROWS : 0UL)) == nullptr)
        fail(std::string("the test cannot connect: ") + mysql_error(connection.get()));
    return connection;
}

std::string MysqlServer::make_database() const {
    static std::atomic<unsigned> made{0};
    const std::string name = "semel_" + std::to_string(++made);
    if (const MysqlAnswer said = query("CREATE DATABASE " + name, ""); !said.ok())
        fail("no database for a test: " + said.text);
    return name;
}

void MysqlServer::kill() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGKILL);
    wait_for(pid_);
    Guardian::instance().forget(pid_);
    pid_ = -1;
}

void MysqlServer::freeze() {
    ::kill(pid_, SIGSTOP);
    int status = 0;
    while (::waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
    }
}

void MysqlServer::thaw() { ::kill(pid_, SIGCONT); }

void MysqlServer::restart() {
    kill();
    // Its port may be an outgoing connection's in the meantime, or still be closing.
    if (!eventually([this] { return launch(); }, kStartWithin))
        fail("mariadbd does not come back on port " + std::to_string(port_) + ": " + log());
}

void MysqlServer::restart(MysqlServerOptions options) {
    kill();
    options_ = std::move(options);
    if (options_.tls && !fs::exists(ca_file())) {
        make_certificates(folder_);
        hand_over(folder_);
    }
    restart();
}

bool MysqlServer::caught_up(const MysqlServer& primary) const {
    const std::string position = primary.query("SELECT @@gtid_binlog_pos", "").value();
    const std::string wait = "SELECT MASTER_GTID_WAIT('" + position + "', 9)";
    return eventually([&] { return query(wait, "").value() == "0"; }, seconds{20});
}

std::string MysqlServer::log() const { return end_of(folder_ / "log"); }

}  // namespace semel::support
