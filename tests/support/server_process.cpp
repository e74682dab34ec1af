#include "support/server_process.hpp"

#include <fcntl.h>
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
#include <cerrno>
#include <fstream>
#include <iterator>
#include <mutex>
#include <random>
#include <stdexcept>
#include <string_view>
#include <system_error>

extern char** environ;

namespace semel::support {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
namespace fs = std::filesystem;

namespace {

// Below the range that outgoing connections take their ports from.
constexpr int kFirstPort = 10'000;
constexpr int kLastPort = 29'999;

[[noreturn]] void fail(const std::string& what) { throw std::runtime_error(what); }

sockaddr_in loopback(std::uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
}

// A process that kills the servers' groups when the test program ends in whatever way: it holds the
// reading end of a pipe whose writing end dies with the program.
class Guardian {
  public:
    static Guardian& instance() {
        static Guardian one;
        return one;
    }
    void watch(pid_t group) const { tell(group); }
    void forget(pid_t group) const { tell(-group); }

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
        std::array<pid_t, 256> groups{};
        pid_t told = 0;
        while (::read(in, &told, sizeof told) == sizeof told) {
            const pid_t wanted = told > 0 ? 0 : -told;
            for (pid_t& group : groups) {
                if (group != wanted) continue;
                group = told > 0 ? told : 0;
                break;
            }
        }
        for (const pid_t group : groups) {
            if (group > 0) ::kill(-group, SIGKILL);
        }
        ::_exit(0);
    }
    int pipe_ = -1;
};

}  // namespace

bool ServerProcess::eventually(const std::function<bool()>& condition, milliseconds within) {
    const auto deadline = steady_clock::now() + within;
    while (!condition()) {
        if (steady_clock::now() > deadline) return false;
        ::poll(nullptr, 0, 5);
    }
    return true;
}

std::uint16_t ServerProcess::free_port() {
    static std::mutex mutex;
    static std::mt19937 random{std::random_device{}()};
    const std::lock_guard lock(mutex);
    std::uniform_int_distribution<int> any(kFirstPort, kLastPort);
    for (int tries = 0; tries < 1000; ++tries) {
        const auto port = static_cast<std::uint16_t>(any(random));
        const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const int on = 1;
        ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
        const sockaddr_in address = loopback(port);
        const bool free =
            ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 &&
            ::listen(fd, 1) == 0;
        ::close(fd);
        if (free) return port;
    }
    fail("no free port on 127.0.0.1");
}

bool ServerProcess::answers(std::uint16_t port) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = loopback(port);
    const bool yes =
        ::connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0;
    ::close(fd);
    return yes;
}

ServerProcess::ServerProcess(const std::string& name, std::string user)
    : user_(::getuid() == 0 ? std::move(user) : std::string{}) {
    std::string pattern = (fs::temp_directory_path() / ("semel-" + name + "-XXXXXX")).string();
    if (::mkdtemp(pattern.data()) == nullptr) fail("cannot make a temporary folder " + pattern);
    folder_ = pattern;
    give(folder_);
}

ServerProcess::~ServerProcess() {
    kill();
    std::error_code ignored;
    fs::remove_all(folder_, ignored);
}

void ServerProcess::give(const fs::path& path) const {
    if (user_.empty()) return;
    const passwd* user = ::getpwnam(user_.c_str());
    if (user == nullptr || ::chown(path.c_str(), user->pw_uid, user->pw_gid) != 0)
        fail("cannot give " + path.string() + " to the user " + user_);
}

pid_t ServerProcess::spawn(const Words& command, const Words& environment,
                           const std::string& output) const {
    Words words;
    if (!user_.empty())
        words = {"setpriv", "--reuid=" + user_, "--regid=" + user_, "--init-groups", "--"};
    words.insert(words.end(), command.begin(), command.end());
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    std::vector<char*> variables;
    for (const std::string& one : environment) variables.push_back(const_cast<char*>(one.c_str()));
    // A name given twice is taken differently by different shells.
    const auto given = [&environment](std::string_view inherited) {
        const std::string_view name = inherited.substr(0, inherited.find('=') + 1);
        return std::any_of(environment.begin(), environment.end(),
                           [name](const std::string& one) { return one.starts_with(name); });
    };
    for (char** one = environ; *one != nullptr; ++one) {
        if (!given(*one)) variables.push_back(*one);
    }
    variables.push_back(nullptr);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, output.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                     0644);
    posix_spawn_file_actions_adddup2(&actions, 1, 2);
    posix_spawn_file_actions_addchdir_np(&actions, folder_.c_str());
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setpgroup(&attributes, 0);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
    pid_t pid = -1;
    const int code =
        posix_spawnp(&pid, arguments[0], &actions, &attributes, arguments.data(), variables.data());
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    if (code != 0) fail("cannot start " + words[0] + ": " + std::generic_category().message(code));
    return pid;
}

void ServerProcess::start(const Words& command, const Words& environment) {
    kill();
    Guardian& guardian = Guardian::instance();  // before the child, or it would inherit the pipe
    pid_ = spawn(command, environment, (folder_ / "log").string());
    guardian.watch(pid_);
}

bool ServerProcess::start_until(const Words& command, const Words& environment,
                                const std::function<bool()>& ready, std::chrono::seconds within) {
    start(command, environment);
    bool ended = false;
    if (!eventually([&] { return (ended = !running()) || ready(); }, within))
        fail(command[0] + " is not ready after " + std::to_string(within.count()) + " s: " + log());
    return !ended;
}

int ServerProcess::run(const Words& command, const Words& environment, std::string* output) {
    const fs::path file = folder_ / "run.log";
    std::error_code ignored;
    fs::remove(file, ignored);
    const pid_t pid = spawn(command, environment, file.string());
    int status = 0;
    while (::waitpid(pid, &status, 0) < 0 && errno == EINTR) {
    }
    if (output != nullptr) {
        std::ifstream in(file);
        output->assign(std::istreambuf_iterator<char>(in), {});
    }
    return status;
}

bool ServerProcess::running() {
    int status = 0;
    if (pid_ < 0 || ::waitpid(pid_, &status, WNOHANG) == 0) return pid_ >= 0;
    Guardian::instance().forget(pid_);
    pid_ = -1;
    return false;
}

void ServerProcess::kill() {
    if (pid_ < 0) return;
    ::kill(-pid_, SIGKILL);
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    // Its children are not ours to wait for.
    eventually([this] { return ::kill(-pid_, 0) != 0; });
    Guardian::instance().forget(pid_);
    pid_ = -1;
}

void ServerProcess::terminate() {
    if (pid_ < 0) return;
    ::kill(pid_, SIGTERM);
    eventually([this] { return !running(); }, std::chrono::seconds{30});
    kill();
}

void ServerProcess::freeze() {
    ::kill(-pid_, SIGSTOP);
    int status = 0;
    while (::waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
    }
}

void ServerProcess::thaw() { ::kill(-pid_, SIGCONT); }

std::string ServerProcess::log() const {
    constexpr std::size_t kEnd = 3000;
    std::ifstream file(folder_ / "log");
    std::string all{std::istreambuf_iterator<char>(file), {}};
    if (all.size() > kEnd) all.erase(0, all.size() - kEnd);
    return all;
}

ServerCertificate::ServerCertificate(const fs::path& folder)
    : ca((folder / "ca.pem").string()),
      certificate((folder / "server.pem").string()),
      key((folder / "server.key").string()),
      both((folder / "both.pem").string()) {
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
                               "-CAcreateserial -extfile san -out server.pem && "
                               "cat server.key server.pem > both.pem && chmod 644 *";
    if (std::system(script.c_str()) != 0) fail("openssl did not make the test certificates");
}

}  // namespace semel::support
