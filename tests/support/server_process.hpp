// ServerProcess: a server of a test in a temporary folder of its own, with everything it starts;
// gone with the object, also when the test program dies. What fails throws.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace semel::support {

class ServerProcess {
  public:
    using Words = std::vector<std::string>;

    /// Makes the folder. Programs run as `user` if the test is root (empty: as the test).
    explicit ServerProcess(const std::string& name, std::string user = {});
    ~ServerProcess();  ///< kill(), and removes the folder.
    ServerProcess(const ServerProcess&) = delete;
    ServerProcess& operator=(const ServerProcess&) = delete;

    [[nodiscard]] const std::filesystem::path& folder() const { return folder_; }
    [[nodiscard]] pid_t pid() const { return pid_; }

    /// Starts the server in a process group of its own, its output in folder()/log. `environment`:
    /// "NAME=value" besides the test's own.
    void start(const Words& command, const Words& environment = {});
    /// Starts it and waits until `ready`. False if it ended by itself before.
    bool start_until(const Words& command, const Words& environment,
                     const std::function<bool()>& ready, std::chrono::seconds within);
    /// Runs a program to its end in the folder; its exit status. Its output is in `output` if
    /// given.
    int run(const Words& command, const Words& environment = {}, std::string* output = nullptr);

    [[nodiscard]] bool running();
    void kill();       ///< SIGKILL to the whole group, and waits until it is gone.
    void terminate();  ///< SIGTERM to the server, and waits until it is gone.
    void freeze();     ///< SIGSTOP to the whole group, and waits until it has stopped.
    void thaw();       ///< SIGCONT.
    /// The end of its log, for a failed test's message.
    [[nodiscard]] std::string log() const;
    /// Gives a file or folder in the folder to the user that the server runs as.
    void give(const std::filesystem::path& path) const;

    /// Asks `condition` every few milliseconds until it holds; false after `within`.
    static bool eventually(const std::function<bool()>& condition,
                           std::chrono::milliseconds within = std::chrono::seconds{10});
    /// Ports of 127.0.0.1 that were free when asked.
    static std::uint16_t free_port();
    static bool answers(std::uint16_t port);  ///< Takes connections.

  private:
    pid_t spawn(const Words& command, const Words& environment, const std::string& output) const;

    std::string user_;
    std::filesystem::path folder_;
    pid_t pid_ = -1;
};

/// A certificate authority of its own and a server certificate by it for 127.0.0.1 and localhost.
struct ServerCertificate {
    /// Written into `folder` by openssl; the key also in one PEM file with its certificate.
    explicit ServerCertificate(const std::filesystem::path& folder);
    std::string ca, certificate, key, both;
};

}  // namespace semel::support
